//! A worker as users have it: installed from a medium, run by systemd, switched off by its cloud.

use std::path::{Path, PathBuf};
use std::time::Duration;

use conman_e2e::{NATIVE_TEMPLATES, ROOT, binary, native};
use conman_vm::{Machine, Medium, worker};
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(120);
const SESSIONS: [&str; 3] = ["ann", "ben", "cat"];
const MEMORY_BYTES: u64 = 64 << 20;
const UNITS: [&str; 3] = [
    "conman.service",
    "conman-shim.service",
    "conman-power-off.service",
];
/// What an administrator types; the console shows what the preemption says at the very end.
const INSTALL: &str = "set -e
mkdir -p /media /etc/conman /etc/systemd/system/conman-power-off.service.d
mount -o ro LABEL=conman /media
install /media/conman /usr/bin/conman
install -m 600 /media/conman.toml /etc/conman/
install -m 644 /media/*.service /etc/systemd/system/
printf '[Service]\\nStandardOutput=journal+console\\n' \
    > /etc/systemd/system/conman-power-off.service.d/console.conf
systemctl daemon-reload
systemctl enable --now /etc/systemd/system/conman*.service";

/// A file that is deployed.
fn unit(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/systemd")).join(name)
}

/// Every session as the machine shows it now.
fn sessions(machine: &Machine) -> Vec<Value> {
    let shown = SESSIONS.map(|id| machine.run(&format!("conman inspect {id} --json")).ok());
    let parsed = shown
        .iter()
        .map(|text| serde_json::from_str(text).expect("a session in JSON"));
    parsed.collect()
}

/// Each is reached, and is the very process that it was.
fn assert_the_same(machine: &Machine, before: &[Value]) {
    for (session, now) in before.iter().zip(sessions(machine)) {
        for field in ["pid", "generation", "started_at"] {
            assert_eq!(session[field], now[field], "{field} of {now}");
        }
        assert_eq!(now["state"], "running", "{now}");
        let id = now["id"].as_str().expect("an id");
        let page = machine.run(&format!("curl -sSf http://127.0.0.1:7701/s/{id}/"));
        assert_eq!(page.ok(), "hello\n");
    }
}

#[test]
fn a_worker_keeps_its_sessions_until_its_power_goes() {
    let (Some(disk), Some(native)) = (worker(), native()) else {
        return;
    };
    let templates = NATIVE_TEMPLATES.replace(
        "[templates.web]",
        &format!("[templates.web]\nmemory_bytes = {MEMORY_BYTES}\ncpus = 0.5\npids = 16"),
    );
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let medium = Medium::new()
        .with_file("conman", binary())
        .with_file("root.tar", &native.archive(folder.path()))
        .with_text("conman.toml", &templates);
    let medium = UNITS
        .into_iter()
        .fold(medium, |medium, name| medium.with_file(name, &unit(name)));
    let machine = Machine::boot(&disk, medium);
    let hierarchy = machine.run("stat -f -c %T /sys/fs/cgroup").ok();
    assert_eq!(hierarchy, "cgroup2fs\n");
    let _ = machine.run(INSTALL).ok();
    machine.until_ok("conman ps", PATIENCE);
    let _ = machine
        .run(&format!("conman image import /media/root.tar {ROOT}"))
        .ok();

    for id in SESSIONS {
        let _ = machine.run(&format!("conman run {id} --template web")).ok();
    }
    let started = sessions(&machine);
    assert_the_same(&machine, &started);
    let pid = &started[0]["pid"];
    let limits = format!(
        "cd /sys/fs/cgroup$(sed s/0::// /proc/{pid}/cgroup) && cat memory.max cpu.max pids.max"
    );
    let limits = machine.run(&limits).ok();
    assert_eq!(limits, format!("{MEMORY_BYTES}\n50000 100000\n16\n"));

    let daemon = "systemctl show -p MainPID --value conman";
    let first = machine.run(daemon).ok();
    let _ = machine.run("systemctl restart conman").ok();
    machine.until_ok("conman ps", PATIENCE);
    assert_ne!(first, machine.run(daemon).ok());
    assert_the_same(&machine, &started);

    for unit in ["conman", "conman-shim"] {
        let _ = machine
            .run(&format!(
                "kill -KILL $(systemctl show -p MainPID --value {unit})"
            ))
            .ok();
        machine.until_ok(
            &format!("systemctl is-active {unit} && conman ps"),
            PATIENCE,
        );
        assert_the_same(&machine, &started);
    }
    let after = machine.run("conman exec ann -- cat /www/index.html").ok();
    assert_eq!(after, "hello\n", "the shim that took over runs commands");

    let console = machine.power_off();
    let killed = format!("{} of {} sessions killed", SESSIONS.len(), SESSIONS.len());
    assert!(console.contains(&killed), "{console}");
    assert!(console.contains("Power down"), "{console}");
}
