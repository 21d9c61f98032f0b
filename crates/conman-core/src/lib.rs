//! Pure decisions: how a request becomes a spec, what things are called, how a session's life
//! goes on, what a preemption or a drain will do, which sessions a listing shows, which node of a
//! fleet may run what ([`ownership`]), which one shall ([`placement`]), what is started again by
//! itself ([`restart`]), and what is forgotten ([`retention`]).
//!
//! Absent on purpose: I/O, clocks, randomness, threads and tokio. Whoever needs a time passes it
//! in, and destructive work comes out as data for somebody else to execute. No task runs here;
//! [`Activity`] alone is shared between tasks, and is a pair of atomic counters.
#![forbid(unsafe_code)]

mod activity;
mod bind;
mod closing;
pub mod drain;
mod end_cause;
mod image_reference;
pub mod lifecycle;
pub mod listing;
pub mod naming;
mod nearest;
pub mod ownership;
pub mod placement;
pub mod preempt;
mod preempt_signal;
mod resolve;
pub mod restart;
pub mod retention;
mod sparing;
mod spec_policy;

pub use activity::{Activity, ActivityGuard};
pub use bind::{Bind, BindError, DEFAULT_BIND_FIRST_ID, bind_root};
pub use closing::Closing;
pub use end_cause::{DRAINED, EndCause, FENCED, LOST, PREEMPTED, UNRECORDED};
pub use naming::{CgroupDriver, CgroupParent, Instance};
pub use nearest::nearest;
pub use preempt_signal::{allowed as allowed_signals, canonical as canonical_signal};
pub use resolve::{
    MAX_ARGUMENT_BYTES, MAX_ARGUMENTS, MAX_BINDS, MAX_ENV_BYTES, MAX_ENV_ENTRIES,
    MAX_LABEL_KEY_BYTES, MAX_LABEL_VALUE_BYTES, MAX_LABELS, MAX_PREEMPT_GRACE_MS,
    MAX_READY_PATH_BYTES, MAX_READY_TIMEOUT_S, matches, no_template, resolve,
};
pub use sparing::Sparing;
pub use spec_policy::{
    HIGHEST_MAX_CPUS, HIGHEST_MAX_DISK, HIGHEST_MAX_PIDS, MIN_CPUS, MIN_DISK_BYTES,
    MIN_DISK_INODES, MIN_MEMORY_BYTES, SpecPolicy, Template,
};
