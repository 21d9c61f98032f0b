//! Pinned seeds of the untouched core.
#![forbid(unsafe_code)]

/// Enough for every kind of fault to meet every other, few enough for every commit.
const SEEDS: u64 = 100;

#[test]
fn pinned_fleets_keep_every_invariant_and_do_take_over() {
    let mut takeovers = 0;
    for seed in 0..SEEDS {
        let report = conman_sim::simulate(seed);
        takeovers += report.takeovers;
        let trace = report.trace.join("\n");
        assert_eq!(report.violation, None, "seed {seed}\n{trace}");
    }
    assert!(takeovers > SEEDS / 4, "{takeovers} takeovers prove little");
}

#[test]
fn a_seed_tells_the_same_story_twice() {
    assert_eq!(conman_sim::simulate(7).trace, conman_sim::simulate(7).trace);
}
