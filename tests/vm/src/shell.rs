use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Runs commands on a machine over SSH, each bounded by `timeout` there.
#[derive(Debug)]
pub(crate) struct Shell {
    pub(crate) key: PathBuf,
    pub(crate) port: u16,
}

/// Bound on one command there; an emulated machine is some thirty times slower than its host.
const COMMAND_SECONDS: u32 = 180;

/// How a command on the machine ended.
#[derive(Debug)]
pub struct Output {
    pub command: String,
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Output {
    /// What it printed.
    ///
    /// # Panics
    /// When it failed.
    #[must_use]
    pub fn ok(self) -> String {
        assert_eq!(
            self.code,
            Some(0),
            "`{}` failed on the machine:\n{}{}",
            self.command,
            self.stdout,
            self.stderr
        );
        self.stdout
    }
}

impl Shell {
    pub(crate) fn run(&self, command: &str) -> Output {
        let output = Command::new("ssh")
            .arg("-i")
            .arg(&self.key)
            .args(["-o", "StrictHostKeyChecking=no"])
            .args(["-o", "UserKnownHostsFile=/dev/null"])
            .args(["-o", "LogLevel=ERROR", "-o", "BatchMode=yes"])
            .args(["-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=15"])
            .args(["-p", &self.port.to_string(), "root@127.0.0.1"])
            .arg(format!(
                "timeout {COMMAND_SECONDS} sh -c {}",
                quoted(command)
            ))
            .stdin(Stdio::null())
            .output()
            .expect("ssh is installed");
        Output {
            command: command.to_owned(),
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

/// As one word of a shell's command line.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quoted_command_reaches_the_shell_as_it_is() {
        let command = r#"printf '%s' "it's $((1 + 1))""#;
        let output = Command::new("sh")
            .args(["-c", &format!("sh -c {}", quoted(command))])
            .output()
            .expect("there is a shell");
        assert_eq!(String::from_utf8_lossy(&output.stdout), "it's 2");
    }
}
