//! One node: the sessions of one machine, from admission to cleanup.
//!
//! [`Node`] starts and stops. Its handles, each cheap to clone, are the interface: [`SessionsHandle`],
//! [`AccessHandle`] (connections, commands, terminals), [`DrainHandle`], [`PreemptionHandle`] and
//! [`StatusHandle`]. The node owns
//! - one task for each session that has not ended (`session`), which alone writes the session's
//!   state; all other code holds a handle with two watch channels (its view out, an order to stop
//!   in),
//! - the map of sessions (`session_table`), which decides an ensure synchronously,
//! - the kill table (`kill_table`), which always has everything that must be killed when the machine is
//!   about to stop,
//! - the emergency thread (`emergency`), an OS thread with its own tokio runtime, joined to the
//!   rest by the kill table and one bounded channel of commands,
//! - three threads, one for each state file of the node's orders (`state_writer`): a drain, a cordon, a
//!   preemption,
//! - while the node is being drained, one task that stops its sessions one after the other (`drain`),
//! - four background tasks: `cleanup` (fed by a set of dead containers), `end_orders` (fed by the
//!   registry's pending orders to end sessions), `reconcile` (containers without a record) and
//!   `runtime_health`.
//!
//! Invariants, each with the place that keeps it:
//! - *One container of a session at a time.* A life begins only where the map has no life that has
//!   not ended (`session_table`), and ends only with its release.
//! - *Recorded before sent, known before started.* The claim is durable before the runtime gets a request
//!   for the session ([`conman_core::lifecycle`]), and the kill table is updated before a start is sent
//!   (`session::launch`).
//! - *Killed, certified, released, in this order*, by the session's task ([`conman_core::lifecycle`])
//!   and by the emergency thread (`emergency::preemption`). Only a dead init, or proof that nothing ran
//!   and nothing will, makes a certificate.
//! - *The kill path depends on no other program.* It needs pidfds and the registry, no runtime's daemon,
//!   no other task and no lock that is held across an await.
//!
//! Absent on purpose: the order of a life's steps (a pure state machine's), signals of the process and
//! everything that serves clients (the binary's).
#![forbid(unsafe_code)]

mod access;
mod adoption;
mod attached;
mod binds;
mod certificate;
mod cleanup;
mod container_kill;
mod context;
mod cordon;
mod disk_watch;
mod drain;
mod emergency;
mod end_orders;
mod ensure;
mod error;
mod events;
mod exit_proof;
mod file_orders;
mod file_watch;
mod gentle_stop;
mod host_limits;
mod host_load;
mod host_room;
mod host_stalls;
mod kept_access;
mod kill_table;
mod leave;
mod links;
mod lost;
mod node;
mod oom_kills;
mod oom_watch;
mod options;
mod patch;
mod pause;
mod phases;
mod plan;
mod processes;
mod readiness;
mod reconcile;
mod revival;
mod route;
mod runtime_health;
mod session;
mod session_table;
mod sessions;
mod start_waits;
mod state_writer;
mod stats;
mod status;
mod stuck;
mod throttled;
mod view;

pub use access::AccessHandle;
pub use attached::{Attached, Presence};
pub use conman_net::attached::LinkError;
pub use drain::{DrainHandle, MAX_PARALLEL as MAX_DRAIN_PARALLEL};
pub use emergency::{
    EmergencyThread, NOTICE_SOURCES, NoticeSourceKind, NoticeSourceOptions, PendingReport,
    PreemptionHandle, SIGNAL, Setting as NoticeSetting,
};
pub use error::{
    AccessError, CordonError, DrainError, EnsureError, FailureKind, NodeStartError, NotHere,
    PatchError, PreemptError, RestartError, RouteError, StopError, Waiting,
};
pub use file_orders::FilesGuard;
pub use file_watch::WatchPlace;
pub use host_limits::HostLimit;
pub use host_load::host_load;
pub use host_room::{FoundRoom, RoomProbe, watch_host_room};
pub use host_stalls::HostStalls;
pub use leave::Leave;
pub use node::Node;
pub use options::{NodeBounds, NodeLimits, NodeOptions, UrlScheme};
pub use revival::{Former, Relocate, WithoutImage, end_of};
pub use route::SessionRoute;
pub use session_table::Occupancy;
pub use sessions::SessionsHandle;
pub use status::StatusHandle;
