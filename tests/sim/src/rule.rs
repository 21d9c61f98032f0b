//! What a run may violate.

use std::fmt;

/// What was violated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// Two runnable containers of one session.
    Overlap,
    /// A runnable container of which the registry says another owner, generation or fence.
    Unowned,
    /// A claim sent, a container started or thawed after the node's last effective renewal's time.
    PastDeadline,
    /// A container runnable after the last moment that the fence's bound allows.
    PastBound,
    /// A generation not greater than every earlier one.
    Generation,
    /// Given up while a container existed or could still appear.
    ReleasedAlive,
    /// Claimed by an incarnation that is not live, or from an owner that was not fenced.
    StaleClaim,
    /// Fenced before a heartbeat stood for the takeover time.
    TakenEarly,
    /// A dead machine not fenced in time.
    TakenLate,
    /// A session lost through nothing but outages of the store.
    LostToOutage,
    /// Frozen, or given up, although the registry has not taken the node's ownership and its time
    /// was not over.
    FrozenWithoutNeed,
    /// Still frozen although the registry takes renewals again.
    ThawedLate,
    /// More renewals in a second than a registry in trouble should get.
    Hammers,
    NotServed,
    /// Runnable containers of two nodes have addresses of one part of the pool.
    SharedPart,
    /// A preemption has ended, and a container runs that it does not name.
    Spared,
    Leak,
    /// A node is marked although it reaches most nodes that reach each other.
    WronglyCutOff,
    /// A node that does not reach them is not marked.
    NotCutOff,
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Overlap => "overlap",
            Self::Unowned => "unowned",
            Self::PastDeadline => "past-deadline",
            Self::PastBound => "past-bound",
            Self::Generation => "generation",
            Self::ReleasedAlive => "released-alive",
            Self::StaleClaim => "stale-claim",
            Self::TakenEarly => "taken-early",
            Self::TakenLate => "taken-late",
            Self::LostToOutage => "lost-to-outage",
            Self::FrozenWithoutNeed => "frozen-without-need",
            Self::ThawedLate => "thawed-late",
            Self::Hammers => "hammers",
            Self::NotServed => "not-served",
            Self::SharedPart => "shared-part",
            Self::Spared => "spared",
            Self::Leak => "leak",
            Self::WronglyCutOff => "wrongly-cut-off",
            Self::NotCutOff => "not-cut-off",
        })
    }
}

#[derive(Debug, Clone)]
pub struct Violation {
    pub rule: Rule,
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.rule, self.what)
    }
}
