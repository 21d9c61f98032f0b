use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::medium::Medium;
use crate::shell::{Output, Shell};
use crate::until;

/// An emulated boot takes half a minute on an idle host.
const BOOT_PATIENCE: Duration = Duration::from_secs(600);
const POWER_OFF_PATIENCE: Duration = Duration::from_secs(300);
const MEMORY: &str = "2048";

/// A running machine; dropping it cuts its power.
#[derive(Debug)]
pub struct Machine {
    qemu: Child,
    shell: Shell,
    directory: TempDir,
    _medium: Medium,
}

impl Machine {
    /// Boots the disk in `worker` with `medium` in the drive, and waits until one can log in.
    ///
    /// # Panics
    /// When it does not come up.
    #[must_use]
    pub fn boot(worker: &Path, medium: Medium) -> Self {
        let directory = tempfile::tempdir().expect("a temporary folder can be made");
        let port = free_port();
        let qemu = Command::new("qemu-system-x86_64")
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
            .arg(worker.join("kernel"))
            .arg("-initrd")
            .arg(worker.join("initrd"))
            .args([
                "-append",
                "root=/dev/vda rw console=ttyS0 systemd.unified_cgroup_hierarchy=1 quiet",
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
            .expect("qemu-system-x86_64 is installed");
        let shell = Shell {
            key: worker.join("key"),
            port,
        };
        let mut machine = Self {
            qemu,
            shell,
            directory,
            _medium: medium,
        };
        until("login", BOOT_PATIENCE, || {
            let ended = machine.qemu.try_wait().expect("it is our child");
            assert!(ended.is_none(), "the machine ended: {}", machine.console());
            let answer = machine.shell.run("systemctl is-system-running --wait");
            matches!(answer.code, Some(0 | 1)).then_some(())
        });
        machine
    }

    /// Runs a command in a root shell.
    #[must_use]
    pub fn run(&self, command: &str) -> Output {
        self.shell.run(command)
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
    pub fn power_off(mut self) -> String {
        self.order("system_powerdown");
        until("end of the machine", POWER_OFF_PATIENCE, || {
            self.qemu.try_wait().expect("it is our child")
        });
        self.console()
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
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
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
