//! Requirements on calls at the same time, and from several runtimes.

use std::sync::Arc;

use conman_registry::{Registry, RegistryError};

use super::samples::{claim, container, ending, id, release, running, spec};

/// How many callers claim one session at once.
const RACERS: usize = 100;

pub(super) async fn of_simultaneous_claims_one_wins(registry: Arc<dyn Registry>) {
    let racers: Vec<_> = (0..RACERS)
        .map(|_| {
            let registry = Arc::clone(&registry);
            tokio::spawn(async move { registry.claim(&id("contested"), &spec("race")).await })
        })
        .collect();
    let mut won = Vec::new();
    let mut refused = Vec::new();
    for racer in racers {
        match racer.await.expect("a claim does not panic") {
            Ok(record) => won.push(record.generation),
            Err(RegistryError::Owned { generation, .. }) => refused.push(generation),
            Err(other) => panic!("a racing claim failed otherwise: {other}"),
        }
    }
    assert_eq!(won.len(), 1, "{} claims won", won.len());
    assert!(
        refused.iter().all(|owner| *owner == won[0]),
        "the losers were told another owner"
    );
}

pub(super) async fn changes_of_many_sessions_at_once_do_not_mix(registry: Arc<dyn Registry>) {
    let lives: Vec<_> = (0..RACERS)
        .map(|index| {
            let registry = Arc::clone(&registry);
            let id = id(&format!("life-{index}"));
            tokio::spawn(async move {
                let mut generations = Vec::new();
                for _ in 0..3 {
                    let generation = claim(&*registry, &id).await.generation;
                    generations.push(generation);
                    registry
                        .set_container(&id, generation, &container(1))
                        .await
                        .expect("noted");
                    registry
                        .set_state(&id, generation, running())
                        .await
                        .expect("noted");
                    release(&*registry, &id, generation, ending("over"))
                        .await
                        .expect("released");
                }
                generations
            })
        })
        .collect();
    for life in lives {
        let generations = life.await.expect("a life does not panic");
        assert!(
            generations.is_sorted_by(|a, b| a < b),
            "a session's generations grow"
        );
    }
    let listed = registry.list().await.expect("listed");
    assert_eq!(listed.len(), RACERS, "every session has its record");
    assert!(
        listed.iter().all(|record| record.state.is_ended()),
        "and every one has ended"
    );
}

/// The preemption thread releases sessions on a separate runtime while the others may be blocked.
/// Here the runtime that runs the suite is blocked meanwhile.
pub(super) fn any_runtime_may_release(registry: Arc<dyn Registry>) {
    let released = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        runtime
            .expect("a runtime without timers or I/O")
            .block_on(async {
                let id = id("elsewhere");
                let generation = claim(&*registry, &id).await.generation;
                release(&*registry, &id, generation, ending("elsewhere")).await
            })
    });
    released.join().expect("no panic").expect("released");
}
