//! The registry on a disk that refuses writes, with many callers at once.

use std::sync::Arc;

use conman_proto::{ResolvedSpec, SessionId};
use tempfile::TempDir;

use super::EmbeddedRegistry;
use super::equivalence::{Spec, ending, open, resolved};
use crate::database::faults::Faults;
use crate::{Registry, RegistryError, Release, SessionRecord};

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
    // Failures at different points of a commit, some of them after it has become durable.
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
async fn a_claim_that_nobody_waits_for_is_undone() {
    let (_dir, _faults, registry) = registry();
    let (id, spec) = (id(0), spec());
    for _ in 0..20 {
        let claim = registry.claim(&id, &spec);
        // Polled once, which queues it, and dropped.
        if let Some(answered) = futures_util::FutureExt::now_or_never(claim) {
            // The writer was done before this thread came to look.
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
