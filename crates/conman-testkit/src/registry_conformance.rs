//! What every registry must do, as one suite that runs on all of them.
//!
//! It is plain code, not a test, so that a registry in another crate can run it too. A violated
//! requirement is a panic that names it.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::sync::Arc;

use conman_core::EndCause;
use conman_proto::{Generation, SessionId};

use conman_registry::{Ending, RecordState, Registry, RegistryError, Release, SessionRecord};

mod concurrency;
mod samples;

use concurrency::{
    any_runtime_may_release, changes_of_many_sessions_at_once_do_not_mix,
    of_simultaneous_claims_one_wins,
};
pub use samples::spec;
use samples::{claim, container, get, release, running};
pub(crate) use samples::{ending, id};

/// How many sessions the batched release covers.
const BATCH: usize = 200;

/// Runs every case, each on an empty registry created by `make`.
///
/// # Panics
/// When the registry violates a requirement.
pub async fn suite<F, M>(make: M)
where
    M: Fn() -> F,
    F: Future<Output = Arc<dyn Registry>>,
{
    a_claimed_session_has_one_owner_until_it_is_released(&*make().await).await;
    generations_grow_through_release_and_forget(&*make().await).await;
    whoever_acts_for_another_generation_changes_nothing(&*make().await).await;
    what_has_ended_stays_ended(&*make().await).await;
    notes_are_read_back_as_they_were_written(&*make().await).await;
    states_of_other_calls_cannot_be_noted(&*make().await).await;
    one_refused_release_does_not_hold_up_the_others(&*make().await).await;
    an_owned_session_cannot_be_forgotten(&*make().await).await;
    records_are_listed_by_id(&*make().await).await;
    a_claim_by_a_record_takes_only_what_is_still_so(&*make().await).await;
    what_was_deleted_while_it_could_not_end_stays_deleted(&*make().await).await;
    of_simultaneous_claims_one_wins(make().await).await;
    changes_of_many_sessions_at_once_do_not_mix(make().await).await;
    any_runtime_may_release(make().await);
}

async fn a_claimed_session_has_one_owner_until_it_is_released(registry: &dyn Registry) {
    let id = id("owned");
    assert_eq!(
        get(registry, &id).await,
        None,
        "nothing is known of a session never claimed"
    );
    let first = claim(registry, &id).await;
    assert_eq!(first.state, RecordState::Starting, "a claim is a start");
    assert_eq!(first.container, None, "a claim knows no container");
    assert_eq!(
        get(registry, &id).await.as_ref(),
        Some(&first),
        "a claim is what was returned"
    );

    let refused = registry
        .claim(&id, &spec("second"))
        .await
        .expect_err("the session is owned");
    assert!(
        matches!(&refused, RegistryError::Owned { id: named, generation }
            if *named == id && *generation == first.generation),
        "the owner is named: {refused}"
    );
    assert_eq!(
        get(registry, &id).await,
        Some(first.clone()),
        "a refused claim changes nothing"
    );

    release(registry, &id, first.generation, ending("first"))
        .await
        .expect("its owner releases");
    let again = registry
        .claim(&id, &spec("third"))
        .await
        .expect("it is free again");
    assert_eq!(
        again.spec,
        spec("third"),
        "the spec is that of the new claim"
    );
    assert_eq!(
        again.container, None,
        "the old container does not carry over"
    );
}

async fn generations_grow_through_release_and_forget(registry: &dyn Registry) {
    let ids = [id("first"), id("second")];
    let mut greatest = [0, 0];
    for round in 0..20 {
        let id = &ids[round % 2];
        let greatest = &mut greatest[round % 2];
        let record = claim(registry, id).await;
        assert!(
            record.generation.get() > *greatest,
            "generation {} of round {round} is not above {greatest}",
            record.generation
        );
        *greatest = record.generation.get();
        release(registry, id, record.generation, ending("over"))
            .await
            .expect("released");
        if round % 3 == 0 {
            registry
                .forget(id, record.generation)
                .await
                .expect("forgotten");
        }
    }
}

async fn whoever_acts_for_another_generation_changes_nothing(registry: &dyn Registry) {
    let id = id("fenced");
    let old = claim(registry, &id).await.generation;
    release(registry, &id, old, ending("over"))
        .await
        .expect("released");
    let current = claim(registry, &id).await;
    let newer = current
        .generation
        .next()
        .expect("there are more generations");

    for wrong in [old, newer] {
        for (what, refused) in every_change(registry, &id, wrong).await {
            assert!(
                matches!(&refused, Err(RegistryError::Superseded { id: named, generation, current: now })
                    if *named == id && *generation == wrong && *now == Some(current.generation)),
                "{what} for generation {wrong} was not refused as superseded: {refused:?}"
            );
        }
    }
    assert_eq!(
        get(registry, &id).await,
        Some(current),
        "nothing has changed"
    );

    let unknown = self::id("unknown");
    for (what, refused) in every_change(registry, &unknown, old).await {
        assert!(
            matches!(
                &refused,
                Err(RegistryError::Superseded { current: None, .. })
            ),
            "{what} without a record was not refused as superseded: {refused:?}"
        );
    }
    assert_eq!(get(registry, &unknown).await, None, "no record appears");
}

async fn what_has_ended_stays_ended(registry: &dyn Registry) {
    let id = id("ended");
    let generation = claim(registry, &id).await.generation;
    release(registry, &id, generation, ending("the first one"))
        .await
        .expect("released");
    let ended = get(registry, &id).await;

    release(registry, &id, generation, ending("another"))
        .await
        .expect("releasing twice succeeds");
    assert_eq!(get(registry, &id).await, ended, "the first ending stands");

    let noted = registry.set_state(&id, generation, running()).await;
    assert!(
        matches!(noted, Err(RegistryError::Ended { .. })),
        "a note was taken: {noted:?}"
    );
    let noted = registry.set_container(&id, generation, &container(1)).await;
    assert!(
        matches!(noted, Err(RegistryError::Ended { .. })),
        "a note was taken: {noted:?}"
    );
    let noted = registry.set_spec(&id, generation, &spec("other")).await;
    assert!(
        matches!(noted, Err(RegistryError::Ended { .. })),
        "a note was taken: {noted:?}"
    );
    assert_eq!(get(registry, &id).await, ended, "nothing has changed");

    registry.forget(&id, generation).await.expect("forgotten");
    assert_eq!(get(registry, &id).await, None, "nothing is known any more");
    let again = registry.forget(&id, generation).await;
    assert!(
        matches!(again, Err(RegistryError::Superseded { current: None, .. })),
        "there is nothing to forget twice: {again:?}"
    );
}

async fn notes_are_read_back_as_they_were_written(registry: &dyn Registry) {
    let id = id("noted");
    let claimed = registry.claim(&id, &spec("noted")).await.expect("claimed");
    let generation = claimed.generation;
    let mut expected = claimed;
    expected.container = Some(container(4711));
    registry
        .set_container(&id, generation, &container(4711))
        .await
        .expect("noted");
    assert_eq!(
        get(registry, &id).await,
        Some(expected.clone()),
        "the container is noted"
    );
    expected.spec.labels = [("team".to_owned(), "blau – ü".to_owned())].into();
    registry
        .set_spec(&id, generation, &expected.spec)
        .await
        .expect("noted");
    assert_eq!(
        get(registry, &id).await,
        Some(expected.clone()),
        "the spec is noted"
    );
    for state in [
        running(),
        RecordState::Stopping {
            reason: "asked to \"stop\"\n".to_owned(),
            cause: Some(EndCause::Drained),
        },
        RecordState::Stuck {
            reason: "in D state – ärgerlich".to_owned(),
            cause: Some(EndCause::Drained),
        },
    ] {
        expected.state = state.clone();
        registry
            .set_state(&id, generation, state)
            .await
            .expect("noted");
        assert_eq!(
            get(registry, &id).await,
            Some(expected.clone()),
            "the state is noted"
        );
    }
    expected.state = RecordState::Ended(ending("over"));
    release(registry, &id, generation, ending("over"))
        .await
        .expect("released");
    assert_eq!(
        get(registry, &id).await,
        Some(expected),
        "the ending is noted, the rest is kept"
    );
}

async fn states_of_other_calls_cannot_be_noted(registry: &dyn Registry) {
    let id = id("misuse");
    let claimed = claim(registry, &id).await;
    for state in [
        RecordState::Starting,
        RecordState::Ended(ending("by a note")),
    ] {
        let refused = registry.set_state(&id, claimed.generation, state).await;
        assert!(
            matches!(refused, Err(RegistryError::NotNotable { .. })),
            "only claim starts and only release ends: {refused:?}"
        );
    }
    assert_eq!(
        get(registry, &id).await,
        Some(claimed),
        "nothing has changed"
    );
}

async fn one_refused_release_does_not_hold_up_the_others(registry: &dyn Registry) {
    assert!(
        registry.release(Vec::new()).await.is_empty(),
        "nothing asked, nothing answered"
    );
    let mut batch = Vec::new();
    for index in 0..BATCH {
        let id = id(&format!("batch-{index}"));
        let mut generation = claim(registry, &id).await.generation;
        if index % 10 == 3 {
            generation = Generation::new(generation.get() + 1_000_000).expect("not zero");
        }
        batch.push(Release {
            id,
            generation,
            ending: ending("batch"),
        });
    }
    // The same session twice in a batch: the second one finds it released by this generation.
    batch.push(batch[0].clone());
    let results = registry.release(batch.clone()).await;
    assert_eq!(results.len(), batch.len(), "every entry has its result");
    for (index, result) in results.iter().enumerate() {
        let fine = match result {
            Ok(()) => index % 10 != 3,
            Err(RegistryError::Superseded { id, .. }) => index % 10 == 3 && *id == batch[index].id,
            Err(_) => false,
        };
        assert!(fine, "result {index} is out of order or wrong: {result:?}");
    }
    for record in registry.list().await.expect("listed") {
        let refused = results
            .iter()
            .zip(&batch)
            .any(|(result, release)| release.id == record.id && result.is_err());
        assert_ne!(
            record.state.is_ended(),
            refused,
            "{} is in the wrong state",
            record.id
        );
    }
}

async fn an_owned_session_cannot_be_forgotten(registry: &dyn Registry) {
    let id = id("kept");
    let generation = claim(registry, &id).await.generation;
    for state in [
        running(),
        RecordState::Stuck {
            reason: "in D state".to_owned(),
            cause: None,
        },
    ] {
        registry
            .set_state(&id, generation, state)
            .await
            .expect("noted");
        let refused = registry.forget(&id, generation).await;
        assert!(
            matches!(&refused, Err(RegistryError::Owned { generation: owner, .. })
                if *owner == generation),
            "an owned session was forgotten: {refused:?}"
        );
    }
    assert!(
        get(registry, &id).await.is_some(),
        "the record is still there"
    );
}

async fn a_claim_by_a_record_takes_only_what_is_still_so(registry: &dyn Registry) {
    let id = id("read");
    let by = async |read: &SessionRecord| registry.claim_by(&id, &spec("by"), Some(read)).await;
    let ended = async || {
        let generation = claim(registry, &id).await.generation;
        release(registry, &id, generation, ending("over"))
            .await
            .expect("released");
        get(registry, &id).await.expect("its record")
    };
    let deleted = ended().await;
    registry
        .forget(&id, deleted.generation)
        .await
        .expect("forgotten");
    let refused = by(&deleted).await;
    assert!(
        matches!(&refused, Err(RegistryError::Changed { id: named }) if *named == id),
        "what was deleted since it was read comes back: {refused:?}"
    );
    assert_eq!(get(registry, &id).await, None, "nothing has changed");

    let present = ended().await;
    let refused = by(&deleted).await;
    assert!(
        matches!(refused, Err(RegistryError::Changed { .. })),
        "another life is taken for the one that was read: {refused:?}"
    );
    assert_eq!(
        get(registry, &id).await.as_ref(),
        Some(&present),
        "nothing has changed"
    );
    let claimed = by(&present).await.expect("it is as it was read");
    assert!(
        claimed.generation > present.generation,
        "a claim is a claim"
    );
}

async fn what_was_deleted_while_it_could_not_end_stays_deleted(registry: &dyn Registry) {
    let id = id("unwanted");
    let generation = claim(registry, &id).await.generation;
    for cause in [EndCause::Preempted, EndCause::Deleted, EndCause::Preempted] {
        let stuck = RecordState::Stuck {
            reason: "in D state".to_owned(),
            cause: Some(cause),
        };
        registry
            .set_state(&id, generation, stuck)
            .await
            .expect("noted");
    }
    let resumed = registry.set_state(&id, generation, running()).await;
    resumed.expect("it changes nothing");
    let cause = async || {
        let record = get(registry, &id).await.expect("its record");
        record.state.end_cause()
    };
    assert_eq!(cause().await, Some(EndCause::Deleted), "a later note");
    let preempted = Ending {
        cause: Some(EndCause::Preempted),
        ..ending("preempted: SIGTERM")
    };
    release(registry, &id, generation, preempted)
        .await
        .expect("released");
    assert_eq!(cause().await, Some(EndCause::Deleted), "its release");
}

async fn records_are_listed_by_id(registry: &dyn Registry) {
    assert!(
        registry.list().await.expect("listed").is_empty(),
        "a new registry is empty"
    );
    let names = ["m", "z", "0", "a-b", "a", "a0", "zz", "aa"];
    for name in names {
        claim(registry, &id(name)).await;
    }
    let listed = registry.list().await.expect("listed");
    let sorted: BTreeSet<_> = names.into_iter().map(id).collect();
    assert!(
        listed.iter().map(|record| &record.id).eq(&sorted),
        "the list is ordered and whole"
    );
    for record in &listed {
        assert_eq!(
            get(registry, &record.id).await.as_ref(),
            Some(record),
            "get and list agree"
        );
    }
}

async fn every_change(
    registry: &dyn Registry,
    id: &SessionId,
    generation: Generation,
) -> BTreeMap<&'static str, Result<(), RegistryError>> {
    BTreeMap::from([
        (
            "set_container",
            registry.set_container(id, generation, &container(1)).await,
        ),
        (
            "set_state",
            registry.set_state(id, generation, running()).await,
        ),
        (
            "set_spec",
            registry.set_spec(id, generation, &spec("late")).await,
        ),
        (
            "release",
            release(registry, id, generation, ending("late")).await,
        ),
        ("forget", registry.forget(id, generation).await),
    ])
}
