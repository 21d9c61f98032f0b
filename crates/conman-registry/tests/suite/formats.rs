//! Files of other formats.

use std::path::Path;

use conman_linux::FORMAT;
use conman_registry::{EmbeddedRegistry, Registry, RegistryError, SessionRecord};
use redb::{Database, ReadableTable as _, TableDefinition};

use crate::support::{claim, id, open, release, try_open};

const SESSIONS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("session");
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

#[tokio::test]
async fn a_file_of_another_format_is_refused_with_its_floor_and_left_as_it_was() {
    let dir = tempfile::tempdir().expect("a directory");
    let records = records(dir.path()).await;
    let greatest = records.iter().map(|record| record.generation.get()).max();
    let path = dir.path().join("registry.redb");
    let set_format = |format: u32| {
        let database = Database::open(&path).expect("opened");
        let transaction = database.begin_write().expect("begun");
        transaction
            .open_table(META)
            .expect("opened")
            .insert("format", u64::from(format))
            .expect("inserted");
        transaction.commit().expect("committed");
    };
    for (format, remedy) in [
        (FORMAT - 1, "conman serve --generation-floor "),
        (FORMAT + 1, "run the newer conman"),
    ] {
        set_format(format);
        let refused = try_open(dir.path()).expect_err("it is of another format");
        assert!(refused.to_string().contains(remedy), "{refused}");
        assert!(
            matches!(
                &refused,
                RegistryError::OtherFormat { found, floor, .. } if *found == format && *floor >= greatest
            ),
            "{refused:?}"
        );
    }
    set_format(FORMAT);
    assert_eq!(open(dir.path()).list().await.expect("listed"), records);
}

#[tokio::test]
async fn a_record_with_a_field_of_a_later_version_is_read() {
    let dir = tempfile::tempdir().expect("a directory");
    let records = records(dir.path()).await;
    let database = Database::open(dir.path().join("registry.redb")).expect("opened");
    let transaction = database.begin_write().expect("begun");
    {
        let mut table = transaction.open_table(SESSIONS).expect("opened");
        let json = table.get("owned").expect("read").expect("there");
        let mut value: serde_json::Value = serde_json::from_slice(json.value()).expect("JSON");
        drop(json);
        value["hibernated"] = true.into();
        let later = serde_json::to_vec(&value).expect("JSON");
        table.insert("owned", later.as_slice()).expect("inserted");
    }
    transaction.commit().expect("committed");
    drop(database);
    let registry = open(dir.path());
    assert_eq!(registry.list().await.expect("listed"), records);
    let owned = records.iter().find(|record| record.id == id("owned"));
    let generation = owned.expect("listed").generation;
    release(&registry, &id("owned"), generation)
        .await
        .expect("released");
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
