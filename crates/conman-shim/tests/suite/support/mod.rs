//! A shim of the test's own, with a root filesystem of busybox, and nothing left afterwards.

#![allow(dead_code, reason = "every test program takes what it needs")]
#![allow(clippy::print_stderr, reason = "a skipped test says so there")]

mod attachment;
mod client;
pub(crate) mod fencing;
pub(crate) mod probe;

use std::fs;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt as _, lchown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use conman_linux::{
    CgroupLayout, CgroupLimits, CgroupPart, Cgroups, Features, Freezer, Interface, PidFd, Signal,
};
use conman_shim::{
    Ahead, Call, ClientError, Hardening, LaunchSpec, Message, NetworkSpec, ProgramSpec, Reply,
    Request, RootKind, RootSpec, SHARED_IDS, VERSION, encode,
};

pub(crate) use attachment::Attachment;
pub(crate) use client::{Client, Launched};

/// Bound on whatever should happen at once.
pub(crate) const SOON: Duration = Duration::from_secs(120);

const PROGRAM: &str = env!("CARGO_BIN_EXE_conman-shim");

const BUSYBOX: &str = "/usr/bin/busybox";

/// Programs of busybox that the tests call by name.
const APPLETS: [&str; 29] = [
    "sh", "ls", "cat", "echo", "sleep", "httpd", "mount", "umount", "unshare", "mknod", "id",
    "hostname", "ps", "touch", "mkdir", "chroot", "true", "false", "grep", "wc", "ip", "dd",
    "kill", "stat", "env", "pwd", "head", "readlink", "[",
];

/// What a test cannot do without.
pub(crate) fn available() -> bool {
    let why = if !Path::new(BUSYBOX).exists() {
        format!("{BUSYBOX} is missing (package busybox-static)")
    } else if !nix::unistd::geteuid().is_root() {
        "containers are made by root".to_owned()
    } else {
        return true;
    };
    lacks(&why);
    false
}

/// The test goes without what `cargo xtask test` installs.
pub(crate) fn lacks(why: &str) {
    assert!(
        std::env::var_os("CONMAN_NO_SKIPS").is_none(),
        "{why}, and CONMAN_NO_SKIPS is set"
    );
    eprintln!("skipped: {why}");
}

/// Whether this kernel cannot map the owners of layers, so that all tests use the shared range.
fn shares_ids() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| {
        !Features::probe()
            .expect("probed")
            .has(Interface::MappedLayers)
    })
}

/// Whether each container has ids of its own; says on standard error that this kernel's have not.
pub(crate) fn has_own_ids() -> bool {
    if shares_ids() {
        eprintln!("skipped: this kernel cannot map the owners of layers (Linux 5.19 can)");
    }
    !shares_ids()
}

/// Whether this kernel maps the owners of binds; says on standard error that it does not.
pub(crate) fn maps_binds() -> bool {
    let maps = Features::probe()
        .expect("probed")
        .has(Interface::MountAttributes);
    if !maps {
        eprintln!("skipped: this kernel cannot map the owners of binds (Linux 5.12 can)");
    }
    maps
}

/// Gives a file and all below it to the shared range, by the ids that they have, unless they are
/// the range's already.
pub(crate) fn own_by_the_shared_range(path: &Path) {
    let data = fs::symlink_metadata(path).expect("it is there");
    let (user, group) = (data.uid(), data.gid());
    if user < SHARED_IDS {
        let shared = |id| Some(SHARED_IDS + id);
        lchown(path, shared(user), shared(group)).expect("owned");
        if !data.is_symlink() {
            // Changing the owner has cleared the set-user-id bit.
            fs::set_permissions(path, data.permissions()).expect("set");
        }
    }
    if data.is_dir() {
        for entry in fs::read_dir(path).expect("readable") {
            own_by_the_shared_range(&entry.expect("readable").path());
        }
    }
}

/// A running shim.
#[derive(Debug)]
pub(crate) struct Shim {
    pub(crate) directory: tempfile::TempDir,
    pub(crate) cgroup: String,
    pub(crate) process: Child,
    flags: Vec<String>,
}

impl Shim {
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    pub(crate) fn start_with(flags: &[&str]) -> Self {
        Self::start_from(Path::new(PROGRAM), flags)
    }

    /// As this program.
    pub(crate) fn start_as(program: &Path) -> Self {
        Self::start_from(program, &[])
    }

    pub(crate) fn start_from(program: &Path, flags: &[&str]) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let directory = tempfile::tempdir().expect("a directory");
        make_root(&directory.path().join("store/base"));
        if shares_ids() {
            own_by_the_shared_range(&directory.path().join("store"));
        }
        for name in ["scratch", "logs"] {
            fs::create_dir(directory.path().join(name)).expect("made");
        }
        let cgroup = format!("/conman-shimtest-{}-{number}", std::process::id());
        let process = spawn(program, directory.path(), &cgroup, flags);
        Self {
            flags: flags.iter().map(|flag| (*flag).to_owned()).collect(),
            directory,
            cgroup,
            process,
        }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.path().join("shim.sock")
    }

    /// A connection, as soon as the shim takes any.
    pub(crate) fn client(&self) -> Client {
        let deadline = Instant::now() + SOON;
        loop {
            match Client::connect(&self.socket(), SOON) {
                Ok(client) => return client,
                Err(ClientError::Io(_)) if Instant::now() < deadline => pause(),
                Err(error) => panic!("{error:?}"),
            }
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A layer of the store has been made.
    pub(crate) fn made_layer(&self, name: &str) {
        if shares_ids() {
            own_by_the_shared_range(&self.path("store").join(name));
        }
    }

    /// A container of busybox that runs `sh -c SCRIPT`.
    pub(crate) fn spec(&self, name: &str, script: &str) -> LaunchSpec {
        LaunchSpec {
            terminal: None,
            log_bytes: None,
            ptys: 0,
            ptys_when_asked: false,
            sys: false,
            init: true,
            name: name.to_owned(),
            cgroup: format!("{}/{name}", self.cgroup),
            limits: CgroupLimits {
                memory_bytes: Some(64 << 20),
                pids: Some(32),
                ..CgroupLimits::default()
            },
            root: RootSpec {
                kind: RootKind::Overlay,
                store: self.path("store"),
                layers: vec![PathBuf::from("base")],
                scratch: self.path("scratch").join(name),
                read_only: false,
                durable: false,
                shared_ids: shares_ids(),
            },
            hostname: "inside".to_owned(),
            program: ProgramSpec {
                argv: ["sh", "-c", script].map(str::to_owned).to_vec(),
                env: vec![("PATH".to_owned(), "/bin".to_owned())],
                workdir: "/".to_owned(),
                uid: 0,
                gid: 0,
                groups: Vec::new(),
                nofile: None,
            },
            log: self.path("logs").join(name),
            log_stderr: None,
            files: Vec::new(),
            binds: Vec::new(),
            network: NetworkSpec::Loopback,
            hardening: Hardening::default(),
            ahead: Ahead::No,
        }
    }

    pub(crate) fn log(&self, name: &str) -> String {
        fs::read_to_string(self.path("logs").join(name)).expect("a log")
    }

    /// Runs a script to its end: its exit code and what it wrote.
    pub(crate) fn output(&self, spec: LaunchSpec) -> String {
        let mut client = self.client();
        let name = spec.name.clone();
        let launched = client
            .launch(spec)
            .unwrap_or_else(|error| panic!("{error}: {error:?}"));
        wait_dead(&launched);
        self.log(&name)
    }

    /// Lets some microseconds go by.
    #[expect(clippy::disallowed_methods, reason = "no async runtime is near")]
    pub(crate) fn process_pause(&self, micros: u64) {
        std::thread::sleep(Duration::from_micros(micros));
    }

    /// Ends the shim as nothing else would, and starts another one in its place.
    pub(crate) fn succeed(&mut self) {
        self.process.kill().expect("killed");
        self.process.wait().expect("reaped");
        let flags: Vec<&str> = self.flags.iter().map(String::as_str).collect();
        let program = Path::new(PROGRAM);
        self.process = spawn(program, self.directory.path(), &self.cgroup, &flags);
    }

    /// Removes what the daemon would remove: cgroups and directories of ended containers.
    pub(crate) fn sweep(&self) -> Vec<String> {
        let cgroups = Cgroups::detect().expect("detected");
        let left = cgroups.remove_tree(&self.cgroup);
        left.iter().map(ToString::to_string).collect()
    }
}

impl Drop for Shim {
    fn drop(&mut self) {
        let alive = || conman_observer::alive_below(&self.cgroup);
        for process in alive() {
            if let Ok(process) = PidFd::open(process.pid) {
                let _ = process.kill();
            }
        }
        let gone = until(|| alive().is_empty());
        let term = conman_linux::Signal::SIGTERM;
        let _ = conman_linux::signal_process(self.process.id().cast_signed(), term);
        let ended = self.process.wait();
        let mut left = Vec::new();
        let swept = until(|| {
            left = self.sweep();
            left.is_empty()
        });
        if !std::thread::panicking() {
            assert!(gone, "processes are left: {:?}", alive());
            assert!(swept, "cgroups are left: {left:?}");
            ended.expect("the shim ends");
            let mounts = fs::read_to_string("/proc/self/mountinfo").expect("readable");
            let own = self.directory.path().to_string_lossy().into_owned();
            assert!(!mounts.contains(&own), "a mount is left: {mounts}");
        }
    }
}

/// How the host's cgroups are used, by the shim and by the test; what the host lacks is left out.
pub(crate) fn hosts() -> Vec<(&'static [&'static str], Freezer)> {
    let layout = CgroupLayout::detect().expect("detected");
    let parts: [(&[&str], CgroupPart); 2] = [
        (&[], CgroupPart::All),
        (&["--cgroups", "v1"], CgroupPart::V1),
    ];
    let usable = parts.into_iter().filter_map(|(flags, part)| {
        let freezer = Freezer::of(&layout.clone().part(part));
        if let Err(error) = &freezer {
            eprintln!("skipped with {flags:?}: {error}");
        }
        Some((flags, freezer.ok()?))
    });
    usable.collect()
}

/// The process that makes containers.
pub(crate) fn launcher(shim_pid: u32, cgroup: &str) -> Option<PidFd> {
    let path = format!("/proc/{shim_pid}/task/{shim_pid}/children");
    let children = fs::read_to_string(path).ok()?;
    let cgroups = Cgroups::detect().ok()?;
    let pids = children
        .split_ascii_whitespace()
        .filter_map(|pid| pid.parse().ok());
    let named = |pid: &i32| {
        let command = fs::read_to_string(format!("/proc/{pid}/comm"));
        command.is_ok_and(|command| command == "shim-launcher\n")
    };
    // A container has its name until it is one, and joins its cgroups a moment after its birth;
    // the launcher is the eldest.
    let eldest = pids
        .filter(named)
        .find(|pid| !cgroups.contains(cgroup, *pid))?;
    PidFd::open(eldest).ok()
}

/// The launcher, which has its name a moment after its birth, stopped: what it has been sent stays with it until it is told to go on.
pub(crate) fn stopped_launcher(shim: &Shim) -> PidFd {
    let mut found = None;
    until(|| {
        found = launcher(shim.process.id(), &shim.cgroup);
        found.is_some()
    });
    let launcher = found.expect("a launcher");
    launcher.signal(Signal::SIGSTOP).expect("stopped");
    launcher
}

/// A connection on which many calls may wait at once.
pub(crate) struct Calls {
    socket: OwnedFd,
    next_call: u64,
    buffer: Vec<u8>,
}

impl Calls {
    pub(crate) fn connect(shim: &Shim) -> Self {
        let mut connected = None;
        until(|| {
            connected = conman_shim::socket::connect(&shim.socket()).ok();
            connected.is_some()
        });
        let mut calls = Self {
            socket: connected.expect("a shim that takes connections"),
            next_call: 0,
            buffer: Vec::new(),
        };
        let hello = calls.send(Request::Hello { version: VERSION });
        assert!(matches!(calls.next(), (id, Reply::Hello { .. }) if id == hello));
        calls
    }

    /// The number of the call.
    pub(crate) fn send(&mut self, request: Request) -> u64 {
        self.next_call += 1;
        let id = self.next_call;
        let bytes = encode(&Call { id, request }).expect("encoded");
        let sent = until(
            || match conman_shim::socket::send(&self.socket, &bytes, &[]) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => false,
                sent => sent.is_ok(),
            },
        );
        assert!(sent, "the shim does not read");
        id
    }

    /// What has been answered already.
    pub(crate) fn answered(&mut self) -> Option<(u64, Reply)> {
        match conman_shim::socket::receive(&self.socket, &mut self.buffer) {
            Ok(Some(incoming)) => match incoming.message.expect("understood") {
                Message::Reply { id, reply } => Some((id, reply)),
                told => panic!("{told:?}"),
            },
            Err(error) if error.kind() == ErrorKind::WouldBlock => None,
            other => panic!("{other:?}"),
        }
    }

    /// The next answer, to whichever call.
    pub(crate) fn next(&mut self) -> (u64, Reply) {
        let mut answer = None;
        until(|| {
            answer = self.answered();
            answer.is_some()
        });
        answer.expect("an answer")
    }
}

/// Starts a shim on directories that exist.
fn spawn(program: &Path, directory: &Path, cgroup: &str, flags: &[&str]) -> Child {
    Command::new(program)
        .arg(directory.join("shim.sock"))
        .arg(cgroup)
        .args(flags)
        .arg(directory)
        .spawn()
        .expect("the shim starts")
}

/// Copies a program by another process: what this one writes is busy for as long as a child that
/// another test has just forked has not yet executed anything, and cannot be executed itself.
pub(crate) fn copy_program(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg(from).arg(to).status();
    assert!(copied.expect("cp runs").success(), "{}", to.display());
}

/// Writes a program, likewise.
pub(crate) fn write_program(path: &Path, content: &[u8]) {
    let draft = path.with_extension("draft");
    fs::write(&draft, content).expect("written");
    copy_program(&draft, path);
    fs::remove_file(&draft).expect("removed");
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("set");
}

fn make_root(root: &Path) {
    for name in ["bin", "etc", "tmp", "www", "proc"] {
        fs::create_dir_all(root.join(name)).expect("made");
    }
    copy_program(Path::new(BUSYBOX), &root.join("bin/busybox"));
    for applet in APPLETS {
        symlink("busybox", root.join("bin").join(applet)).expect("linked");
    }
    fs::write(root.join("www/index.html"), "hello from inside\n").expect("written");
    fs::write(root.join("etc/passwd"), "root:x:0:0::/:/bin/sh\n").expect("written");
}

/// Now, on the fence's clock.
pub(crate) fn boottime_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

pub(crate) fn wait_dead(launched: &Launched) {
    if let Some(process) = &launched.process {
        assert!(process.wait_dead(SOON).expect("waited"), "it goes on");
    }
}

/// What ended, once it is told.
pub(crate) fn next_end(client: &mut Client) -> conman_shim::ContainerView {
    loop {
        if let Message::Ended { container } = client.next_notification().expect("notified") {
            return container;
        }
    }
}

pub(crate) fn subscribe(client: &mut Client) {
    client.ask(Request::Subscribe).expect("subscribed");
}

/// Looks again and again, at most as long as is reasonable.
pub(crate) fn until(mut done: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + SOON;
    loop {
        if done() {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        pause();
    }
}

#[expect(clippy::disallowed_methods, reason = "no async runtime is near")]
fn pause() {
    std::thread::sleep(Duration::from_millis(5));
}
