//! Pure decisions: how a request becomes a spec, the names of objects, the states of a session's
//! life, a preemption and its plan ([`preemption`], [`preempt`]), the plan of a drain, the sessions in
//! a listing, which node of a fleet may run a session ([`ownership`]) and which one should
//! ([`placement`]), what is restarted automatically ([`restart`]), what is forgotten ([`retention`]),
//! and what a session may connect to ([`egress`]).
//!
//! Absent on purpose: I/O, clocks, randomness, threads and tokio (`.clippy.toml` of this crate). The
//! caller passes in the time, and destructive work is returned as data for the caller to execute. No
//! task runs here; only [`Activity`] is shared between tasks, and it is a pair of atomic counters.
#![forbid(unsafe_code)]

mod activity;
mod bind;
mod closing;
mod departure;
pub mod drain;
pub mod egress;
mod end_cause;
mod error_chain;
mod image_reference;
pub mod lifecycle;
pub mod listing;
pub mod naming;
mod nearest;
pub mod ownership;
pub mod placement;
pub mod preempt;
pub mod preemption;
mod rate_limited_log;
pub mod reach;
mod resolve;
pub mod restart;
pub mod retention;
mod runtime_traits;
mod size;
mod spec_policy;
mod stop_signals;
mod talk_names;

pub use activity::{Activity, ActivityGuard, ActivityKind};
pub use bind::{Bind, BindError, DEFAULT_BIND_FIRST_ID, bind_root};
pub use closing::Closing;
pub use departure::{CLOSING_SPREAD, Departure, QUICK_CLOSING_SPREAD};
pub use end_cause::{DRAINED, EndCause, FENCED, LOST, PREEMPTED, UNRECORDED};
pub use error_chain::error_chain;
pub use naming::{CgroupDriver, CgroupParent, Instance};
pub use nearest::nearest;
pub use rate_limited_log::RateLimitedLog;
pub use resolve::{
    MAX_ARGUMENT_BYTES, MAX_ARGUMENTS, MAX_BINDS, MAX_ENV_BYTES, MAX_ENV_ENTRIES, MAX_GRACE_MS,
    MAX_LABEL_KEY_BYTES, MAX_LABEL_VALUE_BYTES, MAX_LABELS, MAX_READY_PATH_BYTES,
    MAX_READY_TIMEOUT_S, matches, no_template, patched, resolve,
};
pub use runtime_traits::{RuntimeTraits, runtime_traits};
pub use size::size;
pub use spec_policy::{
    BindCreation, HIGHEST_MAX_CPUS, HIGHEST_MAX_DISK, HIGHEST_MAX_PIDS, MIN_CPUS, MIN_DISK_BYTES,
    MIN_DISK_INODES, MIN_MEMORY_BYTES, SpecPolicy, Template,
};
pub use stop_signals::{allowed as allowed_signals, canonical as canonical_signal};
pub use talk_names::{MAX_NAMED, TalkName, TalkingSession, is_talk_name, names_in_groups};
