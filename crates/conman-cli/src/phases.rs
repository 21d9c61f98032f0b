//! The phases of a start, as text.

/// Every phase in order, and what happens in it.
const PHASES: [(&str, &str); 9] = [
    ("claim", "recording the ownership"),
    ("admit", "waiting for its turn"),
    ("prepare", "preparing files and binds"),
    ("create", "creating the container"),
    ("start", "starting the container"),
    ("verify", "verifying the process"),
    (READY, "waiting for the program to be ready"),
    ("record", "recording the process"),
    ("publish", "publishing the route"),
];

/// The phase that waits for the program.
pub(crate) const READY: &str = "ready";

/// The step of a start that took a container made ahead.
pub(crate) const MADE_AHEAD: &str = "start.ahead";

/// What happens in a phase. Steps, and phases of a newer daemon, stand for themselves.
pub(crate) fn in_words(name: &str) -> &str {
    PHASES
        .iter()
        .find(|(known, ..)| *known == name)
        .map_or(name, |(_, words)| words)
}

/// How long a start took, from its phases; a step is a part of one of them.
pub(crate) fn total_ms<'a>(phases: impl IntoIterator<Item = (&'a String, &'a f64)>) -> f64 {
    let phases = phases.into_iter();
    let whole = phases.filter(|(name, _)| !is_step(name));
    whole.map(|(_, ms)| ms).sum()
}

pub(crate) fn is_step(name: &str) -> bool {
    whole(name) != name
}

/// The phase that a step belongs to: `start.cgroup` is one of `start`.
fn whole(name: &str) -> &str {
    name.split_once('.').map_or(name, |(phase, _)| phase)
}

/// The phase that a start is in, if the phases in `ended` are over.
pub(crate) fn present<'a>(ended: impl Iterator<Item = &'a str>) -> &'static str {
    let position = |name: &str| PHASES.iter().position(|(known, ..)| *known == name);
    let next = ended.filter_map(position).max().map_or(0, |last| last + 1);
    PHASES[next.min(PHASES.len() - 1)].0
}

/// Position of a phase in a start, for sorting; unknown ones come last.
pub(crate) fn order(name: &str) -> usize {
    PHASES
        .iter()
        .position(|(known, ..)| *known == whole(name))
        .unwrap_or(PHASES.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_present_phase_is_the_one_behind_the_last_that_ended() {
        assert_eq!(present([].into_iter()), "claim");
        assert_eq!(
            present(["create", "admit", "claim", "prepare"].into_iter()),
            "start"
        );
        assert_eq!(present(["create", "start.cgroup"].into_iter()), "start");
        assert_eq!(order("start.cgroup"), order("start"));
        assert!(order("start.cgroup") < order("ready"));
        assert_eq!(present(["publish"].into_iter()), "publish");
        assert_eq!(present(["from_the_future"].into_iter()), "claim");
    }
}
