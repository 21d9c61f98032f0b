//! A machine in an emulator.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::medium::Medium;
use crate::shell::{Output, Shell};
use crate::until;

/// An emulated boot takes half a minute on an idle host.
const BOOT_PATIENCE: Duration = Duration::from_secs(1200);
const POWER_OFF_PATIENCE: Duration = Duration::from_secs(600);
/// Bound on one command there; an emulated machine is some thirty times slower than its host, which
/// may have other work.
const COMMAND_PATIENCE: Duration = Duration::from_secs(600);
/// Beyond a command's own bound: until its end is seen.
const LOOK_PATIENCE: Duration = Duration::from_secs(600);
pub(crate) const EMULATOR: &str = "qemu-system-x86_64";
const MEMORY: &str = "2048";
/// The emulator would keep all processors busy on which other tests measure times.
const NICENESS: &str = "19";
/// Of what a machine said before a test failed on it.
const LAST_LINES: usize = 120;

/// Which kernel a machine runs; everything else is the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// The distribution's own.
    Distribution,
    /// The oldest that conman serves.
    Floor,
}

impl Kernel {
    /// Where its two files lie. `None` says on standard error why there are none.
    #[must_use]
    pub fn files(self, worker: &Path) -> Option<[PathBuf; 2]> {
        let prefix = match self {
            Self::Distribution => "",
            Self::Floor => "floor-",
        };
        let files = ["kernel", "initrd"].map(|name| worker.join(format!("{prefix}{name}")));
        if files.iter().all(|file| file.exists()) {
            return Some(files);
        }
        let why = fs::read_to_string(worker.join("no-floor-kernel")).unwrap_or_default();
        crate::say(&format!("skipped: no kernel of this kind: {why}"));
        None
    }
}

/// A running machine; dropping it cuts its power.
#[derive(Debug)]
pub struct Machine {
    qemu: Mutex<Child>,
    shell: Shell,
    directory: TempDir,
    _medium: Medium,
}

impl Machine {
    /// Boots the disk in `worker` by its kernel and initial file system, with `medium` in the drive,
    /// and waits until one can log in.
    ///
    /// # Panics
    /// When it does not come up.
    #[must_use]
    pub fn boot(worker: &Path, [kernel, initrd]: [PathBuf; 2], medium: Medium) -> Self {
        let directory = tempfile::tempdir().expect("a temporary folder can be made");
        let port = free_port();
        let qemu = Command::new("nice")
            .args(["-n", NICENESS, EMULATOR])
            .args(["-nodefaults", "-machine", "q35", "-cpu", "max"])
            .args(["-accel", "tcg,thread=multi", "-smp", "2", "-m", MEMORY])
            .args(["-display", "none", "-no-reboot", "-snapshot"])
            .arg("-serial")
            .arg(format!(
                "file:{}",
                directory.path().join("console").display()
            ))
            .arg("-qmp")
            .arg(format!(
                "unix:{},server=on,wait=off",
                directory.path().join("qmp").display()
            ))
            .arg("-kernel")
            .arg(kernel)
            .arg("-initrd")
            .arg(initrd)
            // On a busy host, the kernel would find an emulated timer too slow, and panic.
            .args([
                "-append",
                "root=/dev/vda rw console=ttyS0 systemd.unified_cgroup_hierarchy=1 \
                 panic=1 quiet no_timer_check",
            ])
            .arg("-drive")
            .arg(drive(&worker.join("disk")))
            .arg("-drive")
            .arg(drive(&medium.image()))
            .arg("-nic")
            .arg(format!(
                "user,model=virtio-net-pci,restrict=on,hostfwd=tcp:127.0.0.1:{port}-:22"
            ))
            // The throw-away layer.
            .env("TMPDIR", directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .expect("the emulator is installed");
        let machine = Self {
            qemu: Mutex::new(qemu),
            shell: Shell::new(worker.join("key"), port, directory.path().join("shell")),
            directory,
            _medium: medium,
        };
        until("login", BOOT_PATIENCE, || {
            machine.assert_on();
            let answer = machine.shell.connect("systemctl is-system-running --wait");
            matches!(answer.code, Some(0 | 1)).then_some(())
        });
        machine
    }

    /// Runs a command in a root shell.
    ///
    /// # Panics
    /// When the machine does not tell how it ended.
    #[must_use]
    pub fn run(&self, command: &str) -> Output {
        self.run_within(command, COMMAND_PATIENCE)
    }

    /// Runs a command that may take so long.
    ///
    /// # Panics
    /// When the machine does not tell how it ended.
    #[must_use]
    pub fn run_within(&self, command: &str, limit: Duration) -> Output {
        let task = self.shell.task(command, limit);
        let what = format!("end of `{command}`");
        until(&what, limit + LOOK_PATIENCE, || {
            self.assert_on();
            let seen = task.look();
            if let Err(trouble) = &seen
                && !trouble.is_empty()
            {
                crate::say(&format!("looking after `{command}` again: {trouble}"));
            }
            seen.ok()
        })
    }

    /// Polls with `command` until it succeeds.
    ///
    /// # Panics
    /// When it does not in `patience`.
    pub fn until_ok(&self, command: &str, patience: Duration) -> String {
        until(&format!("success of `{command}`"), patience, || {
            let output = self.run(command);
            (output.code == Some(0)).then_some(output.stdout)
        })
    }

    /// What it has printed on its console.
    #[must_use]
    pub fn console(&self) -> String {
        let bytes = fs::read(self.directory.path().join("console")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Presses the power button, which is how clouds announce the end, waits until the machine is
    /// off, and gives what its console showed.
    ///
    /// # Panics
    /// When it stays on.
    #[must_use]
    pub fn power_off(self) -> String {
        self.order("system_powerdown");
        until("end of the machine", POWER_OFF_PATIENCE, || {
            (!self.is_on()).then_some(())
        });
        self.console()
    }

    fn is_on(&self) -> bool {
        let mut qemu = self.qemu.lock().unwrap_or_else(PoisonError::into_inner);
        qemu.try_wait().expect("it is our child").is_none()
    }

    fn assert_on(&self) {
        assert!(self.is_on(), "the machine went off by itself");
    }

    /// Says what it knows of its end, for whoever reads why a test failed.
    fn say_last(&self) {
        crate::say(&format!(
            "the machine's console:\n{}",
            last(&self.console())
        ));
        if self.is_on() {
            let journal = format!("journalctl --no-pager --boot --lines {LAST_LINES}");
            let journal = self.shell.connect(&journal);
            let text = last(&journal.stdout);
            crate::say(&format!("its journal:\n{text}{}", journal.stderr));
        }
    }

    /// One order to the emulator (QMP).
    fn order(&self, name: &str) {
        let socket = UnixStream::connect(self.directory.path().join("qmp"));
        let mut socket = socket.expect("the emulator listens");
        let mut lines = BufReader::new(socket.try_clone().expect("a socket can be shared")).lines();
        lines.next();
        for order in ["qmp_capabilities", name] {
            let line = format!("{}\n", json!({ "execute": order }));
            socket.write_all(line.as_bytes()).expect("it reads");
            let done = lines.by_ref().map_while(Result::ok).find_map(|line| {
                let answer: Value = serde_json::from_str(&line).ok()?;
                // Others are events.
                (!answer["return"].is_null() || !answer["error"].is_null()).then_some(answer)
            });
            let done = done.unwrap_or_default();
            assert!(done["error"].is_null(), "{order}: {done}");
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.say_last();
        }
        let qemu = self.qemu.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _ = qemu.kill();
        let _ = qemu.wait();
    }
}

/// The last lines of a text.
fn last(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LAST_LINES)..].join("\n")
}

fn drive(image: &Path) -> String {
    // A comma would end the path.
    let path = image.display().to_string().replace(',', ",,");
    format!("file={path},format=raw,if=virtio,cache=unsafe")
}

/// Taken again by the emulator a moment later.
fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("there is a free port");
    let address = listener.local_addr().expect("it is bound");
    address.port()
}
