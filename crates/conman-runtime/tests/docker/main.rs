//! The Docker runtime does what every runtime must, on real containers, and what dockerd is known
//! to do stays as it is known.

mod commands;
mod containers;
mod docker_relay;
mod fenced;
mod trouble;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bollard::models::{ContainerCreateBody, ContainerInspectResponse};
use bollard::query_parameters::{CreateContainerOptionsBuilder, RemoveContainerOptionsBuilder};
use bollard::{ClientVersion, Docker};
use bytes::Bytes;
use conman_core::Instance;
use conman_core::naming;
use conman_proto::{Network, TerminalSize};
use conman_runtime::{
    DockerOptions, DockerRuntime, DockerTimeouts, Exec, ExecPlan, KeptLogLimits, Lifecycle,
    LogChunk, LogOptions, Runtime, RuntimeError,
};
use conman_testkit::runtime_conformance;
use conman_testkit::runtime_conformance::{Harness, Running, Stage, say_skipped};
use docker_relay::{DOCKER_SOCKET, Relay, Treatment, socket_in};
use futures_util::TryStreamExt;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::sync::Semaphore;

const IMAGE: &str = "conman-test:busybox";
const PATIENCE: Duration = Duration::from_secs(60);

struct Dockers {
    relays: Mutex<Vec<Relay>>,
}

impl Dockers {
    fn new() -> Result<Self, String> {
        let found = std::iter::once(UnixStream::connect(DOCKER_SOCKET)).find_map(Result::ok);
        let mut stream = found.ok_or_else(|| format!("nothing listens on {DOCKER_SOCKET}"))?;
        let request = format!("GET /images/{IMAGE}/json HTTP/1.0\r\nHost: docker\r\n\r\n");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        stream
            .write_all(request.as_bytes())
            .map_err(|error| error.to_string())?;
        let mut answer = [0; 12];
        stream
            .read_exact(&mut answer)
            .map_err(|error| format!("dockerd: {error}"))?;
        if answer.ends_with(b" 200") {
            Ok(Self {
                relays: Mutex::default(),
            })
        } else {
            Err(format!(
                "the image {IMAGE} is missing; `cargo xtask test` makes it"
            ))
        }
    }
}

impl Harness for Dockers {
    fn runtime(&self, instance: &Instance) -> Arc<dyn Runtime> {
        Arc::new(connect(
            DOCKER_SOCKET.into(),
            instance,
            DockerTimeouts::default(),
        ))
    }

    fn runtime_that_loses_answers_of_start(&self, instance: &Instance) -> Arc<dyn Runtime> {
        let relay = Relay::start(|request| {
            if request.starts_with("POST") && request.contains("/start") {
                Treatment::LoseAnswer
            } else {
                Treatment::Pass
            }
        });
        let timeouts = DockerTimeouts {
            start: Duration::from_millis(500),
            ..DockerTimeouts::default()
        };
        let runtime = connect(relay.socket(), instance, timeouts);
        self.relays.lock().expect("no panic before").push(relay);
        Arc::new(runtime)
    }

    fn image(&self) -> String {
        IMAGE.to_owned()
    }

    fn keeps_commands(&self) -> bool {
        false
    }
}

fn connect(socket: PathBuf, instance: &Instance, timeouts: DockerTimeouts) -> DockerRuntime {
    let options = DockerOptions {
        timeouts,
        ..DockerOptions::new(socket, instance.clone())
    };
    DockerRuntime::connect(options).expect("the host has cgroups")
}

runtime_conformance!(Dockers::new());

/// The stage, or why there is none.
fn stage() -> Option<Stage> {
    match Dockers::new() {
        Ok(dockers) => Some(Stage::new(dockers)),
        Err(why) => {
            say_skipped(&why);
            None
        }
    }
}

/// Not the runtime's own way to dockerd.
fn docker() -> Docker {
    let version = ClientVersion {
        major_version: 1,
        minor_version: 41,
    };
    Docker::connect_with_unix(DOCKER_SOCKET, 60, &version).expect("the socket is there")
}

async fn inspect(container_id: &str) -> ContainerInspectResponse {
    docker()
        .inspect_container(container_id, None)
        .await
        .expect("it exists")
}

/// A field of `/proc/PID/status`.
fn process_status(pid: i32, field: &str) -> String {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it lives");
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    line.expect("the kernel tells it").trim().to_owned()
}

async fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let looking = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let seen = tokio::time::timeout(PATIENCE, looking).await;
    assert!(seen.is_ok(), "{what} did not come within {PATIENCE:?}");
}
