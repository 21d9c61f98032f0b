//! Whole fleets of `conman_core::ownership`, `preemption` and `reach` under simulated time, clocks, store,
//! network, kernels and faults, from one seed.
//!
//! | module | owns |
//! |---|---|
//! | `world` | true time, the queue of events, the requests to the fleet |
//! | `faults` | what goes wrong, and when |
//! | `machine` | one machine: its clock, daemon, shim and what passes between them |
//! | `kernel` | its containers: late starts, freezes and kills that fail, processes in D state |
//! | `preempting` | what a daemon's emergency thread does at a notice of preemption |
//! | `slow_death` | a container that the kernel takes long to take down |
//! | `store` | the registry behind a network that loses, delays and doubles |
//! | `grey` | a registry that is slow or refuses |
//! | `parts` | the parts of a fabric's pool that the nodes claim, and the addresses of their containers |
//! | `reaching` | nodes that probe each other through a network that is cut |
//! | [`checker`] | what must hold, by true time and the store's history; nothing of the protocol |
//! | `rule` | what a run may violate |
//! | [`sabotage`] | the same simulation over a core that was broken on purpose |
//!
//! No task, thread or clock in the simulation itself.
#![forbid(unsafe_code)]

pub mod checker;
mod clock;
mod faults;
mod grey;
mod kernel;
mod machine;
mod parts;
mod preempting;
mod random;
mod reaching;
mod rule;
pub mod sabotage;
mod slow_death;
mod store;
mod world;

use checker::Violation;

/// From this seed on, nodes derive their times.
pub const DERIVED_FROM: u64 = world::DERIVED_FROM;
/// From this seed on, nodes are preempted by notices as well.
pub const PREEMPTED_FROM: u64 = world::PREEMPTED_FROM;

/// From this seed on, the registry is slow and refuses, too.
pub const GREY_FROM: u64 = grey::GREY_FROM;

/// From this seed on, nodes probe each other, and nothing else happens.
pub const REACH_FROM: u64 = reaching::REACH_FROM;

/// From this seed on, nodes claim parts of a pool of addresses, besides everything that the first seeds have.
pub const PARTS_FROM: u64 = parts::PARTS_FROM;

/// What a run came to.
#[derive(Debug)]
pub struct Report {
    pub seed: u64,
    pub violation: Option<Violation>,
    /// The last events before the end; kept only of a run that violated something.
    pub trace: Vec<String>,
    pub takeovers: u64,
    pub starts: u64,
}

/// How long a machine may stop without its clock's noticing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pauses {
    /// As long as the takeover time leaves room for.
    Assumed,
    /// Longer: what no fence in the machine can protect from.
    Beyond,
}

/// One fleet's life from `seed`.
#[must_use]
pub fn simulate(seed: u64, pauses: Pauses) -> Report {
    if (REACH_FROM..PARTS_FROM).contains(&seed) {
        return reaching::run(seed);
    }
    let report = world::World::run(seed, pauses, false);
    if report.violation.is_some() {
        return world::World::run(seed, pauses, true);
    }
    report
}
