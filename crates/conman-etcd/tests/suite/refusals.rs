//! What etcd does not take.

use conman_registry::{Ending, Registry, RegistryError, Release};

use crate::etcd::Etcd;
use crate::node::{Node, ending, id, patient};

#[tokio::test]
async fn releases_that_etcd_does_not_take_together_are_taken_in_parts() {
    // Eight releases, of two writes each.
    let Some(etcd) = Etcd::start_bounded(&["--max-txn-ops", "16"]) else {
        return;
    };
    let a = Node::join(&etcd.url(), "a", patient()).await;
    let mut batch = Vec::new();
    for index in 0..40 {
        let name = format!("s-{index}");
        let generation = a.claim_at_last(&name).await;
        batch.push(Release {
            id: id(&name),
            generation,
            ending: ending(),
        });
    }
    for (index, released) in a.registry.release(batch).await.into_iter().enumerate() {
        assert!(released.is_ok(), "s-{index}: {released:?}");
    }
}

#[tokio::test]
async fn a_release_that_etcd_does_not_take_at_all_tells_why() {
    let Some(etcd) = Etcd::start_bounded(&["--max-request-bytes", "65536"]) else {
        return;
    };
    let a = Node::join(&etcd.url(), "a", patient()).await;
    let generation = a.claim("s").await.expect("free");
    let release = Release {
        id: id("s"),
        generation,
        ending: Ending {
            reason: "x".repeat(100_000),
            ..ending()
        },
    };
    for _ in 0..2 {
        let refused = a.registry.release(vec![release.clone()]).await.remove(0);
        let refused = refused.expect_err("it is too large");
        assert!(
            matches!(&refused, RegistryError::Unavailable { reason } if reason.contains("too large")),
            "{refused}"
        );
    }
    // Whatever becomes of it, others go on.
    let other = a.claim("t").await.expect("free");
    a.release("t", other).await.expect("released");
}
