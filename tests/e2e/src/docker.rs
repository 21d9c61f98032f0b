//! The machine's Docker, and its images for tests.

use std::fs;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};

use conman_linux::{PidFd, Signal};

use crate::docker_lock::DockerLock;

/// The smallest image: busybox with all its applets.
pub const BUSYBOX: &str = "conman-test:busybox";
/// busybox, python3 with its `websockets`, and websocketd.
pub const PYTHON: &str = "conman-test:python";

/// Where the machine's dockerd notes its process id. A cluster's own has a file of its own.
const PID_FILE: &str = "/var/run/docker.pid";

/// Bound on one call of the `docker` program, in seconds: removing a hundred containers on a
/// busy machine takes a while.
const CALL_SECONDS: &str = "180";

/// The right to use the machine's Docker, as long as it lives.
#[derive(Debug)]
pub struct Docker {
    _lock: DockerLock,
}

/// Docker, together with whoever else uses it. `None`, with a line that says why, when the test
/// cannot run on this machine.
pub async fn docker_shared() -> Option<Docker> {
    docker(DockerLock::shared).await
}

/// Docker with nobody else using it, for tests that disturb it. `None` as for [`docker_shared`].
pub async fn docker_exclusive() -> Option<Docker> {
    docker(DockerLock::exclusive).await
}

async fn docker(lock: fn() -> DockerLock) -> Option<Docker> {
    let usable = tokio::task::spawn_blocking(move || {
        let docker = Docker { _lock: lock() };
        match docker.missing() {
            None => Ok(docker),
            Some(why) => Err(why),
        }
    });
    match usable.await.expect("taking the lock does not panic") {
        Ok(docker) => Some(docker),
        Err(why) => {
            crate::lacks(&why);
            None
        }
    }
}

impl Docker {
    /// What this machine lacks. What it has once, it keeps.
    fn missing(&self) -> Option<String> {
        static HAS_ALL: AtomicBool = AtomicBool::new(false);
        if HAS_ALL.load(Ordering::Relaxed) {
            return None;
        }
        let missing = self.look_for_missing();
        HAS_ALL.store(missing.is_none(), Ordering::Relaxed);
        missing
    }

    fn look_for_missing(&self) -> Option<String> {
        if !nix::unistd::geteuid().is_root() {
            return Some("killing and entering containers needs root".to_owned());
        }
        let version = Command::new("timeout")
            .args(["20", "docker", "version", "--format", "{{.Server.Version}}"])
            .output();
        match version {
            Ok(output) if output.status.success() => {}
            Ok(output) => {
                let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
                return Some(format!("Docker does not answer: {why}"));
            }
            Err(error) => return Some(format!("the docker program cannot be run: {error}")),
        }
        [BUSYBOX, PYTHON].into_iter().find_map(|image| {
            let known = output(&["image", "inspect", image]).status.success();
            (!known).then(|| format!("the image {image} is missing; run `cargo xtask setup`"))
        })
    }

    /// Runs the `docker` program and gives what it printed.
    ///
    /// # Panics
    /// When it fails.
    pub async fn run(&self, arguments: &[&str]) -> String {
        let arguments: Vec<String> = arguments.iter().map(ToString::to_string).collect();
        tokio::task::spawn_blocking(move || {
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            run(&arguments)
        })
        .await
        .expect("docker succeeds")
    }

    /// The names of the containers of an instance, in any state.
    pub async fn containers_of(&self, instance: &str) -> Vec<String> {
        let label = instance_filter(instance);
        let names = self
            .run(&[
                "ps",
                "--all",
                "--no-trunc",
                "--filter",
                &label,
                "--format",
                "{{.Names}}",
            ])
            .await;
        names.lines().map(str::to_owned).collect()
    }

    /// One field of `docker inspect`.
    pub async fn inspect(&self, container: &str, format: &str) -> String {
        let text = self.run(&["inspect", "--format", format, container]).await;
        text.trim().to_owned()
    }

    /// Stops the machine's dockerd where it stands, until the result is dropped. Only with all of
    /// Docker.
    ///
    /// # Panics
    /// When dockerd is not found, or cannot be stopped.
    #[must_use]
    pub fn hang(&self) -> HungDockerd {
        let hung = HungDockerd(machines_dockerd());
        let stopped = hung
            .0
            .signal(Signal::SIGSTOP)
            .expect("dockerd can be stopped");
        assert!(stopped, "dockerd has ended just now");
        hung
    }
}

/// Not any dockerd: others' tests may run their own.
fn machines_dockerd() -> PidFd {
    let text = fs::read_to_string(PID_FILE).unwrap_or_else(|error| {
        panic!("dockerd does not run on this machine: {PID_FILE}: {error}")
    });
    let pid = text.trim().parse().expect("a process id");
    let process = PidFd::open(pid).expect("dockerd runs");
    // The file may be left of one that is dead, and the number another process's by now.
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    assert_eq!(
        name.trim(),
        "dockerd",
        "process {pid}, which {PID_FILE} names"
    );
    process
}

/// A dockerd that does nothing; it goes on when this is dropped.
#[derive(Debug)]
pub struct HungDockerd(PidFd);

impl HungDockerd {
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.0.pid()
    }
}

impl Drop for HungDockerd {
    fn drop(&mut self) {
        // One that has ended meanwhile needs no waking.
        let _ = self.0.signal(Signal::SIGCONT);
    }
}

pub(crate) fn instance_filter(instance: &str) -> String {
    format!("label=dev.conman.instance={instance}")
}

pub(crate) fn output(arguments: &[&str]) -> Output {
    Command::new("timeout")
        .args([CALL_SECONDS, "docker"])
        .args(arguments)
        .output()
        .expect("the docker program can be run")
}

/// Runs the `docker` program and gives what it printed; panics when it fails.
pub(crate) fn run(arguments: &[&str]) -> String {
    let output = output(arguments);
    assert!(
        output.status.success(),
        "docker {} failed: {}",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}
