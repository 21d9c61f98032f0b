//! Wire types of conman's HTTP API.
//!
//! Plain data with serde and OpenAPI descriptions: no I/O, no clock, no policy. The daemon, the
//! CLI and the tests share these types, and `proto/openapi.json` is generated from them.
//!
//! Conventions: times are RFC 3339 in UTC, durations and sizes carry their unit in the name,
//! requests refuse unknown fields, responses may grow fields.
#![forbid(unsafe_code)]

mod bandwidth;
mod drain;
mod end_cause;
mod event;
mod exec;
mod file;
mod generation;
mod image;
mod kept_exec;
mod log_line;
mod network;
mod node;
mod port_range;
mod problem;
mod problem_kind;
mod process;
mod runtime_kind;
mod session;
mod session_id;
mod session_link;
mod session_patch;
mod spec;
mod stats;
mod template;
mod token;

pub use bandwidth::{Bandwidth, Rate, RateError};
pub use drain::{
    DrainPlan, DrainReport, DrainRequest, DrainSession, DrainState, Moved, RebalanceReport,
    RebalanceRequest,
};
pub use end_cause::{EndCause, SessionEnd};
pub use event::{
    Event, EventKind, EventPage, NoEventKind, NodeReason, SessionInFleet, SessionOwnership,
    TAKEN_OVER_FROM, Timeline, TimelinePhase,
};
pub use exec::{
    ATTACH_PROTOCOL, EXEC_PROTOCOL, ExecChannel, ExecOutput, ExecRequest, ExecResult, ExecStatus,
    NotRun, OutputPosition, PORT_PROTOCOL, TerminalSize,
};
pub use file::{
    FileChange, FileChangeKind, FileEntry, FileList, FileType, MakeDirectoryRequest, MoveRequest,
    UnpackReport,
};
pub use generation::Generation;
pub use image::{
    GcReport, Image, ImageConfig, ImageLayer, ImageList, ImageRemoval, LayerProgress, PullPhase,
    PullProgress, PullRequest,
};
pub use kept_exec::{ExecId, KeptExec, KeptExecList};
pub use log_line::{LOG_FRAME_NOTE, LOG_FRAMES, LogLine, LogStream};
pub use network::{InterfaceName, LinkTarget, Network, NetworkError, NetworkTraits};
pub use node::{
    HostLimit, Node, NodeInFleet, NodeList, NodeLoad, NodeRemoval, NodeRuntime, NodeStanding,
    NodeState, NodeStore, NodeTakeover, PreemptPlan, PreemptReport, PreemptRequest, PreemptSession,
    Readiness, Unreleased,
};
pub use port_range::{FullPort, PortEntry, PortRange, PortRangeError, PortText};
pub use problem::{FieldError, LimitMet, PROBLEM_CONTENT_TYPE, Problem};
pub use problem_kind::ProblemKind;
pub use process::{ProcessList, SessionProcess};
pub use runtime_kind::{RuntimeKind, RuntimeName, RuntimeNameError};
pub use session::{EnsureResponse, Session, SessionList, SessionState, StopReport};
pub use session_id::{SessionId, SessionIdError};
pub use session_link::{LinkRequest, SessionLink, SessionLinkList};
pub use session_patch::SessionPatch;
pub use spec::{IdleAction, NodeLoss, OnNodeLoss, ResolvedSpec, Restarted, SessionRequest};
pub use stats::{SessionStats, StatsList};
pub use template::{Template, TemplateList};
pub use token::{ConnectToken, ConnectTokenRequest};
