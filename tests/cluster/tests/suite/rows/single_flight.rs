//! A session that several nodes are asked for at once.

use conman_cluster::Cluster;
use futures_util::future::join_all;

use super::fleet::Fleet;

const ROUNDS: usize = 6;

#[tokio::test]
async fn nodes_that_are_asked_for_a_session_at_once_start_it_once() {
    let Some(mut fleet) = Fleet::shared(Cluster::builder().nodes(3)).await else {
        return;
    };
    let mut before = 0;
    // One that nobody knows, and then one that has ended, wherever it was.
    for round in 0..ROUNDS {
        let asked = (0..3).map(|node| fleet.ensure_after(node, "s", before));
        let told = join_all(asked).await;
        let told = told.iter().map(|one| (&one.node, one.generation.get()));
        let told: Vec<_> = told.collect();
        assert!(told.iter().all(|one| *one == told[0]), "{told:?}");
        before = told[0].1;
        fleet.goes_on("s", before).await;
        assert_eq!(fleet.lives("s").len(), round + 1, "after {before}");
        fleet.stop(round % 3, "s").await;
    }
    fleet.leaves_nothing().await;
}
