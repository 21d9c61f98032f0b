//! The parent of all native containers of a node: starts them, reaps them, keeps their exit status,
//! freezes and kills them, and is the dead-man fence.
//!
//! Three processes, each with one thread and no async runtime:
//!
//! - the *shim* ([`run`]): one epoll over clients, launcher, deaths and the fence's timer. It never
//!   waits on a disk or on rtnl. It needs no descriptor for a child, since only it can reap one and
//!   thereby free its PID.
//! - the *launcher*, which the shim forks: creates containers, as children of the shim. When it dies
//!   the shim forks another.
//!
//! - the *sweeper*, forked likewise: bounds logs by punching out their oldest parts.
//!
//! They and their clients exchange JSON messages over SEQPACKET sockets, each message bounded
//! ([`MAX_MESSAGE_BYTES`]) and decoded as a whole; descriptors are sent with the messages. JSON, because
//! a shim outlives upgrades of its clients: unknown fields are ignored and new ones have defaults.
//! Clients must be root, by their socket's credentials. No container depends on a client's connection.
//!
//! The shim replaces its own program by exec ([`Request::Replace`], SIGHUP): its state is passed in
//! sealed memory, sockets by their descriptors, and the containers stay children. When the shim dies its
//! containers survive. A later shim finds them in the state file, holds them by verified pidfds, and asks
//! the kernel how they ended.
//!
//! The fence is that of `conman_core::ownership`: at its deadline everything freezes, what cannot be
//! proven frozen is killed, and only an order thaws. It also covers containers that other programs
//! start, by the cgroups that those programs are given.
//!
//! Absent on purpose: any knowledge of sessions, images, ownership. Names, paths and deadlines come from
//! the client, which is the daemon.
#![forbid(unsafe_code)]

mod client;
mod connection;
mod containers;
mod control;
mod effect;
mod fence;
mod files;
mod forbidden_starts;
mod handover;
mod helper;
mod id_claim;
mod ids;
mod launcher;
mod launching;
mod ledger;
pub mod link_socket;
pub mod log_times;
mod options;
mod output_ring;
mod protocol;
mod seccomp_filter;
mod seccomp_profile;
mod seqpacket;
pub mod socket;
mod spec;
mod state_lock;
mod stream_messages;
mod streams;
mod sweeper;
mod terminal_modes;
#[cfg(test)]
mod tests;

use std::fs::File;

pub use client::{Client, ClientError};
pub use files::{ByteRange, FilesFailure, FilesOrder, FilesReply};
pub use id_claim::{ENDING_TIMEOUT, IDS_FILE, IdsTaken, ids_taken};
pub use ids::{IdPool, RANGE_SIZE, SHARED_IDS};
pub use options::ShimOptions;
pub use output_ring::KEPT_OUTPUT_BYTES;
pub use protocol::{
    COMMANDS_PAGE, Call, CallError, CommandView, ContainerState, ContainerView, DecodeError,
    FenceState, LaunchError, MAX_MESSAGE_BYTES, Message, PAGE, Phases, Reply, Request, VERSION,
    decode, encode,
};
pub use spec::{
    BindSpec, ExecSpec, Hardening, KeptCommandSpec, KeptStreamsSpec, LOG_BYTES, LaunchSpec,
    MAX_BINDS, MAX_LABEL_BYTES, MAX_LAYERS, NetworkSpec, ProgramSpec, RootSpec, SpecError,
    TerminalSize,
};
pub use stream_messages::{MAX_INPUT_BYTES, OutputStream, Position, StreamEvent, StreamInput};

/// Runs the shim until SIGTERM, which leaves the containers alone where the fence is unarmed. An armed
/// fence closes, and the shim runs until everything is proven frozen or is dead: nothing runs without
/// its fence. The process must have one thread.
///
/// On SIGHUP, or on request, it executes the program at its path with its own arguments, so that the
/// new program's caller comes here again. A process that was executed only to check the new program
/// does not return from here.
///
/// # Errors
/// When it cannot begin or continue. After waiting for another shim, also when the lock's directory was
/// removed meanwhile: the service manager starts it again.
pub fn run(options: ShimOptions) -> std::io::Result<LastHold> {
    let mut control = match handover::asked()? {
        handover::HandoverOrder::Check(memory, socket) => {
            let answered = handover::check(memory, &socket);
            // This is not the shim: the caller must not clean up after it.
            std::process::exit(i32::from(answered.is_err()))
        }
        handover::HandoverOrder::Take(memory) => {
            let sealed = handover::Sealed::open(memory)?;
            control::Control::take_over(options, sealed)?
        }
        handover::HandoverOrder::Nothing => control::Control::new(options)?,
    };
    control.run()?;
    control.end()
}

/// Keeps a successor from starting while the remains of an ended shim are removed: otherwise these could
/// already be the successor's.
#[derive(Debug)]
#[must_use = "a successor can start only after this is dropped"]
pub struct LastHold {
    _lock: File,
    is_alone: bool,
}

impl LastHold {
    /// Whether no known container lives, no start is under way or may still appear, and no death has to be
    /// reported: a successor needs no state then.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        self.is_alone
    }
}
