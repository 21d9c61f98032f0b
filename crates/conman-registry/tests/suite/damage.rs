//! Flipped and cut files: refused with a clear error, or opened without any generation falling.

use std::fs;
use std::path::Path;

use conman_proto::EventKind;
use conman_registry::{Journal, Registry, RegistryError, SessionRecord};

use crate::support::{claim, container, dir_in_memory, id, open, release, try_open};

const BLOCK: usize = 512;
const FILES: [&str; 2] = ["registry.redb", "generations"];

/// What was acknowledged before the damage.
struct Known {
    /// What an opened registry may hold.
    acceptable: Vec<Vec<SessionRecord>>,
    greatest: u64,
}

/// A used state directory, and a copy of its files as a crash would have left them.
async fn used(dir: &Path, crashed: &Path) -> Known {
    let registry = open(dir);
    let mut greatest = 0;
    for round in 0..30 {
        let name = format!("session-{}", round % 12);
        let generation = claim(&registry, &name).await;
        greatest = generation.get();
        registry
            .set_container(&id(&name), generation, &container())
            .await
            .expect("noted");
        // The last lives of some sessions go on.
        if round < 24 || round % 2 == 0 {
            release(&registry, &id(&name), generation)
                .await
                .expect("released");
        }
        if round % 8 == 0 {
            registry
                .forget(&id(&name), generation)
                .await
                .expect("forgotten");
        }
    }
    let earlier = registry.list().await.expect("listed");
    greatest = greatest.max(claim(&registry, "last").await.get());
    copy(dir, crashed);
    let last = registry.list().await.expect("listed");
    Known {
        acceptable: vec![last, earlier],
        greatest,
    }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("made");
    for file in ["registry.redb", "generations", "lock"] {
        fs::copy(from.join(file), to.join(file)).expect("copied");
    }
}

/// Opens a copy of `pristine` in which `file` has `content`. Returns whether it was refused.
async fn refuses(
    pristine: &Path,
    work: &Path,
    file: &str,
    content: &[u8],
    known: &Known,
    what: &str,
) -> bool {
    copy(pristine, work);
    fs::write(work.join(file), content).expect("damaged");
    let opened = loop {
        match try_open(work) {
            // A program that another test has just forked has the last one's lock until it is executed.
            Err(RegistryError::InUse { .. }) => std::thread::yield_now(),
            opened => break opened,
        }
    };
    match opened {
        Err(error) => {
            assert!(
                matches!(
                    error,
                    RegistryError::Damaged { .. }
                        | RegistryError::FloorUnknown { .. }
                        | RegistryError::OtherFormat { .. }
                        | RegistryError::Corrupt { .. }
                ),
                "{what}: not a clear refusal: {error:?}"
            );
            true
        }
        Ok(registry) => {
            let records = registry.list().await.expect("listed");
            assert!(known.acceptable.contains(&records), "{what}: {records:?}");
            let next = claim(&registry, "next").await.get();
            assert!(
                next > known.greatest,
                "{what}: {next} is not above {}",
                known.greatest
            );
            false
        }
    }
}

async fn damage_every_block(pristine: &Path, known: &Known) -> (usize, usize) {
    let work = dir_in_memory();
    let mut refused = 0;
    let mut opened = 0;
    for file in FILES {
        let whole = fs::read(pristine.join(file)).expect("read");
        for block in 0..whole.len().div_ceil(BLOCK) {
            let range = block * BLOCK..whole.len().min((block + 1) * BLOCK);
            let mut flipped = whole.clone();
            flipped[range.clone()]
                .iter_mut()
                .for_each(|byte| *byte = !*byte);
            let damages = [("flipped", &flipped[..]), ("cut", &whole[..range.start])];
            for (how, content) in damages {
                let what = format!("{file} {how} at block {block}");
                if refuses(pristine, work.path(), file, content, known, &what).await {
                    refused += 1;
                } else {
                    opened += 1;
                }
            }
        }
    }
    (refused, opened)
}

#[tokio::test]
async fn damage_after_an_orderly_end_lowers_no_generation() {
    let (dir, crashed) = (dir_in_memory(), dir_in_memory());
    let mut known = used(dir.path(), crashed.path()).await;
    known.acceptable.truncate(1);
    let (refused, opened) = damage_every_block(dir.path(), &known).await;
    assert!(
        refused > 0 && opened > 0,
        "{refused} refused, {opened} opened"
    );
}

/// After a crash a damaged newest commit cannot be told from an interrupted one, and the one before
/// is served; never anything else.
#[tokio::test]
async fn damage_after_a_crash_lowers_no_generation() {
    let (dir, crashed) = (dir_in_memory(), dir_in_memory());
    let known = used(dir.path(), crashed.path()).await;
    let (refused, opened) = damage_every_block(crashed.path(), &known).await;
    assert!(
        refused > 0 && opened > 0,
        "{refused} refused, {opened} opened"
    );
}

#[tokio::test]
async fn a_damaged_generations_file_is_not_trusted_without_the_registry_file() {
    let (dir, crashed) = (dir_in_memory(), dir_in_memory());
    used(dir.path(), crashed.path()).await;
    let path = dir.path().join("generations");
    fs::remove_file(dir.path().join("registry.redb")).expect("removed");
    let length = fs::read(&path).expect("read").len();
    fs::write(&path, vec![0; length]).expect("damaged");
    let refused = try_open(dir.path()).expect_err("nobody knows what was used");
    assert!(
        matches!(refused, RegistryError::FloorUnknown { .. }),
        "{refused:?}"
    );
}

#[tokio::test]
async fn an_old_copy_of_the_registry_file_lowers_no_generation() {
    let dir = dir_in_memory();
    let registry = open(dir.path());
    claim(&registry, "old").await;
    let copy = fs::read(dir.path().join("registry.redb")).expect("read");
    let mut greatest = 0;
    for number in 0..2_000 {
        greatest = claim(&registry, &format!("new-{number}")).await.get();
    }
    drop(registry);
    fs::write(dir.path().join("registry.redb"), copy).expect("restored");
    let registry = open(dir.path());
    assert_eq!(registry.list().await.expect("listed").len(), 1);
    assert!(claim(&registry, "next").await.get() > greatest);
}

#[tokio::test]
async fn a_registry_file_that_is_removed_while_in_use_is_written_anew() {
    let dir = dir_in_memory();
    let registry = open(dir.path());
    let generation = claim(&registry, "a").await;
    claim(&registry, "b").await;
    fs::remove_file(dir.path().join("registry.redb")).expect("removed");
    release(&registry, &id("a"), generation)
        .await
        .expect("released");
    let records = registry.list().await.expect("listed");
    drop(registry);
    let registry = open(dir.path());
    assert_eq!(registry.list().await.expect("listed"), records);
    assert!(claim(&registry, "a").await > generation);
}

#[tokio::test]
async fn a_damaged_journal_is_set_aside_and_positions_go_on_growing() {
    let dir = dir_in_memory();
    let journal = Journal::open(dir.path(), "node", 100).expect("opens");
    journal.append(
        (0..50)
            .map(|number| crate::journal::event("a", number))
            .collect(),
    );
    journal.flush().await;
    let last = journal.page(0, 100).await.expect("a page").last_seq;
    drop(journal);
    let path = dir.path().join("journal.redb");
    let mut content = fs::read(&path).expect("read");
    content[..BLOCK].fill(0xa5);
    fs::write(&path, &content).expect("damaged");

    let journal = Journal::open(dir.path(), "node", 100).expect("opens all the same");
    let aside = fs::read(dir.path().join("journal.redb.damaged")).expect("it was set aside");
    assert_eq!(aside, content);
    let page = journal.page(last, 100).await.expect("a page");
    assert!(page.truncated || page.last_seq == last, "{page:?}");
    journal.append(vec![crate::journal::event("a", 50)]);
    journal.flush().await;
    let page = journal.page(0, 100).await.expect("a page");
    assert!(page.truncated, "what was before is gone");
    assert_eq!(page.events.len(), 2);
    assert_eq!(page.events[0].kind, EventKind::EventsLost);
    assert!(page.events[0].seq > last);
    let timeline = journal.timeline(&id("a")).await.expect("a timeline");
    assert!(timeline.truncated, "what was before is gone");
}
