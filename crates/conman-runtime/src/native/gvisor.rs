//! Sessions with a kernel of their own: gVisor's `runsc` runs a session's program in a native container.
//!
//! The container is what it is for native sessions: namespaces, cgroups, layers, binds, network, log and fence. Its
//! program is `runsc`, which finds the session's root at [`SESSION_ROOT`] and runs the session's program there. So
//! everything that conman proves of a native container holds here: the sandbox, its gofer and every helper are in the
//! container's PID namespace and cgroups, and die with it. A session that breaks out of gVisor is in the container, as
//! a user without rights.
//!
//! What the design leaves to `runsc`: the session's processes, which the host does not see, and commands in it, which
//! are another `runsc` in the container.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use conman_linux::{Mount, SignalNumber, open_file_in_root, open_in_root};
use conman_proto::RuntimeKind;
use conman_shim_protocol::{
    Hardening, LaunchSpec, ProgramSpec, SESSION_KERNEL, SESSION_ROOT, SESSION_TMP,
};
use rustix::fs::{AtFlags, CWD, OFlags, unlinkat};
use serde_json::{Value, json};

use super::exec::help;
use super::failure::refused;
use super::{Inner, away};
use crate::shared::container_files::host_error;
use crate::{ContainerKey, RuntimeError};

/// What the sandbox is called in its container.
const SANDBOX: &str = "session";

const SIGKILL: i32 = 9;

/// What `runsc` says of a process that has ended.
const NO_SUCH_PROCESS: &str = "no such process";

/// The exit code of `runsc` where it fails itself.
pub(super) const FAILED: i32 = 128;

/// The exit codes of programs that do not exist, and that cannot be executed.
pub(super) const NOT_FOUND: i32 = 127;
const NOT_EXECUTABLE: i32 = 126;

/// What `runsc` says of a program that it cannot run.
const NOT_LOADED: &str = "failed to load ";

/// Where its state is; the session cannot reach it.
const STATE: &str = "/state";

/// The same, below the container's directory.
const STATE_ON_HOST: &str = "kernel/state";

/// Most bytes of a file of its state: a description of what it runs.
const MAX_STATE_BYTES: u64 = 1 << 20;

/// Threads of gVisor besides those that run the session's: its own, its gofer's, and those of a command.
const KERNEL_PIDS: u64 = 256;

/// Capabilities of root in the sandbox, over the sandbox's own resources: those of a native session.
const CAPABILITIES: [&str; 9] = [
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_NET_BIND_SERVICE",
    "CAP_SYS_CHROOT",
];

/// Where gVisor is, and how it is run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GvisorOptions {
    /// `runsc`, of the host.
    pub program: PathBuf,
    /// Arguments before its command, after conman's own: `--platform=kvm`, for example.
    pub arguments: Vec<String>,
}

impl Default for GvisorOptions {
    fn default() -> Self {
        Self {
            program: "/usr/local/bin/runsc".into(),
            arguments: Vec::new(),
        }
    }
}

impl GvisorOptions {
    /// Makes the start order of a native container one whose program is gVisor. Returns the session's program. Takes the
    /// limit of CPU time out: it would throttle the start of the kernel, and is set once that runs.
    pub(super) fn wrap(&self, launch: &mut LaunchSpec) -> (ProgramSpec, Option<u64>) {
        let mut argv = self.argv();
        argv.extend(["run", "--bundle", "/", SANDBOX].map(str::to_owned));
        let kernel = kernel_program(argv, launch.program.nofile);
        launch.hardening = Hardening::of_session_kernel();
        launch.limits.pids = launch.limits.pids.map(|most| most + KERNEL_PIDS);
        launch.sys = false;
        launch.ptys = 0;
        let session = std::mem::replace(&mut launch.program, kernel);
        (session, launch.limits.cpu_millis.take())
    }

    /// The program and its configuration, which is written here. Blocks.
    pub(super) fn files(
        &self,
        session: &ProgramSpec,
        launch: &LaunchSpec,
        config: &Path,
    ) -> Result<Vec<Mount>, RuntimeError> {
        let text = configuration(session, launch).to_string();
        std::fs::write(config, text).map_err(|source| host_error("write", config, source))?;
        let find = "find gVisor's runsc (`gvisor.path`; `conman doctor` says what to install) at";
        [(find, &*self.program), ("use", config)]
            .into_iter()
            .map(|(action, path)| {
                Mount::copy_of(CWD, path).map_err(|source| host_error(action, path, source))
            })
            .collect()
    }

    /// The program with conman's arguments and the operator's.
    fn argv(&self) -> Vec<String> {
        let own = [
            SESSION_KERNEL.to_owned(),
            format!("--root={STATE}"),
            // The container has its own network namespace, where conman and the session meet.
            "--network=host".to_owned(),
            // The container's cgroups bound it.
            "--ignore-cgroups".to_owned(),
            // What the session writes is in the container's layer, where disk limits and `conman cp` look.
            "--overlay2=none".to_owned(),
            "--file-access=shared".to_owned(),
            "--host-settings=ignore".to_owned(),
        ];
        own.into_iter().chain(self.arguments.clone()).collect()
    }

    /// Makes a command of a native container one in the sandbox.
    pub(super) fn wrap_command(&self, command: ProgramSpec, name: &str) -> ProgramSpec {
        let mut argv = self.argv();
        argv.push("exec".to_owned());
        argv.push(format!("--internal-pid-file={STATE}/{name}"));
        argv.extend(["--cwd".to_owned(), command.workdir.clone()]);
        argv.extend([
            "--user".to_owned(),
            format!("{}:{}", command.uid, command.gid),
        ]);
        for group in &command.groups {
            argv.extend(["--additional-gids".to_owned(), group.to_string()]);
        }
        for (name, value) in &command.env {
            argv.extend(["--env".to_owned(), format!("{name}={value}")]);
        }
        argv.push(SANDBOX.to_owned());
        argv.extend(command.argv.iter().cloned());
        kernel_program(argv, command.nofile)
    }
}

/// The failure of a start, if `output` of `runsc` says that the session's program cannot be run.
pub(super) fn not_run(
    key: &ContainerKey,
    session: &ProgramSpec,
    output: &str,
) -> Option<RuntimeError> {
    let (_, why) = output.split_once(NOT_LOADED)?;
    let reason = why.split_once(": ").map_or(why, |(_, reason)| reason);
    Some(RuntimeError::NoSuchCommand {
        command: session.argv.first()?.clone(),
        subject: key.to_string(),
        reason: reason.to_owned(),
        exit_code: match reason.contains("no such file") {
            true => NOT_FOUND,
            false => NOT_EXECUTABLE,
        },
    })
}

impl Inner {
    /// Sends a signal to the program of a session with a kernel of its own, or to a command in it. `false` if that has
    /// ended.
    pub(super) async fn signal_inside(
        self: &Arc<Self>,
        key: &ContainerKey,
        command: Option<&str>,
        signal: SignalNumber,
    ) -> Result<bool, RuntimeError> {
        let target = match command {
            None => Vec::new(),
            Some(name) => match self.pid_inside(key, name).await? {
                Some(pid) => vec![format!("--pid={pid}")],
                None => return Ok(false),
            },
        };
        let (code, output) = self.runsc_kill(key, target, signal.get()).await?;
        match code {
            Some(0) => Ok(true),
            _ if output.contains(NO_SUCH_PROCESS) => Ok(false),
            _ => Err(refused(
                "signal",
                key,
                format!("`runsc kill` says: {output}"),
            )),
        }
    }

    /// Sets the limit of CPU time of a session whose kernel runs.
    pub(super) async fn limit_kernel_cpu(
        self: &Arc<Self>,
        key: &ContainerKey,
        millis: u64,
    ) -> Result<(), RuntimeError> {
        let (inner, owned) = (Arc::clone(self), key.clone());
        let limited = away("start", move || {
            Ok(inner.kernel.limit_cpu(&owned, inner.within_total(millis)))
        });
        // Without its limit it must not run.
        limited.await?.map_err(|error| RuntimeError::Unavailable {
            runtime: RuntimeKind::Gvisor,
            action: "limit the processor time of a session",
            reason: format!("{key}: {error}"),
        })
    }

    /// The same after a crash of the daemon, which may have come between the start of the kernel and its limit. Blocks.
    pub(super) fn limit_kernel_cpu_again(&self, key: &ContainerKey, millis: u64) {
        match self.kernel.limit_cpu(key, self.within_total(millis)) {
            Ok(()) => {}
            // It has ended.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                tracing::error!(container = %key, %error, "cannot limit the session's CPU time");
            }
        }
    }

    /// A v1 hierarchy accepts no limit of a container above the limit of all containers.
    fn within_total(&self, millis: u64) -> u64 {
        self.total_cpus
            .map_or(millis, |total| millis.min(super::program::millis(total)))
    }

    /// Whether the session's program has begun.
    pub(super) async fn kernel_runs(&self, key: &ContainerKey) -> Result<bool, RuntimeError> {
        let root = self.store.container(key).root();
        away("start", move || {
            // It is absent, and then incomplete, before.
            let text = read_state(&root, &format!("{SANDBOX}_sandbox:{SANDBOX}.state"));
            let text = text.unwrap_or_default();
            let state: Value = serde_json::from_str(&text).unwrap_or_default();
            Ok(state["status"] == "running")
        })
        .await
    }

    /// Kills a command in the session's kernel, with its process group.
    pub(super) async fn kill_inside(
        self: &Arc<Self>,
        key: &ContainerKey,
        command: &str,
    ) -> Result<(), RuntimeError> {
        let Some(pid) = self.pid_inside(key, command).await? else {
            return Ok(());
        };
        let group = vec![format!("--pgid={pid}")];
        let (code, output) = self.runsc_kill(key, group, SIGKILL).await?;
        if code == Some(0) || output.contains(NO_SUCH_PROCESS) {
            return Ok(());
        }
        Err(refused(
            "kill a command in",
            key,
            format!("`runsc kill` says: {output}"),
        ))
    }

    async fn runsc_kill(
        self: &Arc<Self>,
        key: &ContainerKey,
        target: Vec<String>,
        signal: i32,
    ) -> Result<(Option<i32>, String), RuntimeError> {
        let mut argv = self.gvisor.argv();
        argv.push("kill".to_owned());
        argv.extend(target);
        argv.extend([SANDBOX.to_owned(), signal.to_string()]);
        help(Arc::clone(self), key.clone(), kernel_program(argv, None)).await
    }

    /// The pid in the session of a command, as `runsc` wrote it down.
    async fn pid_inside(
        &self,
        key: &ContainerKey,
        command: &str,
    ) -> Result<Option<i32>, RuntimeError> {
        let (root, name) = (self.store.container(key).root(), command.to_owned());
        // There is none of a command that has not begun.
        away("find a command of", move || {
            let text = read_state(&root, &name).ok();
            Ok(text.and_then(|text| text.trim().parse().ok()))
        })
        .await
    }

    /// Whether a command has begun.
    pub(super) async fn has_begun_inside(&self, key: &ContainerKey, command: &str) -> bool {
        matches!(self.pid_inside(key, command).await, Ok(Some(_)))
    }

    /// Removes what is written down of a command that has ended.
    pub(super) async fn forget_inside(&self, key: &ContainerKey, command: &str) {
        let (root, name) = (self.store.container(key).root(), command.to_owned());
        // There is none of a command that did not begin.
        let _ = away("forget a command of", move || {
            Ok(remove_state(&root, &name).is_ok())
        })
        .await;
    }
}

/// Reads a file of the kernel's state. What breaks out of the kernel may have put links, pipes and endless files there.
fn read_state(root: &Path, name: &str) -> io::Result<String> {
    let path = Path::new(STATE_ON_HOST).join(name);
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(open_file_in_root(File::open(root)?, &path, flags)?);
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let mut text = String::new();
    file.take(MAX_STATE_BYTES).read_to_string(&mut text)?;
    Ok(text)
}

/// Removes a file of the kernel's state, and nothing outside of it.
fn remove_state(root: &Path, name: &str) -> io::Result<()> {
    let state = Path::new(STATE_ON_HOST);
    let state = open_in_root(
        File::open(root)?,
        state,
        OFlags::DIRECTORY | OFlags::CLOEXEC,
    )?;
    Ok(unlinkat(&state, name, AtFlags::empty())?)
}

/// `runsc` as the program of a container or a command in it.
fn kernel_program(argv: Vec<String>, nofile: Option<u64>) -> ProgramSpec {
    ProgramSpec {
        argv,
        env: Vec::new(),
        workdir: "/".to_owned(),
        uid: 0,
        gid: 0,
        groups: Vec::new(),
        nofile,
    }
}

/// What the sandbox runs, as an OCI specification.
fn configuration(session: &ProgramSpec, launch: &LaunchSpec) -> Value {
    let env: Vec<_> = session
        .env
        .iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    let open_files = session.nofile.unwrap_or(1_024);
    json!({
        "ociVersion": "1.2.0",
        "hostname": launch.hostname,
        "root": { "path": SESSION_ROOT, "readonly": launch.root.read_only },
        "process": {
            "terminal": launch.terminal.is_some(),
            "user": {
                "uid": session.uid,
                "gid": session.gid,
                "additionalGids": session.groups,
            },
            "args": session.argv,
            "env": env,
            "cwd": session.workdir,
            "noNewPrivileges": true,
            "capabilities": {
                "bounding": CAPABILITIES,
                "permitted": CAPABILITIES,
                "effective": CAPABILITIES,
            },
            "rlimits": [{ "type": "RLIMIT_NOFILE", "soft": open_files, "hard": open_files }],
        },
        "mounts": [
            { "destination": "/proc", "type": "proc", "source": "proc" },
            { "destination": "/dev", "type": "tmpfs", "source": "tmpfs" },
            { "destination": "/dev/pts", "type": "devpts", "source": "devpts" },
            { "destination": "/dev/shm", "type": "tmpfs", "source": "shm" },
            // Otherwise gVisor keeps it in memory.
            { "destination": "/tmp", "type": "bind", "source": SESSION_TMP, "options": ["rw"] },
            { "destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"] },
        ],
        "linux": {
            "namespaces": [
                { "type": "pid" }, { "type": "ipc" }, { "type": "uts" }, { "type": "mount" },
            ],
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session() -> ProgramSpec {
        ProgramSpec {
            argv: vec!["python3".to_owned(), "-i".to_owned()],
            env: vec![("A".to_owned(), "1".to_owned())],
            workdir: "/srv".to_owned(),
            uid: 7,
            gid: 8,
            groups: vec![9],
            nofile: Some(64),
        }
    }

    #[test]
    fn a_command_runs_as_its_user_where_and_with_what_it_was_asked_and_after_the_operators_arguments()
     {
        let options = GvisorOptions {
            arguments: vec!["--platform=kvm".to_owned()],
            ..GvisorOptions::default()
        };
        let wrapped = options.wrap_command(session(), "exec.1");
        assert_eq!((wrapped.uid, &*wrapped.workdir), (0, "/"));
        assert!(wrapped.env.is_empty(), "{:?}", wrapped.env);
        let line = wrapped.argv.join(" ");
        let expected = "--platform=kvm exec --internal-pid-file=/state/exec.1 --cwd /srv --user 7:8 \
                        --additional-gids 9 --env A=1 session python3 -i";
        assert!(
            line.starts_with("/runsc ") && line.ends_with(expected),
            "{line}"
        );
    }

    #[test]
    fn a_program_that_cannot_be_loaded_is_no_such_command() {
        let key = ContainerKey::new("s".parse().expect("an id"), conman_proto::Generation::FIRST);
        let code = |output: &str| match not_run(&key, &session(), output) {
            Some(RuntimeError::NoSuchCommand { exit_code, .. }) => Some(exit_code),
            _ => None,
        };
        let failed = "running container: creating process: failed to load python3: ";
        assert_eq!(
            code(&format!("{failed}no such file or directory")),
            Some(127)
        );
        assert_eq!(code(&format!("{failed}permission denied")), Some(126));
        assert_eq!(code("running container: no space left on device"), None);
    }

    #[test]
    fn what_escaped_from_the_kernel_cannot_make_conman_read_or_remove_anything_of_the_host() {
        let directory = tempfile::tempdir().expect("a directory");
        let root = directory.path().join("root");
        let state = root.join(STATE_ON_HOST);
        std::fs::create_dir_all(&state).expect("made");
        let outside = directory.path().join("outside");
        std::fs::write(&outside, "42\n").expect("written");
        std::fs::write(state.join("exec.1"), "7\n").expect("written");
        assert_eq!(read_state(&root, "exec.1").expect("read"), "7\n");
        std::os::unix::fs::symlink(&outside, state.join("link")).expect("linked");
        rustix::fs::mknodat(
            CWD,
            state.join("pipe"),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::from_raw_mode(0o600),
            0,
        )
        .expect("made");
        for name in ["link", "pipe", "absent"] {
            read_state(&root, name).expect_err(name);
        }
        remove_state(&root, "exec.1").expect("removed");
        // In place of the whole state.
        std::fs::remove_dir_all(&state).expect("removed");
        std::os::unix::fs::symlink(directory.path(), &state).expect("linked");
        read_state(&root, "outside").expect_err("outside");
        remove_state(&root, "outside").expect_err("outside");
        assert!(outside.exists());
    }
}
