//! The daemon that is attacked, and what the probes do with it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use conman_core::DEFAULT_BIND_FIRST_ID;
use conman_e2e::{Answer, Api, Builder, Conman, Docker, Native};
use conman_observer::ProcEntry;
use conman_proto::ExecResult;
use http::StatusCode;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

use crate::bystander::RunningProbes;
use crate::image::{self, Entry};
use crate::releases::{Release, Releases};

/// The image with python3 and the attacks.
pub(crate) const ATTACKS: &str = "conman-test/attacks:1";

/// A session with limits that a hostile program cannot hurt this machine within.
pub(crate) const MEMORY_BYTES: u64 = 96 << 20;

/// Bound on what a helper has to do first.
const HELPER: Duration = Duration::from_secs(30);

/// What an attack came to.
#[derive(Debug)]
pub(crate) enum Verdict {
    Held(String),
    Reached(String),
    /// This host cannot show it, for this reason.
    Skipped(&'static str),
}

impl Verdict {
    /// Reached if this is so.
    pub(crate) fn reached_if(reached: bool, evidence: impl Into<String>) -> Self {
        if reached {
            Self::Reached(evidence.into())
        } else {
            Self::Held(evidence.into())
        }
    }
}

/// One daemon with native sessions, and directories of the host beside it.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) conman: Conman,
    /// Directories of the host: `binds` is allowed for binds, nothing else may change.
    directory: TempDir,
    next: AtomicU32,
    pub(crate) running: RunningProbes,
    pub(crate) releases: Releases,
}

/// Directories of the host that probes are judged by.
fn host_directory() -> TempDir {
    let directory = tempfile::Builder::new()
        .prefix("conman-hostile-")
        .tempdir()
        .expect("a directory");
    for name in ["binds", "canary", "archives"] {
        std::fs::create_dir(directory.path().join(name)).expect("made");
    }
    std::fs::write(directory.path().join("canary/file"), CANARY).expect("written");
    directory
}

impl World {
    pub(crate) async fn start(native: &Native) -> Self {
        let builder = Conman::builder().toml("[templates.filters]\nown_filters = true");
        Self::start_from(native, builder).await
    }

    /// The same with gVisor as the kernel of every session.
    pub(crate) async fn start_on_gvisor(native: &Native) -> Self {
        let runsc = std::env::var("CONMAN_RUNSC");
        let runsc = runsc.unwrap_or_else(|_| "/usr/local/bin/runsc".to_owned());
        let builder = Conman::builder()
            .set("node", "runtime = \"gvisor\"")
            .toml(&format!(
                "[runtimes.gvisor]\nkind = \"oci\"\npath = \"{runsc}\""
            ));
        Self::start_from(native, builder).await
    }

    async fn start_from(native: &Native, builder: Builder) -> Self {
        let directory = host_directory();
        let allow = format!("allow = [\"{}\"]", directory.path().join("binds").display());
        let conman = builder
            .set("binds", &allow)
            .set("limits", "max_starting = 4")
            .start_native(native)
            .await;
        let archive = image::attacks(directory.path());
        let archive = archive.to_string_lossy();
        conman
            .cli(&["image", "import", &*archive, ATTACKS])
            .await
            .success();
        Self {
            conman,
            directory,
            next: AtomicU32::new(0),
            running: RunningProbes::default(),
            releases: Releases::default(),
        }
    }

    /// The same with sessions on Docker.
    pub(crate) async fn start_on_docker(docker: &Docker) -> Self {
        let directory = host_directory();
        let archive = image::attacks(directory.path());
        let imported = Command::new("docker")
            .arg("import")
            .arg(&archive)
            .arg(ATTACKS)
            .output();
        let imported = imported.expect("docker runs");
        assert!(imported.status.success(), "{imported:?}");
        Self {
            conman: Conman::start(docker).await,
            directory,
            next: AtomicU32::new(0),
            running: RunningProbes::default(),
            releases: Releases::default(),
        }
    }

    pub(crate) fn api(&self) -> Api {
        self.conman.api()
    }

    /// An id that no session has.
    pub(crate) fn id(&self, name: &str) -> String {
        format!("{name}-{}", self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// A directory of the host that may be bound, empty.
    pub(crate) fn bindable(&self, name: &str) -> PathBuf {
        let path = self.directory.path().join("binds").join(self.id(name));
        std::fs::create_dir(&path).expect("made");
        // The session's root may write there.
        let owner = Some(DEFAULT_BIND_FIRST_ID);
        std::os::unix::fs::chown(&path, owner, owner).expect("given");
        path
    }

    /// A directory of the host that nothing in a session may see or change.
    pub(crate) fn canary(&self) -> PathBuf {
        self.directory.path().join("canary")
    }

    /// What is in the canary's directory beyond its file, or that the file was changed.
    pub(crate) fn canary_damage(&self) -> Option<String> {
        let mut names: Vec<String> = std::fs::read_dir(self.canary())
            .expect("readable")
            .map(|entry| {
                entry
                    .expect("readable")
                    .file_name()
                    .to_string_lossy()
                    .into_owned()
            })
            .filter(|name| name != "file")
            .collect();
        let content = std::fs::read_to_string(self.canary().join("file"));
        if content.ok().as_deref() != Some(CANARY) {
            names.push("file was changed".to_owned());
        }
        (!names.is_empty()).then(|| names.join(", "))
    }

    /// What to start a session with for a helper of `inside.py`.
    pub(crate) fn spec(&self, helper: &[&str]) -> Value {
        let command: Vec<&str> = ["python3", "/inside.py"]
            .iter()
            .chain(helper)
            .copied()
            .collect();
        json!({"image": ATTACKS, "command": command, "memory_bytes": MEMORY_BYTES, "pids": 64,
            "cpus": 0.5})
    }

    /// Orders a session and gives the answer, whatever it is.
    pub(crate) async fn order(&self, id: &str, spec: &Value) -> Answer {
        self.api().put(&format!("/v1/sessions/{id}"), spec).await
    }

    /// Starts a session and waits until its log has this mark.
    pub(crate) async fn start_until(&self, id: &str, spec: &Value, mark: &str) -> String {
        self.api().ensure(id, spec).await;
        let found = wait_for(HELPER, async || {
            let log = self.log(id).await;
            log.contains(mark).then_some(log)
        });
        if let Some(log) = found.await {
            return log;
        }
        let (session, log) = (self.api().session(id).await, self.log(id).await);
        self.stop(id).await;
        panic!(
            "`{mark}` did not come: {:?}, {:?}, {log}",
            session.state, session.reason
        );
    }

    /// A session of a helper, and its log once it has this mark.
    pub(crate) async fn helper(&self, name: &str, helper: &[&str], mark: &str) -> (String, String) {
        let id = self.id(name);
        let log = self.start_until(&id, &self.spec(helper), mark).await;
        (id, log)
    }

    /// Stops and forgets a session.
    pub(crate) async fn stop(&self, id: &str) -> Release {
        let alive = || self.processes(id).iter().map(|one| one.pid).collect();
        let removal = async {
            self.api().delete(&format!("/v1/sessions/{id}")).await;
        };
        self.releases.measure(id, alive, removal).await
    }

    pub(crate) async fn exec_answer(&self, id: &str, request: &Value) -> Answer {
        self.api()
            .post(&format!("/v1/sessions/{id}/exec"), request)
            .await
    }

    /// Runs a command in a session.
    pub(crate) async fn exec(&self, id: &str, command: &[&str]) -> ExecResult {
        let answer = self.exec_answer(id, &json!({"command": command})).await;
        answer.expect(StatusCode::OK)
    }

    pub(crate) async fn log(&self, id: &str) -> String {
        self.api()
            .get(&format!("/v1/sessions/{id}/logs"))
            .await
            .text()
    }

    /// The living processes of a session.
    pub(crate) fn processes(&self, id: &str) -> Vec<ProcEntry> {
        let below = format!("/conman-{}/{id}.", self.conman.instance());
        self.conman
            .processes()
            .into_iter()
            .filter(|one| one.cgroups.iter().any(|path| path.starts_with(&below)))
            .collect()
    }

    /// The host's file that holds a session's log.
    pub(crate) fn log_file(&self, id: &str) -> PathBuf {
        let containers = self.conman.state_dir().join("native/containers");
        let own = std::fs::read_dir(&containers)
            .expect("readable")
            .find_map(|entry| {
                let path = entry.ok()?.path();
                let name = path.file_name()?.to_str()?;
                name.starts_with(&format!("{id}.")).then(|| path.clone())
            });
        own.expect("the container has a directory").join("log")
    }

    /// Imports a hostile image: its name, or what `conman image import` said.
    pub(crate) async fn import(
        &self,
        name: &str,
        config: &Value,
        entries: &[Entry<'_>],
    ) -> Result<String, String> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let path = self
            .directory
            .path()
            .join(format!("archives/{name}-{number}.tar"));
        image::hostile(&path, config, entries);
        let image = format!("hostile/{name}:{number}");
        let imported = self
            .conman
            .cli(&["image", "import", &path.to_string_lossy(), &image])
            .await;
        let _ = std::fs::remove_file(path);
        match imported.code {
            Some(0) => Ok(image),
            _ => Err(imported.stderr.trim().to_owned()),
        }
    }

    /// Runs a script of busybox in a hostile image to its end and gives its log, or the refusal.
    pub(crate) async fn run_image(
        &self,
        image: &str,
        script: &str,
        more: Value,
    ) -> Result<String, String> {
        let id = self.id("image");
        let mut spec = json!({"image": image, "memory_bytes": MEMORY_BYTES, "pids": 64,
            "command": ["/bin/sh", "-c", format!("{script}; echo the end; sleep 1000000")]});
        for (key, value) in more.as_object().into_iter().flatten() {
            spec[key] = value.clone();
        }
        let answer = self.order(&id, &spec).await;
        let outcome = if answer.status == StatusCode::OK {
            wait_for(Duration::from_secs(20), async || {
                let log = self.log(&id).await;
                log.contains("the end").then_some(log)
            })
            .await
            .ok_or_else(|| "the script did not come to its end".to_owned())
        } else {
            Err(format!("{}: {}", answer.status, answer.text()))
        };
        self.stop(&id).await;
        outcome
    }
}

/// What the host's canary file holds.
pub(crate) const CANARY: &str = "a file of the host\n";

/// Looks until there is a value, or the time is over.
pub(crate) async fn wait_for<T>(
    patience: Duration,
    mut look: impl AsyncFnMut() -> Option<T>,
) -> Option<T> {
    let end = Instant::now() + patience;
    loop {
        if let Some(value) = look().await {
            return Some(value);
        }
        if Instant::now() >= end {
            return None;
        }
        sleep(Duration::from_millis(50)).await;
    }
}

/// The first line of a text that contains this, for evidence.
pub(crate) fn line_with<'a>(text: &'a str, mark: &str) -> &'a str {
    text.lines()
        .find(|line| line.contains(mark))
        .unwrap_or_default()
}

/// Whether anything of a directory's content is this file's.
pub(crate) fn exists(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok()
}
