//! A worker as users have it: installed from a medium, run by systemd, switched off by its cloud.

use std::path::Path;
use std::time::Duration;

use conman_e2e::binary;
use conman_vm::{Machine, Medium, worker};

const PATIENCE: Duration = Duration::from_secs(120);
const UNIT: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../deploy/systemd/conman.service"
);
const CONFIG: &str = "[preempt]\non_sigterm = \"preempt\"\n";
/// What an administrator types; the console shows what the service says to the very end.
const INSTALL: &str = "set -e
mkdir -p /media /etc/conman /etc/systemd/system/conman.service.d
mount -o ro LABEL=conman /media
install /media/conman /usr/bin/conman
install -m 600 /media/conman.toml /etc/conman/
install -m 644 /media/conman.service /etc/systemd/system/
printf '[Service]\\nStandardOutput=journal+console\\nStandardError=journal+console\\n' \
    > /etc/systemd/system/conman.service.d/console.conf
systemctl daemon-reload
systemctl enable --now conman.service";

#[test]
fn a_worker_runs_conman_as_a_service_until_its_power_goes() {
    let Some(disk) = worker() else {
        return;
    };
    let medium = Medium::new()
        .with_file("conman", binary())
        .with_file("conman.service", Path::new(UNIT))
        .with_text("conman.toml", CONFIG);
    let machine = Machine::boot(&disk, medium);
    let hierarchy = machine.run("stat -f -c %T /sys/fs/cgroup").ok();
    assert_eq!(hierarchy, "cgroup2fs\n");
    let _ = machine.run(INSTALL).ok();
    machine.until_ok("conman ps", PATIENCE);

    let daemon = machine.run("systemctl show -p MainPID --value conman").ok();
    let _ = machine.run("kill -KILL $(systemctl show -p MainPID --value conman)");
    machine.until_ok("conman ps", PATIENCE);
    let restarted = machine.run("systemctl show -p MainPID --value conman").ok();
    assert_ne!(daemon, restarted, "systemd starts a killed daemon again");

    let console = machine.power_off();
    assert!(console.contains("Power down"), "{console}");
}
