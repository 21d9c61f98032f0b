//! Programs in the place of OCI runtimes that do not do what they are ordered to.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use conman_linux::Signal;
use conman_proto::RuntimeKind;
use conman_runtime::{ContainerKey, OciOptions, RuntimeError};
use conman_testkit::runtime_conformance::{Stage, say_skipped};

use crate::oci_host::WithRuntime;

/// A program without libraries: there are none in the container beside it.
pub(crate) fn program(code: &[u8]) -> Vec<u8> {
    const ADDRESS: u64 = 0x40_0000;
    const HEADERS: u64 = 64 + 56;
    let size = HEADERS + code.len() as u64;
    let mut file = b"\x7fELF\x02\x01\x01".to_vec();
    file.resize(16, 0);
    // An executable for x86-64, with its entry behind the headers and one segment.
    file.extend([2, 0, 0x3e, 0, 1, 0, 0, 0]);
    for number in [ADDRESS + HEADERS, 64, 0] {
        file.extend(number.to_le_bytes());
    }
    file.extend([0, 0, 0, 0, 64, 0, 56, 0, 1, 0, 64, 0, 0, 0, 0, 0]);
    // To be read and executed.
    file.extend([1, 0, 0, 0, 5, 0, 0, 0]);
    for number in [0, ADDRESS, ADDRESS, size, size, 0x1000] {
        file.extend(number.to_le_bytes());
    }
    file.extend(code);
    file
}

/// exit(0)
const NOTHING: &[u8] = &[0xb8, 60, 0, 0, 0, 0x31, 0xff, 0x0f, 0x05];
/// pause() for ever
const HANGS: &[u8] = &[0xb8, 34, 0, 0, 0, 0x0f, 0x05, 0xeb, 0xf7];

/// write(1, "rubbish\n", 8), exit(1)
fn rubbish() -> Vec<u8> {
    let write = [0xb8, 1, 0, 0, 0, 0xbf, 1, 0, 0, 0];
    // The text is behind the 24 bytes that follow.
    let text = [0x48, 0x8d, 0x35, 19, 0, 0, 0];
    let rest = [0xba, 8, 0, 0, 0, 0x0f, 0x05];
    let exit = [0xb8, 60, 0, 0, 0, 0xbf, 1, 0, 0, 0, 0x0f, 0x05];
    [&write[..], &text, &rest, &exit, b"rubbish\n"].concat()
}

/// With a program of this code in the place of the runtime, or with none.
fn instead(kind: RuntimeKind, code: Option<&[u8]>) -> Option<Stage> {
    let options = OciOptions {
        is_gvisor: kind == RuntimeKind::Gvisor,
        ..OciOptions::gvisor()
    };
    let mut harness = WithRuntime::of(kind, options)
        .map_err(|why| say_skipped(&why))
        .ok()?;
    let path = harness.host.path("instead");
    if let Some(code) = code {
        fs::write(&path, program(code)).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("changed");
    }
    harness.options.program = path;
    // Others end in their own time.
    if code == Some(HANGS) {
        harness.timeouts.start = Duration::from_secs(3);
    }
    Some(Stage::new(harness))
}

/// Both kinds of OCI runtimes: gVisor, and those whose processes the host sees.
fn kinds() -> [RuntimeKind; 2] {
    [RuntimeKind::Gvisor, "crun".parse().expect("a name")]
}

/// How a start with such a program fails. Afterwards nothing of it is left.
async fn failure(kind: RuntimeKind, code: Option<&[u8]>) -> Option<RuntimeError> {
    let stage = instead(kind, code)?;
    let plan = stage.plan("s", &["sleep", "1000"]);
    stage.runtime().create(&plan).await.expect("created");
    let started = stage.runtime().start(&plan.key).await;
    let error = started.expect_err("nothing ran the program");
    if error.is_ambiguous() {
        // As the node does then.
        kill(&stage, &plan.key);
    }
    let removed = stage
        .runtime()
        .remove(std::slice::from_ref(&plan.key))
        .await;
    assert!(removed.iter().all(Result::is_ok), "{removed:?}");
    assert_eq!(stage.pids(&plan.key), [0; 0]);
    assert!(stage.runtime().list().await.expect("listed").is_empty());
    Some(error)
}

fn kill(stage: &Stage, key: &ContainerKey) {
    for pid in stage.pids(key) {
        let _ = conman_linux::signal_process(pid, Signal::SIGKILL);
    }
    while !stage.pids(key).is_empty() {
        std::thread::park_timeout(Duration::from_millis(2));
    }
}

#[tokio::test]
async fn a_runtime_that_ends_without_having_run_anything_fails_the_start() {
    for kind in kinds() {
        let Some(error) = failure(kind, Some(NOTHING)).await else {
            return;
        };
        let ended = matches!(&error, RuntimeError::EndedAtOnce { .. });
        assert!(
            ended && error.to_string().contains("exit code 0"),
            "{kind}: {error}"
        );
    }
}

#[tokio::test]
async fn what_a_failing_runtime_prints_is_quoted() {
    for kind in kinds() {
        let Some(error) = failure(kind, Some(&rubbish())).await else {
            return;
        };
        let ended = matches!(&error, RuntimeError::EndedAtOnce { .. });
        assert!(
            ended && error.to_string().contains("rubbish"),
            "{kind}: {error}"
        );
    }
}

#[tokio::test]
async fn a_runtime_that_hangs_fails_the_start_in_time() {
    for kind in kinds() {
        let Some(error) = failure(kind, Some(HANGS)).await else {
            return;
        };
        let late = matches!(
            &error,
            RuntimeError::TimedOut {
                after_ms: 3_000,
                ..
            }
        );
        assert!(late, "{kind}: {error}");
    }
}

#[tokio::test]
async fn a_runtime_that_is_missing_fails_the_start_and_is_named() {
    for kind in kinds() {
        let Some(error) = failure(kind, None).await else {
            return;
        };
        let text = error.to_string();
        assert!(
            text.contains("/instead") && text.contains("`path` in `[runtimes]`"),
            "{kind}: {text}"
        );
    }
}
