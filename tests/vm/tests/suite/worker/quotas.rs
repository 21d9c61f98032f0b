//! Limits of disk that the file system enforces: project quotas of ext4 and XFS.

use conman_e2e::{NATIVE_TEMPLATES, ROOT};
use conman_vm::Machine;

use super::PATIENCE;

/// File systems with project quotas, and how an administrator makes each.
const FILE_SYSTEMS: [(&str, &str); 2] = [
    ("ext4", "mkfs.ext4 -q -O quota,project"),
    ("xfs", "mkfs.xfs -q"),
];

const MOUNT: &str = "set -e
truncate -s 400M /var/tmp/FS.disk
MAKE /var/tmp/FS.disk
mkdir -p /srv/FS
mount -o loop,prjquota /var/tmp/FS.disk /srv/FS
systemd-run --unit FS --property KillMode=process conman serve --config /etc/conman/FS.toml";

/// Writes more than it may and counts what arrived; no process is ended for it.
const TOO_MUCH: &str = "head -c 100000000 /dev/zero > /big; wc -c < /big";
const TOO_MANY: &str = "mkdir /many && cd /many && i=0
while [ $i -lt 1200 ] && true > $i; do i=$((i + 1)); done
ls | wc -l";

const DISK_BYTES: u64 = 64 << 20;
const DISK_INODES: u64 = 1_024;

const END: &str = "conman rm --yes full taken && systemctl stop FS
conman shim --stop --state-dir /srv/FS/state && until umount /srv/FS; do sleep 0.5; done";

/// By nodes of their own, beside the one that is installed.
pub(crate) fn assert_the_file_system_enforces_them(machine: &Machine) {
    for (index, (name, make)) in FILE_SYSTEMS.into_iter().enumerate() {
        let port = 7800 + 10 * index;
        let first_id = 0x5000_0000 + 0x1000_0000 * index;
        let last_id = first_id + 0x0FFF_FFFF;
        let config = format!(
            "[node]\nstate_dir = \"/srv/{name}/state\"\nruntime = \"native\"\n\
             id_range = \"{first_id}-{last_id}\"\n\
             [listen]\napi = \"127.0.0.1:{port}\"\nsessions = \"127.0.0.1:{}\"\n\
             admin = \"/run/{name}.sock\"\n[limits]\ndisk_reserve_bytes = 16777216\n\
             {NATIVE_TEMPLATES}\
             [templates.full]\nimage = \"{ROOT}\"\ncommand = [\"sleep\", \"1000000\"]\n\
             disk_bytes = {DISK_BYTES}\ndisk_inodes = {DISK_INODES}\npool = 1\n",
            port + 1
        );
        let config = format!("cat > /etc/conman/{name}.toml <<'CONFIG'\n{config}CONFIG");
        let _ = machine.run(&config).ok();
        let mount = MOUNT.replace("FS", name).replace("MAKE", make);
        let _ = machine.run(&mount).ok();
        let conman = format!("export CONMAN_SOCKET=/run/{name}.sock; conman");
        machine.until_ok(&format!("{conman} ps"), PATIENCE);
        let _ = machine
            .run(&format!(
                "{conman} image import /media/root.tar {ROOT} && conman run full --template full"
            ))
            .ok();
        assert_limited(machine, &conman, name, "full");
        // Its container was made ahead meanwhile.
        let run = format!("{conman} run taken --template full");
        let _ = machine.run(&run).ok();
        assert_limited(machine, &conman, name, "taken");
        let end = END.replace("FS", name);
        let _ = machine.run(&format!("{conman} ps; {end}")).ok();
    }
}

/// `name`: the file system's.
fn assert_limited(machine: &Machine, conman: &str, name: &str, session: &str) {
    let pid = format!("{conman} inspect {session} --json | grep '\"pid\"'");
    let before = machine.run(&pid).ok();
    let in_session = |script: &str| {
        machine
            .run(&format!("{conman} exec {session} -- sh -c '{script}'"))
            .ok()
    };
    let written: u64 = in_session(TOO_MUCH).trim().parse().expect("a number");
    assert!(written <= DISK_BYTES, "{name}: {written} bytes");
    assert!(written > DISK_BYTES / 2, "{name}: {written} bytes");
    let _ = in_session("rm /big");
    let made: u64 = in_session(TOO_MANY).trim().parse().expect("a number");
    assert!(
        made < DISK_INODES && made > DISK_INODES / 2,
        "{name}: {made} files"
    );
    assert_eq!(machine.run(&pid).ok(), before, "{name}: it was ended");
}
