//! What tells on a machine whose clock is set how time really went, and what happened in which order.

use std::collections::BTreeMap;

use serde_json::Value;

/// For a script on the machine: `watch_end FILE COMMAND…` leaves in a file when the process of a session
/// ended, by a clock that nobody sets; the command shows the session as JSON.
pub const WATCH_END: &str = r#"
watch_end() {
    ended=$1
    shift
    pid=$("$@" | sed 's/.*"pid":\([0-9]*\).*/\1/')
    systemd-run --quiet --unit "watch-$pid" sh -c "
        while [ -e /proc/$pid ]; do sleep 0.1; done
        cut -d ' ' -f 1 /proc/uptime >$ended.new
        mv $ended.new $ended"
}
"#;

/// A time since the machine's boot, as the machine writes it.
///
/// # Panics
/// With anything else.
#[must_use]
pub fn seconds(text: &str) -> f64 {
    let time = text.trim().parse();
    time.unwrap_or_else(|_| panic!("no time: {text}"))
}

/// The longest time between one of the lines, each of which is a time, and the next one.
#[must_use]
pub fn longest_gap(lines: &str) -> f64 {
    let times: Vec<f64> = lines.lines().map(seconds).collect();
    let gaps = times.windows(2).map(|pair| pair[1] - pair[0]);
    gaps.fold(0.0, f64::max)
}

/// The positions of the events that `conman events --json` printed, by nodes, without what is in no
/// journal.
///
/// # Panics
/// Where it printed something else, or that it lost events.
#[must_use]
pub fn positions(lines: &str) -> BTreeMap<String, Vec<u64>> {
    let mut positions = BTreeMap::<String, Vec<u64>>::new();
    for line in lines.lines() {
        let event: Value = serde_json::from_str(line).expect("JSON");
        let kind = event["kind"].as_str().expect("a kind");
        if ["node_unreachable", "node_reached"].contains(&kind) {
            continue;
        }
        assert_ne!(kind, "events_lost", "{event}");
        let node = event["node"].as_str().expect("a node");
        let position = event["seq"].as_u64().expect("a position");
        positions.entry(node.to_owned()).or_default().push(position);
    }
    positions
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_of_several_gaps_is_told() {
        assert!((longest_gap("1.5\n2\n12.25\n13\n") - 10.25).abs() < f64::EPSILON);
    }
}
