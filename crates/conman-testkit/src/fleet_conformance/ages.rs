//! For how long nodes have been lost.

use std::collections::BTreeMap;
use std::time::Duration;

use conman_core::retention::Age;

use super::{Member, World, answered, forget_node, join, live, peer, standing, until};
use conman_registry::PeerStanding;

const HOUR: Duration = Duration::from_secs(3_600);
/// Longer than the suite takes, and shorter than the step at which ages are stored.
const MINUTES: Duration = Duration::from_secs(300);

pub(super) async fn what_was_seen_of_a_node_that_is_gone_is_kept_until_it_is_back(
    world: &dyn World,
) {
    let [a, b, c] = join(world, ["a", "b", "c"]).await;
    let first = dies(world, &b).await;
    assert!(
        is_gone_for(&c, first, None, Duration::ZERO).await,
        "just now"
    );
    let unknown = count(&b, "unknown", Some(seen(1, HOUR))).await;
    assert_eq!(unknown, None, "no such node");
    until("it is not gone", async || {
        count(&b, "c", Some(seen(1, HOUR))).await.is_none()
    })
    .await;

    let few = Some(seen(first, MINUTES));
    assert!(is_gone_for(&b, first, few, MINUTES).await);
    assert!(
        is_gone_for(&c, first, None, Duration::ZERO).await,
        "not kept"
    );
    assert!(is_gone_for(&b, first, Some(seen(first, HOUR)), HOUR).await);
    assert!(is_gone_for(&c, first, None, HOUR).await, "kept for others");
    for less in [
        seen(first, MINUTES),
        seen(first - 1, 9 * HOUR),
        seen(first + 1, 9 * HOUR),
    ] {
        assert!(is_gone_for(&b, first, Some(less), HOUR).await, "{less:?}");
    }
    // No records of its sessions exist.
    counted(&b, BTreeMap::new()).await;
    assert!(is_gone_for(&c, first, None, HOUR).await, "it is listed");

    forget_node(&b, "a").await.expect("it owns nothing");
    for member in [&b, &c] {
        until("no node lists it", async || peer(member, "a").is_none()).await;
    }
    assert!(
        is_gone_for(&c, first, None, HOUR).await,
        "records are there"
    );
    assert!(is_gone_for(&c, first, Some(seen(first, 2 * HOUR)), 2 * HOUR).await);
    counted(&b, BTreeMap::new()).await;
    assert!(
        is_gone_for(&c, first, None, Duration::ZERO).await,
        "no trace"
    );
    assert!(is_gone_for(&c, first, Some(seen(first, HOUR)), HOUR).await);

    world.heal("a").await;
    live(&a).await;
    for member in [&b, &c] {
        until("it is seen", async || {
            standing(member, "a") == Some(PeerStanding::Live)
        })
        .await;
    }
    until("it is not gone", async || {
        count(&b, "a", Some(seen(first, 9 * HOUR))).await.is_none()
    })
    .await;
    let again = dies(world, &b).await;
    assert!(again > first, "it only grows");
    for member in [&b, &c] {
        let former = Some(seen(first, 9 * HOUR));
        assert!(is_gone_for(member, again, former, Duration::ZERO).await);
    }
}

/// Waits until `a` is declared dead. Returns the incarnation that it had.
async fn dies(world: &dyn World, seen_by: &Member) -> u64 {
    world.cut("a").await;
    until("it is missed", async || {
        standing(seen_by, "a") != Some(PeerStanding::Live)
    })
    .await;
    world.takeover_passes().await;
    until("it is declared dead", async || {
        standing(seen_by, "a") == Some(PeerStanding::Fenced)
    })
    .await;
    peer(seen_by, "a").expect("it is known").incarnation
}

fn seen(incarnation: u64, gone_for: Duration) -> Age {
    Age {
        incarnation,
        gone_for,
    }
}

/// Whether `a` counts as lost for `wanted` plus at most the suite's run time.
async fn is_gone_for(
    member: &Member,
    incarnation: u64,
    seen: Option<Age>,
    wanted: Duration,
) -> bool {
    let age = count(member, "a", seen).await.expect("it is gone");
    let suite = wanted..wanted + MINUTES;
    assert_eq!(age.incarnation, incarnation);
    suite.contains(&age.gone_for)
}

async fn count(member: &Member, name: &str, seen: Option<Age>) -> Option<Age> {
    let ages = counted(member, [(name.to_owned(), seen)].into()).await;
    ages.get(name).copied()
}

async fn counted(member: &Member, seen: BTreeMap<String, Option<Age>>) -> BTreeMap<String, Age> {
    let counted = answered("for how long nodes are gone", async || {
        member.count_gone(seen.clone()).await
    });
    counted.await.expect("told")
}
