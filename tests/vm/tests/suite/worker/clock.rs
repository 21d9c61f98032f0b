//! The machine's clock is set ahead by a day, back by two, and right again.

use conman_vm::{Machine, WATCH_END, longest_gap, positions, seconds};
use serde_json::Value;

use super::{PATIENCE, assert_the_same};

/// How long one of the sessions may live.
const BRIEF_S: f64 = 45.0;

/// The longest time between two signs of life of a session that nobody holds up, on a busy host. A
/// clock that is set is off by a day.
const LONGEST_GAP_S: f64 = 120.0;

/// One that writes down, by a clock that nobody sets, that it runs; one that is to live for a while;
/// and somebody who follows what happens.
const BEGIN: &str = r#"set -eu
conman run progress --template idle --idle-timeout 2h --max-lifetime 2h -- \
    sh -c 'while read up idle </proc/uptime; do echo $up; sleep 0.5; done'
systemd-run --quiet --unit follower sh -c 'exec conman events --after 0 --json >/run/followed'
cut -d ' ' -f 1 /proc/uptime >/run/brief.begun
conman run brief --template idle --max-lifetime 45s
watch_end /run/brief.ended conman inspect brief --json
"#;

/// Ends what follows; what was told to who followed, and to who asks now.
const TOLD: &str = r#"set -eu
conman rm progress >&2
until grep -q '"kind":"session_cleaned".*"session":"progress"' /run/followed; do sleep 0.2; done
systemctl stop follower
cat /run/followed
echo
conman events --no-follow --json
"#;

/// Nothing ends, stands still, is begun anew or told in another order by that.
pub(crate) fn assert_no_setting_of_it_matters(machine: &Machine, before: &[Value]) {
    let _ = machine.run(&format!("{WATCH_END}{BEGIN}")).ok();
    let progress = || {
        let shown = machine.run("conman inspect progress --json").ok();
        let shown: Value = serde_json::from_str(&shown).expect("JSON");
        assert_eq!(shown["state"], "running", "{shown}");
        ["pid", "generation", "started_at"].map(|field| shown[field].clone())
    };
    let beating = progress();
    for (step, session) in [
        ("1 day", "ahead"),
        ("-2 days", "behind"),
        ("1 day", "again"),
    ] {
        let _ = machine.run(&format!("date -s '{step}'")).ok();
        // A daemon that begins by this clock knows how long there has been what.
        if session == "ahead" {
            let _ = machine.run("systemctl restart conman").ok();
            machine.until_ok("conman ps", PATIENCE);
        }
        let new = format!("conman run {session} --template web && conman rm {session}");
        let _ = machine.run(&new).ok();
        assert_the_same(machine, before);
        assert_eq!(progress(), beating, "after {step}");
    }
    let restarts = machine
        .run("systemctl show -P NRestarts conman conman-shim")
        .ok();
    assert_eq!(restarts.split_whitespace().collect::<Vec<_>>(), ["0", "0"]);
    assert_never_paused(machine);
    assert_lived_its_time(machine);
    assert_told_in_order(machine);
}

fn assert_never_paused(machine: &Machine) {
    let beats = machine
        .run("conman logs progress && cut -d ' ' -f 1 /proc/uptime")
        .ok();
    let longest = longest_gap(&beats);
    assert!(longest < LONGEST_GAP_S, "it stood still for {longest} s");
    assert!(beats.lines().count() > 10, "{beats}");
}

/// What is to live for a while does, whatever the clock says, and not much longer.
fn assert_lived_its_time(machine: &Machine) {
    let times = "until [ -e /run/brief.ended ]; do sleep 0.2; done
        cat /run/brief.begun /run/brief.ended";
    let times = machine.run(times).ok();
    let times: Vec<f64> = times.lines().map(seconds).collect();
    let lived = times[1] - times[0];
    assert!(lived >= BRIEF_S, "it lived for {lived} s");
    assert!(lived < BRIEF_S + LONGEST_GAP_S, "it lived for {lived} s");
    let why = machine.run("conman inspect brief --json").ok();
    assert!(why.contains("longest lifetime"), "{why}");
}

/// In the order of their positions, and the same to everybody.
fn assert_told_in_order(machine: &Machine) {
    let told = machine.run(TOLD).ok();
    let (followed, asked) = told.split_once("\n\n").expect("both");
    let (followed, asked) = (positions(followed), positions(asked));
    assert_eq!(followed.len(), 1, "of one node: {followed:?}");
    for (node, followed) in followed {
        assert!(followed.is_sorted(), "{followed:?}");
        // What has happened after the last that was followed comes behind it.
        let asked = &asked[&node];
        assert!(asked.starts_with(&followed), "{followed:?} {asked:?}");
    }
}
