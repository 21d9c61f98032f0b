//! Runs commands on a machine over SSH.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Runs commands on a machine over SSH.
///
/// Each command is a unit of systemd's there, with its output in files, and short connections look
/// after it: where one breaks or falls silent, another one follows, and nothing is run twice.
/// Logging in takes an emulated machine seconds; once it has worked, connections go through a
/// shared one, as long as that one lives.
#[derive(Debug)]
pub(crate) struct Shell {
    key: PathBuf,
    port: u16,
    next: AtomicU32,
    /// Of the shared connection.
    socket: PathBuf,
    shared: Mutex<Option<Child>>,
}

/// How often one look sees whether a command has ended, a fifth of a second apart; most have.
const GLANCES: u32 = 150;
/// Bound on one connection, whatever it hangs in; far more than a look takes on a busy host.
const CONNECTION_SECONDS: u32 = 180;
/// What ssh itself ends with where a connection fails, and `timeout` for it.
const BROKEN: [Option<i32>; 4] = [Some(255), Some(124), Some(137), None];
/// How a look ends that has seen no end (EX_TEMPFAIL).
const NOT_YET: i32 = 75;

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

/// A command that a machine has been given.
#[derive(Debug)]
pub(crate) struct Task<'a> {
    shell: &'a Shell,
    command: &'a str,
    script: String,
}

impl Shell {
    /// Logs in at this port of the host's loopback with this key; the shared connection's socket
    /// goes there.
    pub(crate) fn new(key: PathBuf, port: u16, socket: PathBuf) -> Self {
        Self {
            key,
            port,
            next: AtomicU32::new(0),
            socket,
            shared: Mutex::new(None),
        }
    }

    /// A command that `timeout` there ends after so long; the first look starts it.
    pub(crate) fn task<'a>(&'a self, command: &'a str, limit: Duration) -> Task<'a> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let script = look(number, command, limit);
        Task {
            shell: self,
            command,
            script,
        }
    }

    /// Runs a script in one connection; a broken one has the code 255.
    pub(crate) fn connect(&self, script: &str) -> Output {
        let mut command = Command::new("timeout");
        command.args(["-k", "5", &CONNECTION_SECONDS.to_string(), "ssh"]);
        self.address(&mut command);
        let output = command
            .arg(format!("sh -c {}", quoted(script)))
            .stdin(Stdio::null())
            .output()
            .expect("ssh is installed");
        if !BROKEN.contains(&output.status.code()) {
            self.share();
        }
        Output {
            command: script.to_owned(),
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// Sees to it that there is a shared connection, or will be soon.
    fn share(&self) {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(ssh) = shared.as_mut()
            && ssh.try_wait().expect("it is our child").is_none()
        {
            return;
        }
        // One that was killed leaves it, and it would keep the next one from sharing.
        let _ = fs::remove_file(&self.socket);
        let mut command = Command::new("ssh");
        command.args(["-N", "-o", "ControlMaster=yes"]);
        self.address(&mut command);
        let ssh = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        *shared = Some(ssh.expect("ssh is installed"));
    }

    fn address(&self, command: &mut Command) {
        command
            .arg("-i")
            .arg(&self.key)
            .arg("-S")
            .arg(&self.socket)
            .args(["-o", "StrictHostKeyChecking=no"])
            .args(["-o", "UserKnownHostsFile=/dev/null"])
            .args(["-o", "LogLevel=ERROR", "-o", "BatchMode=yes"])
            .args(["-o", "ConnectTimeout=60", "-o", "ServerAliveInterval=15"])
            // What is preferred otherwise takes an emulated machine two seconds more.
            .args(["-o", "KexAlgorithms=curve25519-sha256"])
            .args(["-p", &self.port.to_string(), "root@127.0.0.1"]);
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        let shared = self.shared.get_mut();
        if let Some(ssh) = shared.unwrap_or_else(PoisonError::into_inner) {
            let _ = ssh.kill();
            let _ = ssh.wait();
        }
    }
}

impl Task<'_> {
    /// How it ended; otherwise what the connection said, if there is anything to say.
    pub(crate) fn look(&self) -> Result<Output, String> {
        let seen = self.shell.connect(&self.script);
        if seen.code == Some(NOT_YET) {
            return Err(String::new());
        }
        let told = || {
            let (sizes, output) = seen.stdout.split_once('\n')?;
            let (code, size) = sizes.split_once(' ')?;
            let (stdout, stderr) = output.split_at_checked(size.parse().ok()?)?;
            Some(Output {
                command: self.command.to_owned(),
                code: Some(code.parse().ok()?),
                stdout: stdout.to_owned(),
                stderr: stderr.to_owned(),
            })
        };
        match told() {
            Some(output) if seen.code == Some(0) => Ok(output),
            _ => Err(format!("{:?} {}", seen.code, seen.stderr.trim())),
        }
    }
}

/// A script that starts a command unless that has been done, and tells its end if there is one soon.
fn look(number: u32, command: &str, limit: Duration) -> String {
    let seconds = limit.as_secs();
    let wrapper = format!(
        "timeout -k 5 {seconds} sh -c {} >{number}.out 2>{number}.err
echo $? >{number}.new
mv {number}.new {number}.code
",
        quoted(command)
    );
    format!(
        "mkdir -p /run/conman-vm && cd /run/conman-vm || exit 1
if ! systemctl --quiet is-active command-{number} && ! [ -e {number}.code ]; then
    printf %s {} >{number}.sh
    systemd-run --quiet --collect --unit command-{number} --working-directory $PWD \\
        --setenv HOME=/root sh {number}.sh
fi
looks=0
until [ -e {number}.code ]; do
    looks=$((looks + 1))
    [ $looks -le {GLANCES} ] || exit {NOT_YET}
    sleep 0.2
done
echo $(cat {number}.code) $(wc -c <{number}.out)
cat {number}.out {number}.err",
        quoted(&wrapper)
    )
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
