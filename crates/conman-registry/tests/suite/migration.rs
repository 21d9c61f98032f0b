//! Files of other formats.

use std::path::Path;

use conman_registry::{EmbeddedRegistry, Registry, RegistryError, SessionRecord};
use redb::{Database, TableDefinition};

use crate::support::{claim, generation, id, open, release, try_open};

const SESSIONS_V0: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("sessions");
const META: TableDefinition<'_, &str, u64> = TableDefinition::new("meta");

/// Records as a running registry makes them.
async fn records(dir: &Path) -> Vec<SessionRecord> {
    let registry: EmbeddedRegistry = open(dir);
    let ended = claim(&registry, "ended").await;
    release(&registry, &id("ended"), ended)
        .await
        .expect("released");
    claim(&registry, "owned").await;
    registry.list().await.expect("listed")
}

fn write_format_0(path: &Path, records: &[SessionRecord]) {
    let database = Database::create(path).expect("created");
    let transaction = database.begin_write().expect("begun");
    {
        let mut table = transaction.open_table(SESSIONS_V0).expect("opened");
        for record in records {
            let json = serde_json::to_vec(record).expect("JSON");
            table
                .insert(record.id.as_str(), json.as_slice())
                .expect("inserted");
        }
    }
    transaction.commit().expect("committed");
}

#[tokio::test]
async fn a_file_of_format_0_is_brought_to_the_present_one_with_all_it_holds() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut old = records(&dir.path().join("present")).await;
    // A generation that only the old file knows of: format 0 had no other mark.
    old[1].generation = generation(123_456);
    let state = dir.path().join("old");
    std::fs::create_dir(&state).expect("made");
    write_format_0(&state.join("registry.redb"), &old);

    for round in 0..2 {
        let registry = open(&state);
        assert_eq!(
            registry.list().await.expect("listed"),
            old,
            "opening number {round}"
        );
    }
    let registry = open(&state);
    assert!(claim(&registry, "next").await > generation(123_456));
    release(&registry, &id("owned"), generation(123_456))
        .await
        .expect("released");
}

#[tokio::test]
async fn a_file_of_format_0_with_an_unreadable_record_is_refused_and_left_as_it_was() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("registry.redb");
    let database = Database::create(&path).expect("created");
    let transaction = database.begin_write().expect("begun");
    transaction
        .open_table(SESSIONS_V0)
        .expect("opened")
        .insert("broken", b"{}".as_slice())
        .expect("inserted");
    transaction.commit().expect("committed");
    drop(database);
    for _ in 0..2 {
        let refused = try_open(dir.path()).expect_err("it cannot be read");
        assert!(
            matches!(&refused, RegistryError::Corrupt { id, .. } if id == "broken"),
            "{refused:?}"
        );
    }
}

#[tokio::test]
async fn a_file_of_a_newer_format_is_refused_and_left_as_it_was() {
    let dir = tempfile::tempdir().expect("a directory");
    let records = records(dir.path()).await;
    let path = dir.path().join("registry.redb");
    let set_format = |format: u64| {
        let database = Database::open(&path).expect("opened");
        let transaction = database.begin_write().expect("begun");
        transaction
            .open_table(META)
            .expect("opened")
            .insert("format", format)
            .expect("inserted");
        transaction.commit().expect("committed");
    };
    set_format(2);
    let refused = try_open(dir.path()).expect_err("it is too new");
    assert!(
        matches!(
            &refused,
            RegistryError::TooNew {
                found: 2,
                known: 1,
                ..
            }
        ),
        "{refused:?}"
    );
    set_format(1);
    assert_eq!(open(dir.path()).list().await.expect("listed"), records);
}

#[test]
fn a_redb_file_of_somebody_else_is_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    drop(Database::create(dir.path().join("registry.redb")).expect("created"));
    let refused = try_open(dir.path()).expect_err("it is no registry");
    assert!(
        matches!(refused, RegistryError::Damaged { .. }),
        "{refused:?}"
    );
}
