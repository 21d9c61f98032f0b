//! Sessions whose program is run by an OCI runtime (gVisor's `runsc`, `crun`, `runc`) in a native container.
//!
//! The container is what it is for native sessions: namespaces, cgroups, layers, binds, network, log and fence. Its
//! program is the runtime, which finds the session's root at [`conman_shim_protocol::SESSION_ROOT`] and runs the
//! session's program there. So everything that conman proves of a native container holds here: the runtime, its helpers
//! and the session's processes are in the container's PID namespace and cgroups, and die with it. What breaks out of
//! what the runtime makes is in the container, as a user without rights. The runtime makes no network and manages no
//! cgroups.
//!
//! conman uses two commands of the runtime: `run` for the session's program, and `exec` for each command, with a
//! description and a pid file in a directory that the session cannot reach. The processes of the session are found by
//! those pids in the session's cgroups. gVisor's are not there, which is what [`super::gvisor`] is for.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use conman_linux::{Mount, PidFd, SignalNumber, pid_below};
use conman_proto::RuntimeKind;
use conman_shim_protocol::{
    Hardening, LaunchSpec, ProgramSpec, RUNTIME_CONFIG, RUNTIME_PROGRAM, TerminalSize,
};
use rustix::fs::CWD;

use super::oci_spec::{configuration, process};
use super::oci_state::{STATE, read_state, remove_state, write_state};
use super::{Inner, away, gvisor, store};
use crate::lifecycle::signal_process;
use crate::shared::container_files::host_error;
use crate::shared::exec_kill::kill_command;
use crate::{ContainerKey, RuntimeError};

/// The session's container, as its runtime names it.
pub(super) const CONTAINER: &str = "session";

const SIGKILL: i32 = 9;

/// The exit codes of programs that do not exist, and that cannot be executed.
pub(super) const NOT_FOUND: i32 = 127;
const NOT_EXECUTABLE: i32 = 126;

/// The pid file of the session's program.
pub(super) const PROGRAM: &str = "program";

/// Threads of the runtime besides the session's: its own, and those of a command.
const RUNTIME_PIDS: u64 = 256;

/// Where programs have their libraries. Not every host has all of them.
const LIBRARIES: [&str; 3] = ["/lib", "/lib64", "/usr/lib"];

/// An OCI runtime, and how it is run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OciOptions {
    /// It is gVisor's `runsc`.
    pub is_gvisor: bool,
    /// The program, of the host.
    pub program: PathBuf,
    /// Arguments before its command, after conman's own: `--platform=kvm`, for example.
    pub arguments: Vec<String>,
}

impl OciOptions {
    /// gVisor, where its packages install it.
    #[must_use]
    pub fn gvisor() -> Self {
        Self {
            is_gvisor: true,
            program: "/usr/local/bin/runsc".into(),
            arguments: Vec::new(),
        }
    }

    /// The layers around it.
    pub(super) fn hardening(&self) -> Hardening {
        let files = [RUNTIME_PROGRAM, RUNTIME_CONFIG];
        if self.is_gvisor {
            // Without SETPCAP `runsc` does not drop the other capabilities from the bounding set of each of its
            // threads, which would take a third of its start: they are not in it.
            return Hardening::of_oci_runtime(&files);
        }
        let libraries = LIBRARIES
            .into_iter()
            .filter(|path| Path::new(path).is_dir());
        let files: Vec<_> = files.into_iter().chain(libraries).collect();
        let mut hardening = Hardening::of_oci_runtime(&files);
        let capabilities = hardening.capabilities.get_or_insert_default();
        capabilities.push("SETPCAP".to_owned());
        hardening
    }

    /// Makes the start order of a native container one whose program is the runtime. Returns the session's program.
    /// Takes the limit of CPU time out: it would throttle the start of the runtime, and is set once the program runs.
    pub(super) fn wrap(&self, launch: &mut LaunchSpec) -> (ProgramSpec, Option<u64>) {
        let mut argv = self.argv();
        argv.extend(["run", "--bundle", "/"].map(str::to_owned));
        if !self.is_gvisor {
            argv.push(format!("--pid-file={STATE}/{PROGRAM}"));
        }
        argv.push(CONTAINER.to_owned());
        let runtime = runtime_program(argv, launch.program.nofile);
        launch.hardening = self.hardening();
        launch.limits.pids = launch.limits.pids.map(|most| most + RUNTIME_PIDS);
        // Runtimes of the host's kernel look at their cgroups, and pass them on to the session.
        launch.sys = !self.is_gvisor;
        // The session's terminals are in the file system that the runtime mounts.
        launch.ptys_when_asked = true;
        let session = std::mem::replace(&mut launch.program, runtime);
        (session, launch.limits.cpu_millis.take())
    }

    /// The runtime's files in the order of the launch, of which the configuration is written here. Blocks.
    pub(super) fn files(
        &self,
        session: &ProgramSpec,
        launch: &LaunchSpec,
        config: &Path,
    ) -> Result<Vec<Mount>, RuntimeError> {
        let text = configuration(self.is_gvisor, session, launch).to_string();
        std::fs::write(config, text).map_err(|source| host_error("write", config, source))?;
        let files = launch.hardening.runtime_files.iter();
        files
            .map(|path| {
                let (action, host) = match path.as_str() {
                    RUNTIME_PROGRAM => (
                        "find the OCI runtime (`path` in `[runtimes]`; `conman doctor` reports what to install) at",
                        &*self.program,
                    ),
                    RUNTIME_CONFIG => ("use", config),
                    libraries => ("show the OCI runtime its libraries in", Path::new(libraries)),
                };
                let copy = host.canonicalize().and_then(|real| Mount::copy_of(CWD, &real));
                copy.map_err(|source| host_error(action, host, source))
            })
            .collect()
    }

    /// The program with conman's arguments and the operator's.
    pub(super) fn argv(&self) -> Vec<String> {
        let own = [RUNTIME_PROGRAM.to_owned(), format!("--root={STATE}")];
        let gvisors = self.is_gvisor.then_some(gvisor::ARGUMENTS);
        let gvisors = gvisors.into_iter().flatten().map(str::to_owned);
        own.into_iter()
            .chain(gvisors)
            .chain(self.arguments.clone())
            .collect()
    }

    /// The runtime as a command that runs what the file with its description has.
    fn command(&self, name: &str, nofile: Option<u64>) -> ProgramSpec {
        let pid_file = match self.is_gvisor {
            true => gvisor::PID_FILE,
            false => "--pid-file",
        };
        let mut argv = self.argv();
        argv.push("exec".to_owned());
        argv.push(format!("{pid_file}={STATE}/{name}"));
        argv.push(format!("--process={STATE}/{}", description(name)));
        argv.push(CONTAINER.to_owned());
        runtime_program(argv, nofile)
    }

    /// Whether the end of a runtime's command with this code may mean that it can run nothing. One that was killed,
    /// as all are with their session, has not failed.
    pub(super) fn may_have_failed(&self, exit_code: Option<i32>) -> bool {
        match self.is_gvisor {
            true => exit_code == Some(gvisor::FAILED),
            false => exit_code.is_none_or(|code| ![0, 128 + SIGKILL].contains(&code)),
        }
    }
}

/// The failure of a start in which nothing has begun, if `output` of the runtime names the session's program.
pub(super) fn not_run(
    key: &ContainerKey,
    session: &ProgramSpec,
    output: &str,
) -> Option<RuntimeError> {
    let command = session.argv.first()?;
    let is_about = |line: &&str| line.contains(&**command) || line.contains("executable");
    let line = output.lines().rfind(is_about)?;
    let lower = line.to_lowercase();
    let exit_code = if lower.contains("no such file") || lower.contains("not found") {
        NOT_FOUND
    } else if ["permission denied", "not permitted", "failed to load"]
        .iter()
        .any(|why| lower.contains(why))
    {
        NOT_EXECUTABLE
    } else {
        return None;
    };
    Some(RuntimeError::NoSuchCommand {
        command: command.clone(),
        subject: key.to_string(),
        reason: line.trim().to_owned(),
        exit_code,
    })
}

impl Inner {
    /// The runtime of a container.
    pub(super) fn oci_of(&self, key: &ContainerKey) -> Result<&OciOptions, RuntimeError> {
        self.oci(self.kind_of(key))
    }

    pub(super) fn oci(&self, runtime: RuntimeKind) -> Result<&OciOptions, RuntimeError> {
        let configured = self.oci.get(&runtime);
        configured.ok_or_else(|| RuntimeError::Unavailable {
            runtime,
            action: "run an OCI runtime",
            reason: format!("the configuration has no `[runtimes.{runtime}]`; add it"),
        })
    }

    /// Makes a command of a native container one of its runtime's.
    pub(super) async fn wrap_command(
        &self,
        key: &ContainerKey,
        command: &ProgramSpec,
        (name, terminal): (&str, Option<TerminalSize>),
    ) -> Result<ProgramSpec, RuntimeError> {
        let oci = self.oci_of(key)?;
        let text = process(oci.is_gvisor, command, terminal).to_string();
        let (root, file) = (self.store.container(key).root(), description(name));
        away("describe a command of", move || {
            match write_state(&root, &file, &text) {
                // It does not run, which the shim answers.
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                written => {
                    written.map_err(|source| host_error("write a file below", &root, source))
                }
            }
        })
        .await?;
        Ok(oci.command(name, command.nofile))
    }

    /// Sends a signal to the program of a session, or to a command in it. `false` if that has ended.
    pub(super) async fn signal_inside(
        self: &Arc<Self>,
        key: &ContainerKey,
        command: Option<&str>,
        signal: SignalNumber,
    ) -> Result<bool, RuntimeError> {
        if !self.oci_of(key)?.is_gvisor {
            let process = self.process_inside(key, command.unwrap_or(PROGRAM)).await?;
            return process.map_or(Ok(false), |process| signal_process(&process, signal));
        }
        let target = match command {
            None => None,
            Some(name) => match self.pid_inside(key, name).await? {
                Some(pid) => Some(format!("--pid={pid}")),
                None => return Ok(false),
            },
        };
        self.runsc_kill(key, target, signal.get()).await
    }

    /// Kills a command in the session, with its process group or its session (setsid(2)).
    pub(super) async fn kill_inside(
        self: &Arc<Self>,
        key: &ContainerKey,
        command: &str,
    ) -> Result<(), RuntimeError> {
        if !self.oci_of(key)?.is_gvisor {
            let Some(process) = self.process_inside(key, command).await? else {
                return Ok(());
            };
            let (inner, owned) = (Arc::clone(self), key.clone());
            let kill = move || kill_command(&inner.kernel, &owned, &process);
            return away("kill a command in", kill).await;
        }
        let Some(pid) = self.pid_inside(key, command).await? else {
            return Ok(());
        };
        let group = Some(format!("--pgid={pid}"));
        self.runsc_kill(key, group, SIGKILL).await.map(|_| ())
    }

    /// The process with this pid file, which the host sees; `None` if it has ended or not begun.
    async fn process_inside(
        self: &Arc<Self>,
        key: &ContainerKey,
        name: &str,
    ) -> Result<Option<PidFd>, RuntimeError> {
        let Some(pid) = self.pid_inside(key, name).await? else {
            return Ok(None);
        };
        let (inner, key) = (Arc::clone(self), key.clone());
        away("find a process of", move || {
            let all = inner.kernel.pids(&key);
            let all =
                all.map_err(|source| host_error("list processes in", "/proc".as_ref(), source))?;
            let is_it = |host| pid_below(host) == Some(pid) && inner.kernel.owns_pid(&key, host);
            let found = all.into_iter().filter(|host| is_it(*host));
            // Checked again, since the pidfd keeps the pid from being reused.
            let mut held = found.filter_map(|host| PidFd::open(host).ok());
            Ok(held.find(|process| is_it(process.pid())))
        })
        .await
    }

    /// Whether the session's program has begun.
    pub(super) async fn program_runs(&self, key: &ContainerKey) -> Result<bool, RuntimeError> {
        if !self.oci_of(key)?.is_gvisor {
            return Ok(self.has_begun_inside(key, PROGRAM).await);
        }
        let root = self.store.container(key).root();
        away("start", move || Ok(gvisor::runs(&root))).await
    }

    /// The pid in the session of a command, as the runtime wrote it down.
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
        let _ = away("forget a command of", move || {
            for name in [&*description(&name), &*name] {
                // There is none of a command that did not begin.
                let _ = remove_state(&root, name);
            }
            Ok(())
        })
        .await;
    }

    /// Sets the limit of CPU time of a session whose program has begun.
    pub(super) async fn limit_cpu_of_started(
        self: &Arc<Self>,
        key: &ContainerKey,
        millis: u64,
    ) -> Result<(), RuntimeError> {
        let (inner, owned) = (Arc::clone(self), key.clone());
        let limited = away("start", move || {
            Ok(inner.kernel.limit_cpu(&owned, inner.within_total(millis)))
        });
        match limited.await? {
            // Without its limit it must not run.
            Err(error) if self.ends.of(&store::name(key)).is_none() => {
                Err(RuntimeError::Unavailable {
                    runtime: self.kind_of(key),
                    action: "limit the processor time of a session",
                    reason: format!("{key}: {error}"),
                })
            }
            _ => Ok(()),
        }
    }

    /// The same after a crash of the daemon, which may have come between the start of the program and its limit.
    /// Blocks.
    pub(super) fn limit_cpu_of_started_again(&self, key: &ContainerKey, millis: u64) {
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
}

/// The file with the description of a command.
fn description(command: &str) -> String {
    format!("{command}.json")
}

/// The runtime as the program of a container or a command in it.
pub(super) fn runtime_program(argv: Vec<String>, nofile: Option<u64>) -> ProgramSpec {
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
    fn a_command_is_the_runtimes_with_the_operators_arguments_before_it() {
        let gvisor = OciOptions {
            arguments: vec!["--platform=kvm".to_owned()],
            ..OciOptions::gvisor()
        };
        let other = OciOptions {
            is_gvisor: false,
            ..gvisor.clone()
        };
        for (options, pid_file) in [(gvisor, "--internal-pid-file"), (other, "--pid-file")] {
            let wrapped = options.command("exec.1", Some(64));
            assert_eq!((wrapped.uid, &*wrapped.workdir), (0, "/"));
            assert!(wrapped.env.is_empty(), "{:?}", wrapped.env);
            let line = wrapped.argv.join(" ");
            let expected = format!(
                "--platform=kvm exec {pid_file}=/state/exec.1 --process=/state/exec.1.json session"
            );
            let begins = line.starts_with("/runtime --root=/state ");
            assert!(begins && line.ends_with(&expected), "{line}");
        }
    }

    #[test]
    fn a_runtime_that_was_killed_has_not_failed_to_run_its_command() {
        let other = OciOptions {
            is_gvisor: false,
            ..OciOptions::gvisor()
        };
        assert!(!other.may_have_failed(Some(137)));
        assert!(other.may_have_failed(Some(1)) && other.may_have_failed(None));
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
        let of_crun = "executable file `python3` not found in $PATH: No such file or directory";
        assert_eq!(code(of_crun), Some(127));
        let of_runc = "exec: \"python3\": executable file not found in $PATH";
        assert_eq!(code(of_runc), Some(127));
        let directory = "open executable: Operation not permitted";
        assert_eq!(code(directory), Some(126));
    }
}
