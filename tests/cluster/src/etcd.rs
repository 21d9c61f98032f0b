//! One member of the cluster's etcd.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result};
use conman_e2e::Api;
use conman_linux::Signal;
use conman_observer::slowness;
use http::{Method, StatusCode};
use serde_json::{Value, json};

use crate::command::{inside, run, run_with_input};
use crate::forward::Forward;
use crate::layout::{Host, Layout};
use crate::process;

/// An etcd member on a host of its own.
#[derive(Debug)]
pub struct Member {
    host: Host,
    layout: Arc<Layout>,
    forward: Forward,
    process: Mutex<Option<Child>>,
    arguments: Vec<String>,
}

impl Member {
    pub(crate) fn new(layout: &Arc<Layout>, host: Host, arguments: Vec<String>) -> Result<Self> {
        let here = (std::net::Ipv4Addr::LOCALHOST, 0).into();
        let namespace = layout.namespace_path(&host.name);
        Ok(Self {
            forward: Forward::open(&namespace, &[(here, host.etcd())])?,
            layout: Arc::clone(layout),
            host,
            process: Mutex::new(None),
            arguments,
        })
    }

    #[must_use]
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// Where the machine reaches it.
    #[must_use]
    pub fn address(&self) -> std::net::SocketAddr {
        self.forward.addresses()[0]
    }

    /// Its gateway from JSON, as `/v3/kv/range`.
    #[must_use]
    pub fn gateway(&self) -> Api {
        Api::tcp(self.address())
    }

    /// Starts it, anew with the data that it had.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(&self) -> Result<()> {
        let child = spawn(&self.layout, &self.host, &self.arguments)?;
        *self.child() = Some(child);
        Ok(())
    }

    /// SIGKILL, and the wait for its end.
    ///
    /// # Errors
    /// When it does not end.
    pub fn kill(&self) -> Result<()> {
        if let Some(mut child) = self.child().take() {
            child.kill().context("cannot kill an etcd member")?;
            child.wait().context("cannot wait for an etcd member")?;
        }
        Ok(())
    }

    /// Its process, while it was not killed.
    #[must_use]
    pub fn pid(&self) -> Option<i32> {
        let child = self.child();
        child
            .as_ref()
            .and_then(|child| i32::try_from(child.id()).ok())
    }

    /// Writes all that it holds to a file.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn save_snapshot(&self, file: &Path) -> Result<()> {
        run(self.etcdctl().args(["snapshot", "save"]).arg(file)).map(drop)
    }

    /// What it holds under a key.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn value(&self, key: &str) -> Result<String> {
        run(self.etcdctl().args(["get", "--print-value-only", key]))
    }

    /// Has it hold something else there.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn set_value(&self, key: &str, value: &str) -> Result<()> {
        run(self.etcdctl().args(["put", "--", key, value])).map(drop)
    }

    /// Has it ask for passwords from now on, and know one user, who may do everything.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn ask_for_password_of_root(&self, password: &str) -> Result<()> {
        for arguments in [
            &["user", "add", &format!("root:{password}")][..],
            &["user", "grant-role", "root", "root"],
            &["auth", "enable"],
        ] {
            run(self.etcdctl().args(arguments))?;
        }
        Ok(())
    }

    /// Gives that user another one.
    ///
    /// # Errors
    /// When it does not answer, or the former one is another.
    pub fn replace_password_of_root(&self, former: &str, later: &str) -> Result<()> {
        let mut command = self.etcdctl();
        command.args(["--user", &format!("root:{former}")]);
        command.args(["user", "passwd", "root", "--interactive=false"]);
        run_with_input(&mut command, later).map(drop)
    }

    fn etcdctl(&self) -> Command {
        let mut command = inside(&self.layout.namespace_path(&self.host.name), "etcdctl");
        command.env("ETCDCTL_API", "3");
        command.args(["--endpoints", &format!("http://{}", self.host.etcd())]);
        // Without these it gives up after 2 and 5 s.
        command.args(["--dial-timeout", "60s", "--command-timeout", "120s"]);
        command
    }

    /// Ends it and has it hold what such a file holds; all members must, before any is started.
    ///
    /// # Errors
    /// When the file is none of its kind.
    pub fn restore_snapshot(&self, file: &Path) -> Result<()> {
        self.kill()?;
        let directory = self.layout.etcd_directory(&self.host.name);
        conman_linux::remove_tree(&directory).context("cannot remove an etcd member's data")?;
        let mut restore = Command::new("etcdctl");
        restore.env("ETCDCTL_API", "3");
        restore.args(["snapshot", "restore"]).arg(file);
        restore.arg("--data-dir").arg(directory);
        restore.args(identity(&self.layout, &self.host));
        run(&mut restore).map(drop)
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// When it cannot be sent.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        self.pid()
            .map_or(Ok(()), |pid| process::signal(pid, signal).map(drop))
    }

    /// Whether it answers with a leader known, and whether it is that itself.
    pub async fn leads(&self) -> Option<bool> {
        let status = self.post("/v3/maintenance/status", &json!({})).await?;
        let leader = status["leader"].as_str().filter(|id| *id != "0")?;
        Some(status["header"]["member_id"].as_str() == Some(leader))
    }

    /// A call of its gateway; `None` without a good answer in time.
    pub async fn post(&self, path: &str, body: &Value) -> Option<Value> {
        /// A member without a quorum lets requests wait.
        const PATIENCE: Duration = Duration::from_secs(5);
        let gateway = self.gateway();
        let asked = gateway.try_send(Method::POST, path, Some(body));
        let answer = tokio::time::timeout(PATIENCE * slowness(), asked).await;
        let answer = answer.ok()?.ok()?;
        (answer.status == StatusCode::OK).then(|| answer.json())
    }

    fn child(&self) -> std::sync::MutexGuard<'_, Option<Child>> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

/// Starts a member; the process is etcd itself.
pub(crate) fn spawn(layout: &Layout, host: &Host, arguments: &[String]) -> Result<Child> {
    let (client, peer) = (host.etcd(), host.etcd_peer());
    let directory = layout.etcd_directory(&host.name);
    let log = log_file(&layout.host_directory(&host.name).join("etcd.log"))?;
    let mut command = detached(&layout.namespace_path(&host.name), Path::new("etcd"));
    command
        .args(identity(layout, host))
        .arg("--data-dir")
        .arg(directory)
        .args(["--listen-client-urls", &format!("http://{client}")])
        .args(["--advertise-client-urls", &format!("http://{client}")])
        .args(["--listen-peer-urls", &format!("http://{peer}")])
        .args(["--logger", "zap"])
        .args(arguments)
        // 3.4 refuses architectures that it was not tested on without this; it is their name.
        .env("ETCD_UNSUPPORTED_ARCH", architecture())
        .stdout(log.try_clone().context("cannot share a log")?)
        .stderr(log);
    command.spawn().context("cannot start etcd")
}

/// Who it is among which members.
fn identity(layout: &Layout, host: &Host) -> Vec<String> {
    let members = layout.member_hosts();
    let every = members
        .iter()
        .map(|one| format!("{}=http://{}", one.name, one.etcd_peer()));
    let every = every.collect::<Vec<_>>().join(",");
    let own = format!("http://{}", host.etcd_peer());
    let arguments = [
        ["--name", &host.name],
        ["--initial-advertise-peer-urls", &own],
        ["--initial-cluster", &every],
        ["--initial-cluster-token", &layout.tag],
    ];
    arguments.concat().into_iter().map(str::to_owned).collect()
}

fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "aarch64" => "arm64",
        "x86_64" => "amd64",
        other => other,
    }
}

/// A log that is written on where it ended.
pub(crate) fn log_file(path: &Path) -> Result<File> {
    File::options()
        .create(true)
        .append(true)
        .open(path)
        .with_context(|| format!("cannot write {}", path.display()))
}

/// A program in a namespace that no terminal's end or Ctrl-C reaches.
pub(crate) fn detached(namespace: &Path, program: &Path) -> Command {
    let mut net = std::ffi::OsString::from("--net=");
    net.push(namespace);
    // A process that leads no group becomes a session's leader by setsid(1) without a fork.
    let mut command = Command::new("setsid");
    command.arg("nsenter").arg(net).arg("--").arg(program);
    command.stdin(Stdio::null());
    command
}
