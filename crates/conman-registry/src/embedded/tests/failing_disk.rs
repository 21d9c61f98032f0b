//! The registry on a disk that refuses writes, with many callers at once.

use std::sync::Arc;

use conman_proto::{ResolvedSpec, SessionId};
use futures_util::FutureExt as _;
use tempfile::TempDir;

use super::equivalence::{Spec, ending, open, resolved};
use crate::database::tests::faults::Faults;
use crate::{EmbeddedRegistry, Registry, RegistryError, Release, SessionRecord};

const CALLERS: usize = 50;
const FOREVER: i64 = i64::MAX;

fn registry() -> (TempDir, Arc<Faults>, Arc<EmbeddedRegistry>) {
    let dir = tempfile::tempdir().expect("a directory");
    let faults = Faults::install(&dir.path().join("registry.redb"));
    let registry = Arc::new(open(dir.path()));
    (dir, faults, registry)
}

fn id(index: usize) -> SessionId {
    format!("session-{index}").parse().expect("an id")
}

fn spec() -> ResolvedSpec {
    resolved(&Spec {
        image: "image".to_owned(),
        cpus: None,
    })
}

async fn claim_all(registry: &Arc<EmbeddedRegistry>) -> Vec<Result<SessionRecord, RegistryError>> {
    let claims: Vec<_> = (0..CALLERS)
        .map(|index| {
            let registry = Arc::clone(registry);
            tokio::spawn(async move { registry.claim(&id(index), &spec()).await })
        })
        .collect();
    let mut results = Vec::new();
    for claim in claims {
        results.push(claim.await.expect("no panic"));
    }
    results
}

async fn release(registry: &EmbeddedRegistry, record: &SessionRecord) -> Result<(), RegistryError> {
    let (id, generation) = (record.id.clone(), record.generation);
    registry
        .release(vec![Release {
            id,
            generation,
            ending: ending(false),
        }])
        .await
        .remove(0)
}

#[tokio::test]
async fn a_failed_group_commit_answers_everybody_and_shows_nothing() {
    // Failures at different points of a commit, some of them after it became durable.
    for operations in 0..6 {
        let (dir, faults, registry) = registry();
        faults.fail_after(operations, FOREVER);
        for result in claim_all(&registry).await {
            let error = result.expect_err("the disk is full");
            assert!(error.is_retryable() && error.is_disk_full(), "{error:?}");
        }
        assert_eq!(registry.list().await.expect("listed"), []);
        faults.heal();
        let first = registry
            .claim(&id(0), &spec())
            .await
            .expect("the disk has room");
        drop(registry);
        let registry = open(dir.path());
        assert_eq!(registry.list().await.expect("listed"), [first]);
    }
}

#[tokio::test]
async fn a_broken_write_leads_to_a_new_file_with_all_that_was_acknowledged() {
    let (dir, faults, registry) = registry();
    let claimed: Vec<_> = claim_all(&registry)
        .await
        .into_iter()
        .map(|result| result.expect("claimed"))
        .collect();
    faults.set_full(false);
    faults.fail_after(1, 1);
    let refused = release(&registry, &claimed[0])
        .await
        .expect_err("the disk is broken");
    assert!(
        refused.is_retryable() && !refused.is_disk_full(),
        "{refused:?}"
    );
    release(&registry, &claimed[0])
        .await
        .expect("the new file takes it");
    let records = registry.list().await.expect("listed");
    assert!(
        dir.path().join("registry.redb.damaged").exists(),
        "the old file is kept"
    );
    drop(registry);
    assert_eq!(open(dir.path()).list().await.expect("listed"), records);
}

#[tokio::test]
async fn reads_neither_wait_for_a_commit_nor_see_it_before_it_is_durable() {
    let (_dir, faults, registry) = registry();
    let known = registry.claim(&id(0), &spec()).await.expect("claimed");
    let stalled = faults.stall();
    let claim = tokio::spawn({
        let registry = Arc::clone(&registry);
        async move { registry.claim(&id(1), &spec()).await }
    });
    let release = tokio::spawn({
        let (registry, known) = (Arc::clone(&registry), known.clone());
        async move { release(&registry, &known).await }
    });
    for _ in 0..100 {
        tokio::task::yield_now().await;
        let listed = registry
            .list()
            .now_or_never()
            .expect("it does not wait")
            .expect("listed");
        assert_eq!(listed.as_slice(), std::slice::from_ref(&known));
        let read = registry
            .get(&known.id)
            .now_or_never()
            .expect("it does not wait");
        assert_eq!(read.expect("read").as_ref(), Some(&known));
    }
    assert!(
        !claim.is_finished() && !release.is_finished(),
        "nothing is durable yet"
    );
    drop(stalled);
    let claimed = claim.await.expect("no panic").expect("claimed");
    release.await.expect("no panic").expect("released");
    assert_eq!(registry.get(&id(1)).await.expect("read"), Some(claimed));
    assert!(registry.list().await.expect("listed")[0].state.is_ended());
}

#[tokio::test]
async fn a_claim_that_was_answered_and_not_received_is_undone() {
    let (_dir, _faults, registry) = registry();
    let (id, spec) = (id(0), spec());
    let mut claim = registry.claim(&id, &spec);
    assert!(
        (&mut claim)
            .now_or_never()
            .is_none_or(|answer| answer.is_ok())
    );
    while registry.get(&id).await.expect("read").is_none() {
        tokio::task::yield_now().await;
    }
    // One more commit: the answer to the first one was sent before this one began.
    registry
        .claim(&super::equivalence::id_of(0), &spec)
        .await
        .expect("claimed");
    drop(claim);
    while !registry
        .get(&id)
        .await
        .expect("read")
        .expect("a record")
        .state
        .is_ended()
    {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_claim_that_nobody_waits_for_is_undone() {
    let (_dir, _faults, registry) = registry();
    let (id, spec) = (id(0), spec());
    for _ in 0..20 {
        let claim = registry.claim(&id, &spec);
        // Polled once, which queues it, and dropped.
        if let Some(answered) = claim.now_or_never() {
            // The writer was faster than this thread.
            release(&registry, &answered.expect("it was free"))
                .await
                .expect("released");
            continue;
        }
        let record = loop {
            match registry.claim(&id, &spec).await {
                Ok(record) => break record,
                Err(RegistryError::Owned { .. }) => tokio::task::yield_now().await,
                Err(other) => panic!("{other}"),
            }
        };
        release(&registry, &record).await.expect("released");
    }
}
