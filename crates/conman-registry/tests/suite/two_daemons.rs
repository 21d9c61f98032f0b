//! Two daemons on one state directory.

use std::io::Write as _;
use std::path::PathBuf;

use conman_registry::{Journal, JournalError, RegistryError};

use crate::support::{only, open, this_binary, try_open};

const DIR: &str = "CONMAN_REGISTRY_TEST_DIR";

#[test]
fn the_second_registry_on_a_directory_is_refused_and_told_who_has_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let first = open(dir.path());
    let refused = try_open(dir.path()).expect_err("the directory is taken");
    assert!(
        matches!(&refused, RegistryError::InUse { holder: Some(pid), .. }
            if *pid == std::process::id()),
        "{refused:?}"
    );
    drop(first);
    drop(open(dir.path()));
}

#[test]
fn a_second_process_is_refused_and_changes_no_file() {
    let dir = tempfile::tempdir().expect("a directory");
    let first = open(dir.path());
    let before = contents(dir.path());
    let output = this_binary()
        .args(only("two_daemons::the_second_process"))
        .env(DIR, dir.path())
        .output()
        .expect("the second process runs");
    let text = String::from_utf8_lossy(&output.stdout);
    let expected = format!("refused: another conman (process {})", std::process::id());
    assert!(text.contains(&expected), "{text}");
    assert_eq!(contents(dir.path()), before);
    drop(first);
}

#[test]
#[ignore = "the second process of a test of this module"]
fn the_second_process() {
    let Some(dir) = std::env::var_os(DIR).map(PathBuf::from) else {
        return;
    };
    let text = match try_open(&dir) {
        Ok(_) => "opened".to_owned(),
        Err(error) => format!("refused: {error}"),
    };
    writeln!(std::io::stdout(), "{text}").expect("the parent reads");
}

#[test]
fn the_second_journal_on_a_directory_is_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let first = Journal::open(dir.path(), "first", 10).expect("it opens");
    let refused = Journal::open(dir.path(), "second", 10).expect_err("it is taken");
    assert!(matches!(refused, JournalError::InUse { .. }), "{refused:?}");
    drop(first);
    Journal::open(dir.path(), "third", 10).expect("it is free again");
}

fn contents(dir: &std::path::Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut contents: Vec<_> = std::fs::read_dir(dir)
        .expect("a directory")
        .map(|entry| {
            let path = entry.expect("an entry").path();
            let content = std::fs::read(&path).expect("a file");
            (path, content)
        })
        .collect();
    contents.sort();
    contents
}
