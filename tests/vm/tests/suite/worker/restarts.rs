//! The units are started again however often their processes die, and a daemon that cannot start is
//! not tried without a pause.

use conman_vm::Machine;
use serde_json::Value;

use super::{PATIENCE, assert_the_same};

/// Each as soon as there is another one.
const KILLED_OFTEN: &str = "set -eu
killed=0
pid=0
while [ $killed -lt 8 ]; do
    next=$(systemctl show -P MainPID UNIT)
    if [ $next != 0 ] && [ $next != $pid ] && kill -KILL $next; then
        pid=$next
        killed=$((killed + 1))
    fi
done
systemctl show -P StartLimitIntervalUSec UNIT";

/// A mistake that is in the configuration as both die; told is when the daemon ended because of it, and
/// when systemd took the unit for ended, turn by turn.
const MISTAKEN: &str = "set -eu
told() {
    journalctl -u conman -o short-monotonic |
        grep -e 'code=exited, status=2/' -e \"Failed with result 'exit-code'\" |
        sed 's/^\\[ *\\([0-9.]*\\)\\].*/\\1/'
}
cp -p /etc/conman/conman.toml /run/mended
echo 'mistake = 1' | cat - /run/mended >/etc/conman/conman.toml
for unit in conman-shim conman; do
    kill -KILL $(systemctl show -P MainPID $unit)
done
until [ $(told | wc -l) -ge 4 ]; do sleep 0.5; done
told | head -n 4";

const RESTARTED: &str =
    "! systemctl restart 'conman*.service' && systemctl start conman-shim conman &&
    systemctl is-active conman-power-off";

const MENDED: &str = "cp -p /run/mended /etc/conman/conman.toml";

/// Half of the unit's pause: the journal has the time at which it was told something.
const PAUSE_S: f64 = 1.0;

pub(crate) fn assert_never_stays_down(machine: &Machine, before: &[Value]) {
    for unit in ["conman", "conman-shim"] {
        let limit = machine.run(&KILLED_OFTEN.replace("UNIT", unit)).ok();
        // On a machine that is too slow to come to it.
        assert_eq!(limit, "0\n", "{unit} has a limit of starts");
        serves(machine, before);
    }
    let times = machine.run(MISTAKEN).ok();
    let times: Vec<f64> = times.lines().map(conman_vm::seconds).collect();
    for turn in times.chunks(2) {
        assert!(
            turn[1] - turn[0] > PAUSE_S,
            "no pause after a try: {times:?}"
        );
    }
    let _ = machine.run(MENDED).ok();
    serves(machine, before);
    // Whatever is done with all of conman's units alike.
    let refused = machine.run(RESTARTED).ok();
    assert_eq!(refused, "active\n");
    serves(machine, before);
}

fn serves(machine: &Machine, before: &[Value]) {
    for unit in ["conman", "conman-shim"] {
        let up = format!("systemctl is-active {unit} && conman ps");
        machine.until_ok(&up, PATIENCE);
    }
    assert_the_same(machine, before);
}
