//! What etcd does not take.

use conman_registry::{Ending, RecordState, Registry, RegistryError, Release};
use futures_util::future::join_all;

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

/// Also where etcd takes fewer operations at a time than are waiting.
#[tokio::test]
async fn of_many_concurrent_claims_each_gets_its_own_answer() {
    for limits in [&[][..], &["--max-txn-ops", "16"]] {
        let Some(etcd) = Etcd::start_bounded(limits) else {
            return;
        };
        let a = Node::join(&etcd.url(), "a", patient()).await;
        let b = Node::join(&etcd.url(), "b", patient()).await;
        let names: Vec<String> = (0..100).map(|number| format!("s-{number}")).collect();
        let claimed = join_all(names.iter().step_by(10).map(|name| a.claim(name))).await;
        assert!(claimed.iter().all(Result::is_ok), "{claimed:?}");

        let claimed = join_all(names.iter().map(|name| b.claim(name))).await;
        for (number, claimed) in claimed.iter().enumerate() {
            match claimed {
                Ok(_) => assert_ne!(number % 10, 0, "s-{number} is a's"),
                Err(RegistryError::Elsewhere { node, .. }) => {
                    assert_eq!((number % 10, node.as_str()), (0, "a"), "s-{number}");
                }
                Err(error) => panic!("s-{number}: {error}"),
            }
        }
        let stuck = RecordState::Stuck {
            reason: "a test".to_owned(),
            cause: None,
        };
        let set = names.iter().zip(claimed).filter_map(|(name, claimed)| {
            let (id, generation) = (id(name), claimed.ok()?);
            let (b, stuck) = (&b, stuck.clone());
            Some(async move {
                b.registry.set_state(&id, generation, stuck.clone()).await?;
                let record = b.registry.get(&id).await?.expect("a record");
                assert_eq!((record.generation, record.state), (generation, stuck));
                Ok::<(), RegistryError>(())
            })
        });
        let set = join_all(set).await;
        assert_eq!(set.len(), 90);
        assert!(set.iter().all(Result::is_ok), "{set:?}");
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
