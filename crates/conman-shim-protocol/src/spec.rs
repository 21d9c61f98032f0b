//! What a client orders to be launched, and the checks of it.

use std::path::{Component, Path, PathBuf};

use conman_linux::{Capabilities, CgroupLimits};
use serde::{Deserialize, Serialize};

use crate::ahead::Ahead;
use crate::files::FilesOrder;
use crate::root_spec::{RootKind, RootSpec};

/// Arguments and variables together; they must also fit into a message.
const MAX_STRINGS: usize = 4_096;

/// Bytes of a log that are kept unless its container's spec says otherwise.
pub const LOG_BYTES: u64 = 16 << 20;

/// Fewest bytes of a log that can be kept: some blocks.
const MIN_LOG_BYTES: u64 = 64 * 1_024;

/// Maximum number of small files in a container.
pub(crate) const MAX_FILES: usize = 16;

/// Maximum size of each in bytes: a page, since all of them stay in memory.
const MAX_FILE_BYTES: usize = 4_096;

/// Supplementary groups of a program.
const MAX_GROUPS: usize = 16;

/// Directories and files of the host in a container: the same as a session's limit.
pub const MAX_BINDS: usize = 32;

/// Longest name: a session's (63), a dot and a generation, and that of a command in it.
const MAX_NAME: usize = 112;

/// A host name is one DNS label.
const MAX_HOSTNAME: usize = 63;

/// Everything needed to start a container.
///
/// Host paths are absolute and lie below one of the shim's roots.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaunchSpec {
    /// The caller's name for it, unique until its end was acknowledged.
    pub name: String,
    /// A cgroup that does not exist yet.
    pub cgroup: String,
    pub limits: CgroupLimits,
    pub root: RootSpec,
    pub hostname: String,
    pub program: ProgramSpec,
    /// Its first process is conman's init, and its program the child of that.
    #[serde(default)]
    pub init: bool,
    /// Host file that its standard output and error are appended to; created if missing.
    pub log: PathBuf,
    /// Host file for its standard error, if it is kept separately.
    #[serde(default)]
    pub log_stderr: Option<PathBuf>,
    /// Bytes of it that are kept, from the end; `None` is [`LOG_BYTES`].
    pub log_bytes: Option<u64>,
    /// Maximum number of terminals that its programs open; without any it has no `/dev/pts`.
    pub ptys: u32,
    /// `/dev/pts` is mounted only with a command that asks for it ([`ExecSpec::ptys`]).
    #[serde(default)]
    pub ptys_when_asked: bool,
    /// Its programs see its own cgroups, read-only, at `/sys/fs/cgroup`.
    #[serde(default)]
    pub sys: bool,
    /// Its small files: path in the container and content. They are read-only and cover the image's files;
    /// binds are mounted after them.
    pub files: Vec<(String, String)>,
    /// Files and directories of the host. A detached mount for each comes with the message, in this order:
    /// the client has resolved the path, and later changes of the path have no effect.
    pub binds: Vec<BindSpec>,
    /// Its standard streams are a terminal of this size, kept by the shim ([`crate::Request::Attach`]); then
    /// there is no log.
    pub terminal: Option<TerminalSize>,
    #[serde(default)]
    pub network: NetworkSpec,
    pub hardening: Hardening,
    #[serde(default)]
    pub ahead: Ahead,
}

/// The network of a container.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum NetworkSpec {
    /// Its own network namespace with a loopback interface.
    #[default]
    Loopback,
    /// The same, with a link that the client makes. A socket ([`crate::link_socket`]) comes with the
    /// message, after the binds.
    Linked,
    /// The network namespace of the host.
    Host,
}

/// The size of a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalSize {
    pub rows: u16,
    pub cols: u16,
}

/// Streams that the shim keeps ([`crate::Request::Attach`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KeptStreamsSpec {
    /// A terminal of this size.
    Terminal(TerminalSize),
    /// Two outputs, and an input if the command is to have one.
    Pipes { stdin: bool },
}

/// A command that outlives its client: the shim keeps its streams, and its end until that is acknowledged or
/// its place is needed for another one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptCommandSpec {
    pub streams: KeptStreamsSpec,
    /// Its process group is killed after this time.
    pub timeout_ms: Option<u64>,
    /// The client's description of it, at most [`MAX_LABEL_BYTES`] long.
    pub label: String,
}

/// Longest [`KeptCommandSpec::label`].
pub const MAX_LABEL_BYTES: usize = 1_024;

/// Separates a container's name from the rest of the name of a command that is kept in it.
pub const KEPT_SEPARATOR: char = '_';

/// A command to run in a running container. Its standard input, output and error come with the message,
/// in this order, unless it is kept. If they are sockets, the command has pipes, and a process of its container's
/// cgroup copies between these and the sockets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecSpec {
    /// The caller's name for it, unique among containers and commands. That of a kept command is its
    /// container's, `_`, and a name in it.
    pub name: String,
    pub container: String,
    pub program: ProgramSpec,
    /// Standard input is a terminal, which becomes the controlling one.
    pub terminal: bool,
    pub kept: Option<KeptCommandSpec>,
    /// Mounts the container's `/dev/pts` for so many terminals if it has none; 0 leaves it as it is.
    #[serde(default)]
    pub ptys: u32,
    /// It is killed with its process group when the client's connection ends.
    #[serde(default)]
    pub with_client: bool,
    /// What to do with the container's files instead of executing the program, with its user's rights.
    pub files: Option<FilesOrder>,
    pub hardening: Hardening,
}

impl ExecSpec {
    /// Checks everything that can be checked without the host.
    pub fn check(&self) -> Result<(), SpecError> {
        check_name(&self.name)?;
        if let Some(kept) = &self.kept {
            let rest = self.name.strip_prefix(&self.container);
            if !rest.is_some_and(|rest| rest.starts_with(KEPT_SEPARATOR)) {
                return Err(SpecError::new("name", "another container's name"));
            }
            if kept.label.len() > MAX_LABEL_BYTES {
                return Err(SpecError::new("kept.label", "more than 1,024 bytes"));
            }
        }
        self.program.check()?;
        self.hardening.capability_set().map(|_| ())
    }

    /// Checks the number of streams that came along.
    pub fn check_streams(&self, streams: usize) -> Result<(), SpecError> {
        let expected = if self.kept.is_some() { 0 } else { STREAMS };
        if streams == expected {
            return Ok(());
        }
        Err(SpecError::new(
            "name",
            "a number of standard streams that is not the required one",
        ))
    }
}

/// Standard input, output and error.
pub const STREAMS: usize = 3;

/// One file or directory of the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BindSpec {
    /// Path in the container; created if missing.
    pub target: String,
    pub read_only: bool,
    /// The host's id `first_id + n` is id `n` inside. Never 0 for a writable bind: the container could create
    /// set-user-id files of the host's root.
    pub first_id: u32,
}

/// What runs as the container's first process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramSpec {
    /// The command, searched in `PATH` of `env` when it has no slash, and its arguments.
    pub argv: Vec<String>,
    pub env: Vec<(String, String)>,
    /// Created if missing when a container starts; a command's must exist.
    pub workdir: String,
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    /// Limit of its open descriptors; `None` is the shim's own.
    pub nofile: Option<u64>,
}

/// Layers of protection; all on by default.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hardening {
    /// The list of allowed system calls.
    pub seccomp: bool,
    /// Otherwise its programs may become any user of the container, and get the capabilities of its root, by
    /// setuid programs of its image.
    pub no_new_privileges: bool,
    /// Its programs may install system call filters. Their number cannot be bounded, and each takes kernel
    /// memory that all programs of the host share (`net.core.bpf_jit_limit`).
    #[serde(default)]
    pub own_filters: bool,
    /// It has no IPC namespace of its own, and its system call filter, which it must have, knows no calls of System V
    /// IPC and of POSIX message queues. An IPC namespace is a superblock, for which every memory cgroup of the host pays.
    #[serde(default)]
    pub without_ipc: bool,
    /// Hidden and read-only paths in /proc.
    pub masked_proc: bool,
    /// Capabilities of root in the container, without `CAP_`; `None` is the short list.
    pub capabilities: Option<Vec<String>>,
    /// Its program is an OCI runtime, which runs the session's program: the first of these, which are files and
    /// directories of the host. A detached mount for each comes with the message, after the binds. The container is a
    /// second wall around what the runtime makes, and has a root of its own, in which they are, and the session's root
    /// at [`SESSION_ROOT`]. Empty: its program is the session's.
    #[serde(default)]
    pub runtime_files: Vec<String>,
}

/// Where an OCI runtime is in its container, and the bundle's description of what it runs.
pub const RUNTIME_PROGRAM: &str = "/runtime";
pub const RUNTIME_CONFIG: &str = "/config.json";

/// The session's root, as its OCI runtime sees it.
pub const SESSION_ROOT: &str = "/rootfs";

/// The session's `/tmp`, likewise.
pub const SESSION_TMP: &str = "/session-tmp";

/// Its program, its configuration, and directories of libraries.
pub(crate) const MAX_RUNTIME_FILES: usize = 8;

impl Default for Hardening {
    fn default() -> Self {
        Self {
            seccomp: true,
            no_new_privileges: true,
            own_filters: false,
            without_ipc: false,
            masked_proc: true,
            capabilities: None,
            runtime_files: Vec::new(),
        }
    }
}

impl Hardening {
    /// Whether its processes are in an IPC namespace with those of other containers.
    #[must_use]
    pub const fn shares_ipc(&self) -> bool {
        self.without_ipc && self.seccomp
    }
}

/// Capabilities of root in a container, over the container's own resources.
const SHORT_LIST: Capabilities = Capabilities::CHOWN
    .union(Capabilities::DAC_OVERRIDE)
    .union(Capabilities::FOWNER)
    .union(Capabilities::FSETID)
    .union(Capabilities::KILL)
    .union(Capabilities::SETGID)
    .union(Capabilities::SETUID)
    .union(Capabilities::NET_BIND_SERVICE)
    .union(Capabilities::SYS_CHROOT);

/// Capabilities of an OCI runtime, over the container's own resources: the short list, and those to make namespaces
/// and mounts, to trace, and to serve files of every user.
const OF_OCI_RUNTIME: [&str; 13] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "NET_BIND_SERVICE",
    "SYS_CHROOT",
    "DAC_READ_SEARCH",
    "MKNOD",
    "SYS_ADMIN",
    "SYS_PTRACE",
];

impl Hardening {
    /// The layers around an OCI runtime with these files.
    #[must_use]
    pub fn of_oci_runtime(files: &[&str]) -> Self {
        Self {
            seccomp: false,
            no_new_privileges: true,
            own_filters: true,
            without_ipc: false,
            masked_proc: false,
            capabilities: Some(OF_OCI_RUNTIME.map(str::to_owned).to_vec()),
            runtime_files: files.iter().map(|path| (*path).to_owned()).collect(),
        }
    }

    /// Whether its program is an OCI runtime.
    #[must_use]
    pub fn has_runtime(&self) -> bool {
        !self.runtime_files.is_empty()
    }

    /// The capabilities as a set.
    pub fn capability_set(&self) -> Result<Capabilities, SpecError> {
        let Some(names) = &self.capabilities else {
            return Ok(SHORT_LIST);
        };
        names.iter().try_fold(Capabilities::empty(), |set, name| {
            let one = Capabilities::from_name(name);
            let one = one.ok_or_else(|| SpecError::new("capabilities", "an unknown capability"))?;
            Ok(set | one)
        })
    }
}

/// What is wrong with a spec.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error("`{field}` holds {reason}")]
pub struct SpecError {
    pub field: String,
    pub reason: String,
}

impl SpecError {
    pub(crate) fn new(field: &str, reason: &str) -> Self {
        Self {
            field: field.to_owned(),
            reason: reason.to_owned(),
        }
    }
}

impl LaunchSpec {
    /// Checks everything that can be checked without the host.
    pub fn check(&self) -> Result<(), SpecError> {
        check_name(&self.name)?;
        if self.hostname.len() > MAX_HOSTNAME
            || !self
                .hostname
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b == b'-')
        {
            return Err(SpecError::new("hostname", "a name that is not a DNS label"));
        }
        check_host_path("log", &self.log)?;
        if let Some(log) = &self.log_stderr {
            check_host_path("log_stderr", log)?;
        }
        if self.log_bytes.is_some_and(|bytes| bytes < MIN_LOG_BYTES) {
            return Err(SpecError::new("log_bytes", "less than 64 KiB"));
        }
        self.root.check()?;
        self.check_ahead()?;
        if self.ahead != Ahead::Make {
            self.program.check()?;
        }
        if self.files.len() > MAX_FILES {
            return Err(SpecError::new("files", "too many files"));
        }
        for (path, content) in &self.files {
            check_inner_path("files", path)?;
            if content.len() > MAX_FILE_BYTES {
                return Err(SpecError::new("files", "a file of more than 4 KiB"));
            }
        }
        for bind in &self.binds {
            check_inner_path("binds", &bind.target)?;
            if bind.first_id == 0 && !bind.read_only {
                return Err(SpecError::new("binds", "writable with ids of the host"));
            }
        }
        let runtime_files = &self.hardening.runtime_files;
        if runtime_files.len() > MAX_RUNTIME_FILES {
            return Err(SpecError::new("hardening.runtime_files", "too many files"));
        }
        for path in runtime_files {
            check_inner_path("hardening.runtime_files", path)?;
        }
        if self.root.kind == RootKind::Snapshot && !self.hardening.seccomp {
            // It could make subvolumes.
            let reason = "a snapshot for a container without a system call filter";
            return Err(SpecError::new("root.kind", reason));
        }
        self.hardening.capability_set().map(|_| ())
    }
}

impl LaunchSpec {
    /// Checks the number of mounts and sockets that came along.
    pub fn check_fds(&self, fds: usize) -> Result<(), SpecError> {
        // The start that takes it brings the socket.
        let is_linked = self.network == NetworkSpec::Linked && self.ahead != Ahead::Make;
        let sockets = usize::from(is_linked);
        let runtime = self.hardening.runtime_files.len();
        let root = match self.root.kind {
            RootKind::Overlay => 0,
            RootKind::Snapshot => 1,
        };
        if fds == self.binds.len() + runtime + root + sockets && self.binds.len() <= MAX_BINDS {
            return Ok(());
        }
        Err(SpecError::new(
            "binds",
            "a number of binds that is not the number of mounts",
        ))
    }
}

impl ProgramSpec {
    fn check(&self) -> Result<(), SpecError> {
        if self.argv.first().is_none_or(String::is_empty) {
            return Err(SpecError::new("program.argv", "no command"));
        }
        if self.argv.len() + self.env.len() > MAX_STRINGS {
            return Err(SpecError::new("program", "too many strings"));
        }
        if self.argv.iter().any(|text| text.contains('\0')) {
            return Err(SpecError::new("program.argv", "a NUL byte"));
        }
        let bad = |(key, value): &(String, String)| {
            key.is_empty() || key.contains(['=', '\0']) || value.contains('\0')
        };
        if self.env.iter().any(bad) {
            return Err(SpecError::new("program.env", "a malformed variable"));
        }
        let highest = crate::id_pool::RANGE_SIZE - 1;
        let ids = [self.uid, self.gid];
        if ids.iter().chain(&self.groups).any(|id| *id > highest) {
            return Err(SpecError::new(
                "program",
                "a user or group above 65535, the highest that a native session has",
            ));
        }
        if self.groups.len() > MAX_GROUPS {
            return Err(SpecError::new("program.groups", "too many groups"));
        }
        check_inner_path("program.workdir", &self.workdir)
    }
}

/// Checks the name of a container or command.
pub fn check_name(name: &str) -> Result<(), SpecError> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_');
    if name.is_empty() || name.len() > MAX_NAME || !name.bytes().all(plain) {
        return Err(SpecError::new("name", "a name that is not short and plain"));
    }
    Ok(())
}

pub(crate) fn check_host_path(field: &str, path: &Path) -> Result<(), SpecError> {
    let mut parts = path.components();
    let plain = parts.next() == Some(Component::RootDir)
        && parts.all(|part| matches!(part, Component::Normal(_)))
        && !has_nul(path);
    if plain {
        return Ok(());
    }
    Err(SpecError::new(
        field,
        "a path that is not absolute and plain",
    ))
}

fn check_inner_path(field: &str, path: &str) -> Result<(), SpecError> {
    if path.starts_with('/') && !path.contains('\0') && !path.split('/').any(|part| part == "..") {
        return Ok(());
    }
    Err(SpecError::new(
        field,
        "a path that is not absolute and plain",
    ))
}

pub(crate) fn has_nul(path: &Path) -> bool {
    path.as_os_str().as_encoded_bytes().contains(&0)
}
