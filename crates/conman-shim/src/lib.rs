//! The parent of all native containers of a node: starts them, reaps them, keeps how they ended,
//! freezes and kills them, and is the dead-man fence.
//!
//! Three processes, each with one thread and no async runtime:
//!
//! - the *shim* ([`run`]): one epoll over clients, launcher, deaths and the fence's timer. It never
//!   waits on a disk or on rtnl. It needs no descriptor for a child, since nobody but it can reap
//!   one and thereby free its PID.
//! - the *launcher*, which the shim forks: makes containers, as children of the shim. When it dies
//!   the shim forks another.
//!
//! - the *sweeper*, forked likewise: keeps logs bounded by punching out what is oldest.
//!
//! They and their clients talk over SEQPACKET sockets in messages of JSON, each bounded
//! ([`MAX_MESSAGE_BYTES`]) and decoded as a whole; descriptors travel beside them. JSON, because a
//! shim lives through upgrades of its clients: unknown fields are passed over and new ones have
//! defaults. Clients are root's, by their socket's credentials. A client that goes, goes: no
//! container depends on one.
//!
//! The shim replaces its own program by exec ([`Request::Replace`], SIGHUP): what it knows goes to
//! the new one in sealed memory, sockets by their descriptors, and the containers stay children.
//! When it dies its containers live on. A later shim finds them in the state file, holds them by
//! verified pidfds, and asks the kernel how they ended.
//!
//! The fence is that of `conman_core::ownership`: at its deadline everything freezes, what cannot be
//! proven frozen is killed, and only an order thaws. It covers what others start, too, by the
//! cgroups that they are told to start it in.
//!
//! What is absent: any knowledge of sessions, images, ownership. Names, paths and deadlines come
//! from the client, which is the daemon.
#![forbid(unsafe_code)]

mod attachment;
mod client;
mod condemned;
mod connection;
mod containers;
mod control;
mod fence;
mod handover;
mod ids;
mod launcher;
mod launching;
mod ledger;
mod log_file;
mod options;
mod protocol;
mod seccomp_profile;
#[cfg(test)]
mod security_page;
mod seqpacket;
pub mod socket;
mod spec;
mod sweeper;
mod terminal;
mod terminal_modes;
mod turn;

use std::fs::File;

pub use attachment::Attachment;
pub use client::{Client, ClientError, Launched};
pub use ids::{IdPool, RANGE_SIZE, SHARED_IDS};
pub use log_file::{LogFile, LogPart, MAX_PART_BYTES};
pub use options::ShimOptions;
pub use protocol::{
    Call, CallError, ContainerState, ContainerView, DecodeError, FenceState, LaunchError,
    MAX_MESSAGE_BYTES, Message, PAGE, Phases, Reply, Request, VERSION, decode, encode,
};
pub use spec::{
    BindSpec, ExecSpec, Hardening, LOG_BYTES, LaunchSpec, MAX_BINDS, MAX_LAYERS, ProgramSpec,
    RootSpec, SpecError, TerminalSize,
};
pub use terminal::{MAX_TYPED, SCROLLBACK_BYTES, TerminalEvent, TerminalInput};

/// Is the shim until SIGTERM, which leaves the containers alone where the fence is unarmed. An armed
/// one closes, and the shim goes on until everything is proven frozen or is dead: nothing runs without
/// its fence. The process must have one thread.
///
/// With SIGHUP, and when it is asked to, it goes on as the program that its path now names: with
/// the arguments of this one, so that whoever calls this comes here again. A process that was
/// executed only to say whether it could does not come back from here.
///
/// # Errors
/// When it cannot begin or go on; where another shim was waited for, also when the place of the
/// lock was cleared away meanwhile: whoever keeps shims running starts it again.
pub fn run(options: ShimOptions) -> std::io::Result<LastHold> {
    let mut control = match handover::asked()? {
        handover::Asked::Check(memory, socket) => {
            let answered = handover::check(memory, &socket);
            // This is not the shim: whoever called must not clear up behind one that ends.
            std::process::exit(i32::from(answered.is_err()))
        }
        handover::Asked::Take(memory) => {
            let sealed = handover::Sealed::open(memory)?;
            control::Control::take_over(options, sealed)?
        }
        handover::Asked::Nothing => control::Control::new(options)?,
    };
    control.run()?;
    control.end()
}

/// Keeps successors off while what a shim that has ended leaves to nobody is cleared up: without, it
/// would be a successor's.
#[derive(Debug)]
#[must_use = "nobody succeeds the shim while this is held, and anybody may from then on"]
pub struct LastHold {
    _lock: File,
    is_alone: bool,
}

impl LastHold {
    /// Whether nothing lives that the shim knew of, nothing is started or may still appear, and no
    /// death is owed: a successor needs to know of nothing then.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        self.is_alone
    }
}
