//! What the tests of this package share.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use conman_proto::{Generation, ResolvedSpec, RuntimeKind, SessionId};
use conman_registry::{
    ContainerIdentity, EmbeddedOptions, EmbeddedRegistry, Ending, Registry, RegistryError, Release,
};
use conman_testkit::resolved_spec;
use jiff::Timestamp;
use tempfile::TempDir;

/// Where nothing survives a power cut anyway: for tests that open thousands of registries.
pub(crate) fn dir_in_memory() -> TempDir {
    tempfile::tempdir_in("/dev/shm")
        .or_else(|_| tempfile::tempdir())
        .expect("a directory")
}

pub(crate) fn try_open(dir: &Path) -> Result<EmbeddedRegistry, RegistryError> {
    EmbeddedRegistry::open(dir, EmbeddedOptions::default())
}

pub(crate) fn open(dir: &Path) -> EmbeddedRegistry {
    try_open(dir).expect("the registry opens")
}

pub(crate) fn open_above(dir: &Path, floor: Generation) -> Result<EmbeddedRegistry, RegistryError> {
    EmbeddedRegistry::open(
        dir,
        EmbeddedOptions {
            generation_floor: Some(floor),
        },
    )
}

pub(crate) fn generation(value: u64) -> Generation {
    Generation::new(value).expect("not zero")
}

pub(crate) fn id(name: &str) -> SessionId {
    name.parse().expect("a session id")
}

pub(crate) async fn claim(registry: &EmbeddedRegistry, name: &str) -> Generation {
    registry
        .claim(&id(name), &spec())
        .await
        .expect("the session is free")
        .generation
}

pub(crate) async fn release(
    registry: &EmbeddedRegistry,
    id: &SessionId,
    generation: Generation,
) -> Result<(), RegistryError> {
    let batch = vec![Release {
        id: id.clone(),
        generation,
        ending: ending(),
    }];
    registry.release(batch).await.remove(0)
}

pub(crate) fn spec() -> ResolvedSpec {
    ResolvedSpec {
        template: Some("python".to_owned()),
        command: vec!["python3".to_owned()],
        env: BTreeMap::from([("SECRET".to_owned(), "x".repeat(500))]),
        port: Some(8080),
        ready_path: Some("/".to_owned()),
        memory_bytes: Some(1 << 28),
        cpus: Some(0.5),
        idle_timeout_s: 600,
        ..resolved_spec(RuntimeKind::Docker, "python:demo")
    }
}

pub(crate) fn container() -> ContainerIdentity {
    ContainerIdentity {
        container_id: "0".repeat(64),
        pid: 4711,
        start_time_ticks: 1_234_567,
        boot_id: "00000000-0000-0000-0000-000000000000".to_owned(),
        addresses: Vec::new(),
    }
}

pub(crate) fn ending() -> Ending {
    Ending {
        cause: None,
        failed_phase: None,
        failed: false,
        reason: "asked to stop".to_owned(),
        exit_code: Some(137),
        ended_at: Timestamp::UNIX_EPOCH,
        started_at: None,
        phases: Default::default(),
    }
}

/// The arguments with which this test binary runs one ignored test and lets its output through.
pub(crate) fn only(test: &str) -> [&str; 4] {
    [test, "--exact", "--ignored", "--nocapture"]
}

/// This test binary, to be run as another process.
pub(crate) fn this_binary() -> Command {
    Command::new(std::env::current_exe().expect("this binary has a path"))
}
