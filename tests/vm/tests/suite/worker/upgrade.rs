//! The shim's unit is told to reload after an upgrade, while it is the shim and while it stands by.

use conman_vm::Machine;
use serde_json::Value;

use super::assert_the_same;

/// Who has the lock of the shim, and who waits for it.
const LOCK: &str = r#"set -eu
directory="/run/conman-$(sed 's/.*"instance":"\([^"]*\)".*/\1/' /var/lib/conman/instance)"
holder() { awk -v i=":$(stat -c %i "$directory/shim.lock")\$" '$2 == "FLOCK" && $6 ~ i { print $5 }' /proc/locks; }
waiter() { awk -v i=":$(stat -c %i "$directory/shim.lock")\$" '$2 == "->" && $7 ~ i { print $6 }' /proc/locks; }
unit() { systemctl show -P MainPID conman-shim; }
runs() { readlink "/proc/$1/exe"; }
"#;

const INSTALLED: &str = "/usr/bin/conman\n";

/// Puts another file in the program's place, and has the unit reload.
const UPGRADE: &str = "
install /media/conman /usr/bin/conman
runs $(holder)
systemctl reload conman-shim
";

pub(crate) fn assert_a_reload_replaces_the_shim(machine: &Machine, before: &[Value]) {
    let ask = |command: &str| machine.run(&format!("{LOCK}{command}")).ok();
    let serves = || {
        assert_the_same(machine, before);
        let inside = machine.run("conman exec ann -- cat /www/index.html").ok();
        assert_eq!(inside, "hello\n", "it runs commands");
    };
    // The unit's own process is the shim, and stays it.
    let shim = ask("holder");
    assert_eq!(ask("unit"), shim);
    assert_eq!(ask(UPGRADE), format!("{} (deleted)\n", INSTALLED.trim()));
    assert_eq!(
        ask("holder; unit; runs $(holder)"),
        format!("{shim}{shim}{INSTALLED}")
    );
    serves();

    // The daemon has one where the unit has none; then the unit stands by.
    let _ = machine
        .run("systemctl stop conman-shim && conman exec ann -- true")
        .ok();
    let _ = machine.run("systemctl start conman-shim").ok();
    let standby = ask(
        "until [ -n \"$(waiter)\" ] && [ \"$(waiter)\" = \"$(unit)\" ]; do sleep 0.2; done; waiter",
    );
    let shim = ask("holder");
    assert_ne!(shim, standby);
    assert_eq!(ask(UPGRADE), format!("{} (deleted)\n", INSTALLED.trim()));
    assert_eq!(
        ask("holder; waiter; runs $(holder)"),
        format!("{shim}{standby}{INSTALLED}")
    );
    serves();

    // Whoever is the quicker to succeed, one of the daemon's or the one that has stood by since before
    // the upgrade, is what is installed.
    let next = ask("shim=$(holder)
        kill -KILL $shim
        until next=$(holder) && [ -n \"$next\" ] && [ \"$next\" != $shim ] &&
            [ \"$(runs $next)\" = /usr/bin/conman ]; do sleep 0.2; done
        echo $next");
    assert_ne!(next, shim);
    serves();
}
