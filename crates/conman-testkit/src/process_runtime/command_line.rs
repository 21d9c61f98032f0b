//! The environment of containers without an image, and the lookup of commands in them.

use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use conman_proto::ResolvedSpec;

use conman_runtime::ContainerKey;
use conman_runtime::shared::container_files::generation_environment;

/// What a container without a command runs: a program that sleeps until it is killed.
const DEFAULT_COMMAND: [&str; 2] = ["sleep", "infinity"];

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Why a command cannot be run, with the exit code that shells use for it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Unrunnable {
    pub(super) exit_code: i32,
    pub(super) reason: &'static str,
}

/// The container's program and arguments.
pub(super) fn program(spec: &ResolvedSpec) -> Vec<String> {
    let mut command = spec.command.clone();
    if command.is_empty() {
        command = DEFAULT_COMMAND.map(str::to_owned).to_vec();
    }
    command.extend(spec.args.iter().cloned());
    command
}

/// The container's environment; later entries win.
pub(super) fn environment(key: &ContainerKey, spec: &ResolvedSpec) -> Vec<(String, String)> {
    let mut environment = vec![
        ("PATH".to_owned(), DEFAULT_PATH.to_owned()),
        ("HOME".to_owned(), "/root".to_owned()),
        ("HOSTNAME".to_owned(), key.session.to_string()),
    ];
    environment.extend(
        spec.env
            .iter()
            .map(|(name, value)| (name.clone(), value.clone())),
    );
    environment.extend(generation_environment(key));
    environment
}

/// Looks `command` up as execvp(3) does.
pub(super) fn check_runnable(
    command: &str,
    environment: &[(String, String)],
) -> Result<(), Unrunnable> {
    if command.contains('/') {
        return check_file(Path::new(command));
    }
    let path = environment.iter().rev().find(|(name, _)| name == "PATH");
    let path = path.map_or(DEFAULT_PATH, |(_, value)| value);
    let mut worst = Unrunnable {
        exit_code: 127,
        reason: "not found in PATH",
    };
    for dir in path.split(':') {
        match check_file(&Path::new(dir).join(command)) {
            Ok(()) => return Ok(()),
            Err(unrunnable) if unrunnable.exit_code == 126 => worst = unrunnable,
            Err(_) => {}
        }
    }
    Err(worst)
}

fn check_file(path: &Path) -> Result<(), Unrunnable> {
    match path.metadata() {
        Ok(metadata) if metadata.is_dir() => Err(Unrunnable {
            exit_code: 126,
            reason: "is a directory",
        }),
        Ok(metadata) if metadata.permissions().mode() & 0o111 == 0 => Err(Unrunnable {
            exit_code: 126,
            reason: "permission denied",
        }),
        Ok(_) => Ok(()),
        Err(error) if error.kind() == ErrorKind::PermissionDenied => Err(Unrunnable {
            exit_code: 126,
            reason: "permission denied",
        }),
        Err(_) => Err(Unrunnable {
            exit_code: 127,
            reason: "no such file or directory",
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(value: &str) -> Vec<(String, String)> {
        vec![("PATH".to_owned(), value.to_owned())]
    }

    #[test]
    fn commands_are_looked_up_as_a_shell_does() {
        assert_eq!(check_runnable("sh", &[]), Ok(()));
        assert_eq!(check_runnable("/bin/sh", &path("/nowhere")), Ok(()));
        let missing = check_runnable("sh", &path("/nowhere")).expect_err("not in that PATH");
        assert_eq!(missing.exit_code, 127);
        assert_eq!(
            check_runnable("/etc", &[])
                .expect_err("a directory")
                .exit_code,
            126
        );
        assert_eq!(
            check_runnable("/etc/passwd", &[])
                .expect_err("no program")
                .exit_code,
            126
        );
        assert_eq!(
            check_runnable("passwd", &path("/etc"))
                .expect_err("same")
                .exit_code,
            126
        );
    }
}
