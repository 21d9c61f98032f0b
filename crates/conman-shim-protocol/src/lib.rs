//! What the shim and its clients send to each other: requests, replies, what a client orders to be launched, the
//! streams of kept commands, and the files that both use. Also what sessions may see and call on the host's kernel,
//! which the shim enforces in native containers, and a client requests of OCI runtimes.
//!
//! JSON messages over SEQPACKET sockets, each message bounded ([`MAX_MESSAGE_BYTES`]) and decoded as a whole;
//! descriptors are sent with the messages. JSON, because a shim outlives upgrades of its clients: unknown fields
//! are ignored and new ones have defaults.
//!
//! The crate has no task, no thread and no state. Clients use it and nothing else of the shim.
#![forbid(unsafe_code)]

mod ahead;
mod client;
mod files;
mod id_pool;
pub mod link_socket;
pub mod log_times;
mod messages;
pub mod proc_paths;
mod root_spec;
pub mod seqpacket;
pub mod socket;
mod spec;
mod stream_messages;
pub mod system_calls;

pub use ahead::Ahead;
pub use client::{Client, ClientError};
pub use files::{ByteRange, FilesFailure, FilesOrder, FilesReply};
pub use id_pool::{IdPool, LEAST_ID, RANGE_SIZE, SHARED_IDS};
pub use messages::{
    COMMANDS_PAGE, Call, CallError, CommandView, ContainerState, ContainerView, DecodeError,
    FenceState, LaunchError, MAX_MESSAGE_BYTES, Message, PAGE, Phases, Reply, Request, VERSION,
    decode, encode,
};
pub use root_spec::{MAX_LAYERS, RootKind, RootSpec};
pub use spec::{
    BindSpec, ExecSpec, Hardening, KEPT_SEPARATOR, KeptCommandSpec, KeptStreamsSpec, LOG_BYTES,
    LaunchSpec, MAX_BINDS, MAX_LABEL_BYTES, NetworkSpec, ProgramSpec, RUNTIME_CONFIG,
    RUNTIME_PROGRAM, SESSION_ROOT, SESSION_TMP, STREAMS, SpecError, TerminalSize, check_name,
};
pub use stream_messages::{
    KEPT_OUTPUT_BYTES, MAX_INPUT_BYTES, OutputStream, Position, StreamEvent, StreamInput,
};
