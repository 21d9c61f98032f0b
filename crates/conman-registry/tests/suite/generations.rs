//! Generations grow whatever is lost.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use conman_registry::{GREATEST_GENERATION, Registry, RegistryError};

use crate::support::{claim, generation, id, open, open_above, release, spec, try_open};

/// Claims and releases so often that several blocks of generations are used up.
const MANY: usize = 2_100;

async fn greatest_after_many(dir: &Path) -> u64 {
    let registry = open(dir);
    let mut greatest = 0;
    for _ in 0..MANY {
        let generation = claim(&registry, "many").await;
        release(&registry, &id("many"), generation)
            .await
            .expect("released");
        assert!(generation.get() > greatest);
        greatest = generation.get();
    }
    claim(&registry, "kept").await.get()
}

#[tokio::test]
async fn a_new_registry_begins_with_the_first_generation() {
    let dir = tempfile::tempdir().expect("a directory");
    assert_eq!(claim(&open(dir.path()), "a").await, generation(1));
}

#[tokio::test]
async fn a_restart_keeps_the_records_and_the_generations_growing() {
    let dir = crate::support::dir_in_memory();
    let greatest = greatest_after_many(dir.path()).await;
    let registry = open(dir.path());
    assert_eq!(registry.list().await.expect("listed").len(), 2);
    assert!(claim(&registry, "next").await.get() > greatest);
}

#[tokio::test]
async fn without_the_registry_file_records_are_gone_and_generations_still_grow() {
    let dir = crate::support::dir_in_memory();
    let greatest = greatest_after_many(dir.path()).await;
    fs::remove_file(dir.path().join("registry.redb")).expect("removed");
    let registry = open(dir.path());
    assert_eq!(registry.list().await.expect("listed"), []);
    assert!(claim(&registry, "next").await.get() > greatest);
}

#[tokio::test]
async fn without_the_generations_file_everything_is_still_there() {
    let dir = crate::support::dir_in_memory();
    let greatest = greatest_after_many(dir.path()).await;
    fs::remove_file(dir.path().join("generations")).expect("removed");
    let registry = open(dir.path());
    assert_eq!(registry.list().await.expect("listed").len(), 2);
    let next = claim(&registry, "next").await.get();
    assert!(next > greatest);
    drop(registry);
    // Made anew, the file protects again.
    fs::remove_file(dir.path().join("registry.redb")).expect("removed");
    assert!(claim(&open(dir.path()), "next").await.get() > next);
}

#[tokio::test]
async fn without_both_files_a_floor_must_be_told_once() {
    let dir = tempfile::tempdir().expect("a directory");
    claim(&open(dir.path()), "a").await;
    for file in ["registry.redb", "generations"] {
        fs::remove_file(dir.path().join(file)).expect("removed");
    }
    let refused = try_open(dir.path()).expect_err("nobody knows what was used");
    assert!(
        matches!(refused, RegistryError::FloorUnknown { .. }),
        "{refused:?}"
    );
    let registry = open_above(dir.path(), generation(5_000)).expect("the floor is told");
    assert!(claim(&registry, "a").await > generation(5_000));
    drop(registry);
    assert!(claim(&open(dir.path()), "b").await > generation(5_000));
}

#[tokio::test]
async fn a_node_of_a_fleet_is_alone_only_once_it_is_told_a_floor() {
    let dir = tempfile::tempdir().expect("a directory");
    // As a fleet's registry leaves it.
    let seen = dir.path().join("etcd-seen.json");
    fs::write(&seen, "{}").expect("written");
    for _ in 0..2 {
        let refused = try_open(dir.path()).expect_err("its fleet owns what runs");
        assert!(
            matches!(&refused, RegistryError::OfFleet { path } if *path == seen),
            "{refused:?}"
        );
    }
    let registry = open_above(dir.path(), generation(5_000)).expect("the floor is told");
    assert!(claim(&registry, "a").await > generation(5_000));
    drop(registry);
    assert!(claim(&open(dir.path()), "b").await > generation(5_000));
    // What the fleet left is not this node's to open.
    assert!(conman_registry::fleet_mark::was_in_fleet(dir.path()).expect("looked"));
}

#[tokio::test]
async fn a_floor_below_what_was_used_lowers_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let registry = open_above(dir.path(), generation(70_000)).expect("it opens");
    let first = claim(&registry, "a").await;
    drop(registry);
    let registry = open_above(dir.path(), generation(3)).expect("it opens");
    assert!(claim(&registry, "b").await > first);
}

#[tokio::test]
async fn the_greatest_generation_is_the_last_and_what_is_owned_can_still_be_released() {
    let dir = tempfile::tempdir().expect("a directory");
    let floor = generation(GREATEST_GENERATION.get() - 2);
    let registry = open_above(dir.path(), floor).expect("it opens");
    assert_eq!(
        claim(&registry, "a").await.get(),
        GREATEST_GENERATION.get() - 1
    );
    let last = claim(&registry, "b").await;
    assert_eq!(last, GREATEST_GENERATION);
    let refused = registry
        .claim(&id("c"), &spec())
        .await
        .expect_err("none is left");
    assert!(matches!(refused, RegistryError::Exhausted), "{refused:?}");
    drop(registry);
    let registry = open(dir.path());
    let refused = registry
        .claim(&id("c"), &spec())
        .await
        .expect_err("none is left");
    assert!(matches!(refused, RegistryError::Exhausted), "{refused:?}");
    release(&registry, &id("b"), last).await.expect("released");
}

#[test]
fn the_files_are_their_owners_alone() {
    let root = tempfile::tempdir().expect("a directory");
    let dir = root.path().join("made/here");
    drop(open(&dir));
    let mode = |path: &Path| fs::metadata(path).expect("it exists").permissions().mode() & 0o777;
    assert_eq!(mode(&dir), 0o700);
    for file in ["registry.redb", "generations", "lock"] {
        assert_eq!(mode(&dir.join(file)), 0o600, "{file}");
    }
}
