//! An etcd of one member or of three, of the distribution's package, for one test.

use std::ffi::OsString;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// A loaded machine takes its time.
const START_PATIENCE: Duration = Duration::from_secs(60);

/// Loopback addresses are this machine's alone and all of them usable: one a process and etcd, so
/// that ports need no finding.
static NEXT: AtomicU8 = AtomicU8::new(0);

#[derive(Debug)]
pub(crate) struct Etcd {
    name: &'static str,
    address: Ipv4Addr,
    /// All members and where they reach each other.
    cluster: String,
    dir: TempDir,
    more: Vec<String>,
    child: Option<Child>,
    files: Option<Files>,
}

/// By which it shows who it is and asks clients who they are, and one for etcdctl.
#[derive(Debug)]
pub(crate) struct Files {
    pub(crate) ca: PathBuf,
    pub(crate) server: (PathBuf, PathBuf),
    pub(crate) client: (PathBuf, PathBuf),
}

impl Etcd {
    /// One that answers; nothing where there is no etcd.
    pub(crate) fn start() -> Option<Self> {
        Self::begun(&[], |_, _| None)
    }

    /// The same with further arguments.
    pub(crate) fn start_bounded(more: &[&str]) -> Option<Self> {
        Self::begun(more, |_, _| None)
    }

    /// One that answers only by TLS those whom it knows by their certificates: those that `files`
    /// writes to a directory, for a server of this address.
    pub(crate) fn start_with(files: impl FnOnce(&Path, Ipv4Addr) -> Option<Files>) -> Option<Self> {
        Self::begun(&[], files)
    }

    /// Three of which each answers only by TLS as well; `files` is told which of them they are for.
    pub(crate) fn start_three(
        mut files: impl FnMut(usize, &Path, Ipv4Addr) -> Files,
    ) -> Option<[Self; 3]> {
        let mut index = 0;
        let mut member = |name| {
            let member = Self::new(name, &[], |dir, address| Some(files(index, dir, address)));
            index += 1;
            member
        };
        let mut members = [member("one")?, member("two")?, member("three")?];
        let cluster = members.each_ref().map(|member| member.cluster.clone());
        for member in &mut members {
            member.cluster = cluster.join(",");
            member.spawn();
        }
        for member in &mut members {
            member.answers();
        }
        Some(members)
    }

    fn begun(more: &[&str], files: impl FnOnce(&Path, Ipv4Addr) -> Option<Files>) -> Option<Self> {
        let mut etcd = Self::new("one", more, files)?;
        etcd.begin();
        Some(etcd)
    }

    fn new(
        name: &'static str,
        more: &[&str],
        files: impl FnOnce(&Path, Ipv4Addr) -> Option<Files>,
    ) -> Option<Self> {
        let installed = Command::new("etcd")
            .arg("--version")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        if installed.is_err() {
            skip();
            return None;
        }
        let [_, _, high, low] = std::process::id().to_be_bytes();
        let address = Ipv4Addr::new(127, 100 + NEXT.fetch_add(1, Ordering::Relaxed), high, low);
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        let dir = dir.expect("a directory");
        Some(Self {
            name,
            address,
            cluster: format!("{name}={}", peer_url(address)),
            files: files(dir.path(), address),
            dir,
            more: more.iter().map(|one| (*one).to_owned()).collect(),
            child: None,
        })
    }

    pub(crate) fn url(&self) -> String {
        let scheme = self.files.as_ref().map_or("http", |_| "https");
        format!("{scheme}://{}:2379", self.address)
    }

    pub(crate) fn address(&self) -> std::net::SocketAddr {
        (self.address, 2379).into()
    }

    /// Starts it on what it has, or on nothing.
    pub(crate) fn begin(&mut self) {
        self.spawn();
        self.answers();
    }

    fn spawn(&mut self) {
        let (client, peer) = (self.url(), peer_url(self.address));
        let child = Command::new("etcd")
            .args(["--name", self.name])
            .args(["--log-level", "error", "--logger", "zap"])
            .arg("--data-dir")
            .arg(self.dir.path().join("data"))
            .args(["--listen-client-urls", &client])
            .args(["--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer])
            .args(["--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &self.cluster])
            .args(self.server_arguments())
            .args(&self.more)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .expect("etcd runs");
        self.child = Some(child);
    }

    fn answers(&mut self) {
        let client = self.url();
        let begun = Instant::now();
        while TcpStream::connect(self.address()).is_err() || !self.is_healthy() {
            let child = self.child.as_mut().expect("it was started");
            if let Some(status) = child.try_wait().expect("its status") {
                panic!("etcd on {client} has ended, {status}");
            }
            assert!(begun.elapsed() < START_PATIENCE, "etcd does not answer");
            pause();
        }
    }

    fn server_arguments(&self) -> Vec<OsString> {
        let Some(Files { ca, server, .. }) = &self.files else {
            return Vec::new();
        };
        let mut arguments = vec!["--client-cert-auth".into()];
        for (name, file) in [
            ("--trusted-ca-file", ca),
            ("--cert-file", &server.0),
            ("--key-file", &server.1),
        ] {
            arguments.extend([name.into(), file.into()]);
        }
        arguments
    }

    fn client_arguments(&self) -> Vec<OsString> {
        let Some(Files { ca, client, .. }) = &self.files else {
            return Vec::new();
        };
        let pairs = [
            ("--cacert", ca),
            ("--cert", &client.0),
            ("--key", &client.1),
        ];
        let both = |(name, file): (&str, &PathBuf)| [name.into(), file.into()];
        pairs.into_iter().flat_map(both).collect()
    }

    fn is_healthy(&self) -> bool {
        self.ctl(&["endpoint", "health"]).is_ok()
    }

    /// Ends it without a word.
    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Ends it and all that it knew.
    pub(crate) fn wipe(&mut self) {
        self.kill();
        std::fs::remove_dir_all(self.dir.path().join("data")).expect("removed");
    }

    /// Asks for passwords from now on, and knows one user, who may do everything.
    pub(crate) fn asks_for_password_of_root(&self, password: &str) {
        for arguments in [
            &["user", "add", &format!("root:{password}")][..],
            &["user", "grant-role", "root", "root"],
            &["auth", "enable"],
        ] {
            self.ctl(arguments).expect("users are set up");
        }
    }

    /// Gives that user another one.
    pub(crate) fn replace_password_of_root(&self, former: &str, later: &str) {
        let input = self.dir.path().join("password");
        std::fs::write(&input, later).expect("written");
        let input = std::fs::File::open(input).expect("readable");
        let user = format!("root:{former}");
        let done = self.run_ctl(
            &[
                "--user",
                &user,
                "user",
                "passwd",
                "root",
                "--interactive=false",
            ],
            input.into(),
        );
        done.expect("the password is replaced");
    }

    /// How many calls of this method it has begun to serve, by its own figures.
    pub(crate) fn count_of(&self, method: &str) -> usize {
        let mut line = TcpStream::connect(self.address()).expect("it answers");
        line.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")
            .expect("asked");
        let mut figures = String::new();
        line.read_to_string(&mut figures).expect("answered");
        let name = format!("grpc_method=\"{method}\",grpc_service=\"etcdserverpb.KV\"");
        let started = figures
            .lines()
            .find(|line| line.starts_with("grpc_server_started_total{") && line.contains(&name));
        let count = started.and_then(|line| line.rsplit(' ').next()?.parse().ok());
        count.unwrap_or_else(|| panic!("etcd tells nothing of {method}: {figures}"))
    }

    /// Which revision is current.
    pub(crate) fn revision(&self) -> i64 {
        let answer = self.ctl(&["get", "none", "-w", "json"]).expect("read");
        let answer: serde_json::Value = serde_json::from_str(&answer).expect("JSON");
        answer["header"]["revision"].as_i64().expect("a number")
    }

    /// Runs etcdctl.
    pub(crate) fn ctl(&self, arguments: &[&str]) -> Result<String, String> {
        self.run_ctl(arguments, Stdio::null())
    }

    fn run_ctl(&self, arguments: &[&str], input: Stdio) -> Result<String, String> {
        let output = Command::new("etcdctl")
            .env("ETCDCTL_API", "3")
            .args(["--endpoints", &self.url()])
            .args(["--dial-timeout", "60s", "--command-timeout", "120s"])
            .args(self.client_arguments())
            .args(arguments)
            .stdin(input)
            .output()
            .map_err(|error| error.to_string())?;
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        match output.status.success() {
            true => Ok(text(&output.stdout)),
            false => Err(text(&output.stderr)),
        }
    }
}

fn peer_url(address: Ipv4Addr) -> String {
    format!("http://{address}:2380")
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
    }
}

#[expect(clippy::print_stderr, reason = "a test tells that it proves nothing")]
fn skip() {
    assert!(
        std::env::var_os("CONMAN_NO_SKIPS").is_none(),
        "etcd is missing (package etcd-server), and CONMAN_NO_SKIPS is set"
    );
    eprintln!("skipped: this machine has no etcd; `cargo xtask setup` installs it");
}

#[expect(
    clippy::disallowed_methods,
    reason = "no runtime is held up: the test has nothing else to do"
)]
fn pause() {
    std::thread::sleep(Duration::from_millis(20));
}
