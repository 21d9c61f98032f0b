//! One session's task.
//!
//! [`conman_core::lifecycle`], which is pure, decides the order of steps. The driver here carries out its
//! actions, each call as a task in one [`tokio::task::JoinSet`], and reports the outcomes back. The driver
//! adds:
//! - the phases of a start and their times ([`crate::phases`]),
//! - the kill table's entry, kept one step ahead of every call ([`crate::kill_table`]),
//! - the view for others, the journal and the metrics (`publisher`),
//! - the exit code, asked for before the release; idleness and the longest life (`idle`),
//! - which events come from outside: an order to stop, and what the emergency thread did.
//!
//! ```text
//!  handle.stop (watch) ──┐                       ┌──> handle.view (watch)
//!  handle.fate (watch) ──┼──> driver <──> calls  ├──> journal, metrics
//!  timers ───────────────┘    (machine)          └──> registry, runtime, kill table
//! ```

mod answer;
mod claim;
mod driver;
mod egress;
mod handle;
mod hold_process;
mod idle;
mod last_output;
mod launch;
mod leaving;
mod live_spec;
mod make;
mod publisher;
mod release;
mod unanswered_start;
mod view;

pub(crate) use self::answer::StartOutcome;
pub(crate) use self::driver::{Beginning, spawn};
pub(crate) use self::handle::{
    MAX_ATTACHED, SessionHandle, StopOrder, attribute_to_deletion, reason_of_deleted,
};
pub(crate) use self::leaving::Leaving;
pub(crate) use self::unanswered_start::resolve;
pub(crate) use self::view::{Failure, View};
