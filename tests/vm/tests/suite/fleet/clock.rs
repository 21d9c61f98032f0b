//! The machine's clock is set ahead by a day, back by two, and right again.

use conman_vm::{WATCH_END, longest_gap, positions, seconds};

use super::Fleet;

/// How long one of the sessions may live.
const BRIEF_S: f64 = 45.0;

/// The longest time between two signs of life of a session that nobody holds up, on a busy machine. A
/// clock that is set is off by a day.
const LONGEST_GAP_S: f64 = 60.0;

/// Sessions that go on, one that is to live for a while, and somebody who follows what happens.
const BEGIN: &str = r#"
run steady --template beat --node-label host=one
run quiet --template beat --node-label host=one
conman token steady --ttl 2h >/run/token
systemd-run --quiet --unit follower sh -c 'exec conman events --after 0 --json >/run/followed'
up >/run/brief.begun
run brief --template beat --node-label host=two --max-lifetime 45s
watch_end /run/brief.ended conman inspect brief --json
"#;

/// What the token from before opens, and a new one, by its session's node and by the other one.
const KNOCK: &str = r#"
conman token steady --ttl 2h >/run/new-token
for token in token new-token; do
    for port in 7701 7711; do
        curl -s -o /dev/null -w '%{http_code} ' -H "Authorization: Bearer $(cat /run/$token)" \
            http://127.0.0.1:$port/s/steady/
    done
done"#;

const COUNTED: [&str; 3] = [
    r#"conman_fleet_lapses_total{to="fenced"}"#,
    "conman_fleet_takeovers_total",
    "conman_fleet_nodes_fenced_total",
];

pub(crate) fn no_setting_of_the_clock_ends_pauses_or_moves_anything(fleet: &Fleet) {
    fleet.ask(&format!("{WATCH_END}{BEGIN}"));
    let lasting = ["steady", "quiet"];
    let before = fleet.lives(&lasting);
    let processes = "systemctl show -P MainPID conman conman-shim etcd | xargs";
    let units = fleet.run(processes);
    let good = "200 200 200 200 ";
    assert_eq!(fleet.ask(KNOCK), good);

    for (step, session, opened) in [
        ("1 day", "ahead", "401 401 200 200 "),
        ("-2 days", "behind", good),
        ("1 day", "again", good),
    ] {
        let told = fleet.ask(&format!("date -s '{step}' >&2; both_renew{KNOCK}"));
        assert_eq!(told, opened, "after {step}");
        // A daemon that begins by this clock knows what has been there for how long.
        if session == "ahead" {
            fleet.run("systemctl restart conman-two");
            fleet.both_serve();
        }
        fleet.ask(&format!(
            "run {session} --template beat --node-label host=two && conman rm {session}"
        ));
        assert_eq!(fleet.lives(&lasting), before, "after {step}");
    }

    assert_eq!(fleet.run(processes), units);
    let restarts =
        "systemctl show -P NRestarts conman conman-two conman-shim etcd | sort -u | xargs";
    assert_eq!(fleet.run(restarts), "0\n");
    assert_counted_nothing(fleet);
    assert_never_paused(fleet);
    assert_lived_its_time(fleet);
    assert_told_in_order(fleet);
    fleet.ask("systemctl stop follower; conman rm brief || true");
}

fn assert_counted_nothing(fleet: &Fleet) {
    let told = fleet.run(
        "for node in conman conman-two; do
            curl -sS -f --unix-socket /run/$node/conman.sock http://n/metrics
        done",
    );
    for name in COUNTED {
        let counted = told.lines().filter(|line| line.starts_with(name));
        let counted: Vec<&str> = counted.collect();
        assert_eq!(counted.len(), 2, "{name}: {told}");
        for line in counted {
            assert!(line.ends_with(" 0"), "{line}");
        }
    }
}

fn assert_never_paused(fleet: &Fleet) {
    for id in ["steady", "quiet"] {
        let beats = fleet.ask(&format!("conman logs {id}; up"));
        let longest = longest_gap(&beats);
        assert!(
            beats.lines().count() > 20 && longest < LONGEST_GAP_S,
            "{id}: {longest} s"
        );
    }
}

/// What is to live for a while does, whatever the clock says, and no longer.
fn assert_lived_its_time(fleet: &Fleet) {
    let times = fleet.ask(
        "until [ -e /run/brief.ended ]; do sleep 0.2; done
        cat /run/brief.begun /run/brief.ended",
    );
    let times: Vec<f64> = times.lines().map(seconds).collect();
    let lived = times[1] - times[0];
    assert!(lived >= BRIEF_S, "it lived for {lived} s");
    assert!(lived < BRIEF_S + LONGEST_GAP_S, "it lived for {lived} s");
    let why = fleet.ask("conman inspect brief --json");
    assert!(why.contains("longest lifetime"), "{why}");
}

/// Each node's events in the order of their positions, to who followed them and who asks now, and
/// the same ones.
fn assert_told_in_order(fleet: &Fleet) {
    let told = fleet.ask(
        "last='\"kind\":\"session_cleaned\".*\"session\":\"again\"'
        until grep -q \"$last\" /run/followed; do sleep 0.2; done
        conman events --no-follow --json >/run/told
        cat /run/followed; echo; cat /run/told",
    );
    let (followed, told) = told.split_once("\n\n").expect("both");
    let (followed, told) = (positions(followed), positions(told));
    for node in ["one", "two"] {
        assert!(
            followed[node].is_sorted() && told[node].is_sorted(),
            "{told:?}"
        );
        // What has happened between the two questions comes last.
        assert!(
            told[node].starts_with(&followed[node]),
            "{node}: {followed:?}, {told:?}"
        );
    }
}
