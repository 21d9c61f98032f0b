//! The last steps of a container's or a command's process: its privileges, and the program's exec.

use std::ffi::{CString, NulError};
use std::io;
use std::path::Path;

use conman_linux::{
    Capabilities, Resource, become_user, bound_capabilities, close_on_exec_from,
    limit_capabilities, lower_limit, no_new_privileges,
};
use conman_shim_protocol::{Hardening, LaunchError, ProgramSpec};
use nix::errno::Errno;
use nix::sys::stat::{Mode, umask};
use nix::unistd::execve;

use super::steps::step;
use crate::seccomp_filter::Filter;

/// Search path for commands when `PATH` is not set.
const DEFAULT_PATH: &str = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin";

/// First descriptor after standard input, output and error.
const FIRST_OTHER_FD: u32 = 3;

/// Open files of a program whose spec does not limit them.
const DEFAULT_NOFILE: u64 = 65_536;

/// The maximum privileges of a program.
#[derive(Debug)]
pub(super) struct Privileges<'a> {
    pub(super) program: &'a ProgramSpec,
    pub(super) hardening: &'a Hardening,
    pub(super) capabilities: Capabilities,
    pub(super) filter: &'a Filter,
}

impl Privileges<'_> {
    /// Reduces the calling process, root of the container, to these.
    pub(super) fn apply(&self) -> Result<(), LaunchError> {
        let program = self.program;
        close_on_exec_from(FIRST_OTHER_FD).map_err(step("mark descriptors"))?;
        set_limits(program).map_err(step("set resource limits"))?;
        // Later this would need a process without new privileges.
        if self.hardening.seccomp && !self.hardening.no_new_privileges {
            self.filter.install().map_err(filter_step)?;
        }
        bound_capabilities(self.capabilities).map_err(step("bound the capabilities"))?;
        become_user(program.uid, program.gid, &program.groups).map_err(step("change the user"))?;
        let keep = if program.uid == 0 {
            self.capabilities
        } else {
            Capabilities::empty()
        };
        limit_capabilities(keep, false).map_err(step("limit the capabilities"))?;
        umask(Mode::from_bits_truncate(0o022));
        if self.hardening.no_new_privileges {
            no_new_privileges().map_err(step("forbid new privileges"))?;
            if self.hardening.seccomp {
                self.filter.install().map_err(filter_step)?;
            }
        }
        Ok(())
    }
}

fn set_limits(program: &ProgramSpec) -> io::Result<()> {
    lower_limit(
        Resource::RLIMIT_NOFILE,
        program.nofile.unwrap_or(DEFAULT_NOFILE),
    )
}

/// The kernel reports an exhausted pool of compiled filters by a number that has no text.
fn filter_step(error: io::Error) -> LaunchError {
    let name = "install the system call filter";
    if error.raw_os_error() == Some(LaunchError::NO_FILTER_MEMORY) {
        let limit = "net.core.bpf_jit_limit is reached, so the kernel compiles no more filters";
        return LaunchError::Step {
            step: name.to_owned(),
            errno: LaunchError::NO_FILTER_MEMORY,
            reason: limit.to_owned(),
        };
    }
    step(name)(error)
}

/// Returns only with the reason for a failure.
///
/// Uses only execve: the C library's search would pass a file without a known format to a shell.
pub(super) fn execute(program: &ProgramSpec) -> LaunchError {
    let Some(command) = program.argv.first() else {
        return LaunchError::EndedEarly;
    };
    let not_executable = |reason: &str| LaunchError::NotExecutable {
        command: command.clone(),
        reason: reason.to_owned(),
    };
    let strings = |strings: &mut dyn Iterator<Item = String>| -> Result<Vec<CString>, NulError> {
        strings.map(CString::new).collect()
    };
    let argv = strings(&mut program.argv.iter().cloned());
    let variables = &mut program
        .env
        .iter()
        .map(|(key, value)| format!("{key}={value}"));
    let (Ok(argv), Ok(env)) = (argv, strings(variables)) else {
        return not_executable("a NUL byte in its arguments");
    };
    let mut worst = Errno::ENOENT;
    for path in candidates(command, &program.env) {
        match execve(&path, &argv, &env) {
            Ok(never) => match never {},
            // Continue the search, as every shell does.
            Err(Errno::ENOENT | Errno::ENOTDIR) => {}
            Err(Errno::EACCES) => worst = Errno::EACCES,
            Err(errno) => {
                worst = errno;
                break;
            }
        }
    }
    match worst {
        Errno::ENOENT if exists(command) => {
            not_executable("the interpreter or loader that it names does not exist")
        }
        Errno::ENOENT => LaunchError::CommandNotFound {
            command: command.clone(),
        },
        errno => not_executable(&io::Error::from(errno).to_string()),
    }
}

/// Candidates for a command: its path, or the directories of `PATH`.
fn candidates(command: &str, env: &[(String, String)]) -> Vec<CString> {
    if command.contains('/') {
        return CString::new(command).into_iter().collect();
    }
    let path = env.iter().rev().find(|(key, _)| key == "PATH");
    let path = path.map_or(DEFAULT_PATH, |(_, value)| value.as_str());
    path.split(':')
        .map(|directory| match directory {
            "" => format!("./{command}"),
            directory => format!("{directory}/{command}"),
        })
        .filter_map(|path| CString::new(path).ok())
        .collect()
}

/// Whether the command's file exists. Known only for a command with a slash.
fn exists(command: &str) -> bool {
    command.contains('/') && CString::new(command).is_ok() && Path::new(command).exists()
}
