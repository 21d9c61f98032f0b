//! Pinned seeds over the core as it is.

use conman_sim::checker::Rule;
use conman_sim::{
    DERIVED_FROM, GREY_FROM, PARTS_FROM, PREEMPTED_FROM, Pauses, REACH_FROM, simulate,
};

/// Enough for most kinds of fault to meet, few enough for every commit.
const SEEDS: u64 = 150;

#[test]
fn pinned_fleets_keep_every_invariant_and_do_take_over() {
    let mut takeovers = 0;
    let firsts = [
        0,
        DERIVED_FROM,
        PREEMPTED_FROM,
        GREY_FROM,
        REACH_FROM,
        PARTS_FROM,
    ];
    let seeds = firsts.map(|first| first..first + SEEDS);
    for seed in seeds.into_iter().flatten() {
        let report = simulate(seed, Pauses::Assumed);
        takeovers += report.takeovers;
        let (trace, what) = (report.trace.join("\n"), report.violation);
        assert!(what.is_none(), "{trace}\nseed {seed}: {what:?}");
    }
    assert!(takeovers > SEEDS / 2, "{takeovers} takeovers prove little");
}

#[test]
fn a_seed_tells_the_same_story_twice() {
    let mut stories = [(); 2].map(|()| {
        let report = simulate(BEYOND[0], Pauses::Beyond);
        (report.trace, report.starts)
    });
    assert!(stories[0].1 > 0);
    let second = std::mem::take(&mut stories[1]);
    assert_eq!(stories[0], second);
}

/// Seeds in which a machine pauses for too long.
const BEYOND: [u64; 3] = [31, 64, 118];

#[test]
fn a_pause_that_no_clock_saw_and_that_is_too_long_runs_two_containers_as_documented() {
    for seed in BEYOND {
        let report = simulate(seed, Pauses::Beyond);
        let rule = report.violation.map(|violation| violation.rule);
        assert!(
            matches!(rule, Some(Rule::Overlap | Rule::Unowned)),
            "seed {seed}: {rule:?}"
        );
    }
}
