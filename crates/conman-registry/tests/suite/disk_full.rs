//! A disk that fills up, and empties again.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use conman_registry::{Registry, RegistryError};

use crate::support::{id, only, open, release, spec};

const DIR: &str = "CONMAN_REGISTRY_TEST_DIR";
const DONE: &str = "the disk was full and is not any more";

/// Mounts a small file system where only this test's child sees it: a mount namespace of its own,
/// gone with the child.
#[test]
fn a_full_disk_refuses_claims_lets_releases_through_and_heals_by_itself() {
    let dir = tempfile::tempdir().expect("a directory");
    let binary = std::env::current_exe().expect("this binary has a path");
    let output = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-c"])
        .arg(
            "mount -t tmpfs -o size=6m,mode=0700 conman-test \"$1\" || exit 77; shift; exec \"$@\"",
        )
        .arg("sh")
        .arg(dir.path())
        .arg(binary)
        .args(only("disk_full::on_a_small_disk"))
        .env(DIR, dir.path())
        .output();
    let output = match output {
        Ok(output) => output,
        Err(error) => return skipped(&format!("unshare cannot be run: {error}")),
    };
    let errors = String::from_utf8_lossy(&output.stderr);
    let text = String::from_utf8_lossy(&output.stdout);
    let refused = output.status.code() == Some(77) || errors.contains("unshare failed");
    if refused {
        return skipped(&format!("no file system can be mounted here: {errors}"));
    }
    assert!(
        output.status.success() && text.contains(DONE),
        "{text}\n{errors}"
    );
}

fn skipped(why: &str) {
    writeln!(std::io::stderr(), "skipped: {why}").expect("standard error takes text");
}

#[tokio::test]
#[ignore = "runs on the small disk that a test of this module mounts"]
async fn on_a_small_disk() {
    let Some(dir) = std::env::var_os(DIR).map(PathBuf::from) else {
        return;
    };
    let state = dir.join("state");
    let registry = open(&state);
    let mut owned = Vec::new();
    for index in 0..200 {
        let id = id(&format!("early-{index}"));
        owned.push(registry.claim(&id, &spec()).await.expect("there is room"));
    }

    let ballast = dir.join("ballast");
    fill_up(&ballast);
    // What is already set aside still takes some; then comes a clear refusal.
    let mut refusal = None;
    for index in 0..20_000 {
        match registry.claim(&id(&format!("late-{index}")), &spec()).await {
            Ok(record) => owned.push(record),
            Err(error) => {
                refusal = Some((index, error));
                break;
            }
        }
    }
    let (index, error) = refusal.expect("a full disk refuses at last");
    assert!(error.is_retryable() && error.is_disk_full(), "{error:?}");
    assert!(
        matches!(error, RegistryError::Io { .. }),
        "refused before the disk was: {error:?}"
    );
    let refused = id(&format!("late-{index}"));
    assert_eq!(
        registry.get(&refused).await.expect("read"),
        None,
        "a refused claim is none"
    );

    // Other programs take whatever the registry gave back.
    fill_up(&dir.join("more-ballast"));
    for record in &owned {
        release(&registry, &record.id, record.generation)
            .await
            .expect("a release needs no room");
    }
    drop(registry);
    let registry = open(&state);
    let ended = registry.list().await.expect("listed");
    assert_eq!(ended.len(), owned.len());
    assert!(ended.iter().all(|record| record.state.is_ended()));

    fs::remove_file(&ballast).expect("removed");
    let record = registry
        .claim(&refused, &spec())
        .await
        .expect("there is room again");
    assert!(
        owned
            .iter()
            .all(|earlier| earlier.generation < record.generation)
    );
    writeln!(std::io::stdout(), "{DONE}").expect("the parent reads");
}

fn fill_up(path: &Path) {
    let mut file = File::create(path).expect("created");
    let block = vec![0_u8; 4096];
    while file.write_all(&block).is_ok() {}
}
