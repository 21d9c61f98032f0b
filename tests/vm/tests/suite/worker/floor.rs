//! The registry is lost; the operator follows the guide's procedure for the floor of generations.

use conman_vm::Machine;
use serde_json::Value;

use super::{PATIENCE, SESSIONS, generation, reached_sessions};

const GUIDE: &str = include_str!("../../../../../deploy/fleet.md");

/// The generation in the guide's example.
const FLOOR: u64 = 1_000_000_000;

const LOSE: &str = "systemctl stop conman
rm /var/lib/conman/generations /var/lib/conman/registry.redb
systemctl start --no-block conman";

/// The commands that the operator's guide gives.
fn procedure() -> String {
    let lines = GUIDE.lines();
    let lines = lines.skip_while(|line| *line != "    systemctl stop conman");
    let block: Vec<&str> = lines.map_while(|line| line.strip_prefix("    ")).collect();
    assert!(block.len() > 4, "{block:?}");
    block.join("\n")
}

/// Whatever ran is ended, and everything begins above the floor; once is enough.
pub(crate) fn assert_what_the_readme_says_gets_past_it(machine: &Machine, before: &[Value]) {
    let _ = machine.run(LOSE).ok();
    machine.until_ok(
        "journalctl -u conman | grep -e --generation-floor",
        PATIENCE,
    );
    let _ = machine.run(&format!("set -e\n{}", procedure())).ok();
    machine.until_ok("conman ps", PATIENCE);
    for session in before {
        machine.until_ok(&format!("! [ -e /proc/{} ]", session["pid"]), PATIENCE);
    }
    let words = machine.run("systemctl show -P ExecStart conman").ok();
    assert!(!words.contains("--generation-floor"), "{words}");
    let _ = machine.run("systemctl restart conman").ok();
    machine.until_ok("conman ps", PATIENCE);
    let run = SESSIONS.map(|id| format!("conman run {id} --template web"));
    let _ = machine.run(&run.join(" && ")).ok();
    for session in reached_sessions(machine) {
        assert!(generation(&session) > FLOOR, "{session}");
    }
}
