//! What decides whether a native container may run: the dead-man fence, the ledger of what lives, and the loop
//! that reaps, freezes and kills.
//!
//! One thread with one epoll ([`run`]) over clients, helpers, deaths and the fence's timer. It never waits on a
//! disk or on rtnl, and has no async runtime. It needs no descriptor for a child, since only it can reap one and
//! thereby free its PID. Clients must be root, by their socket's credentials. No container depends on a client's
//! connection.
//!
//! The fence is that of `conman_core::ownership`: at its deadline everything freezes, what cannot be
//! proven frozen is killed, and only an order thaws. It also covers containers that other programs
//! start, by the cgroups that those programs are given.
//!
//! The program replaces itself by exec ([`Request::Replace`](conman_shim_protocol::Request::Replace), SIGHUP): its
//! state is passed in sealed memory, sockets by their descriptors, and the containers stay children. When it dies
//! its containers survive. A later shim finds them in the state file, holds them by verified pidfds, and asks
//! the kernel how they ended.
//!
//! Absent on purpose: how a container is made, its terminals, its logs, its files. [`ShimParts`] is all that the
//! loop knows of them: two functions that helper processes run, and [`ContainerStreams`]. Absent as well: any
//! knowledge of sessions, images, ownership. Names, paths and deadlines come from the client, which is the daemon.
#![forbid(unsafe_code)]

mod connection;
mod containers;
mod control;
mod effect;
mod fence;
mod forbidden_starts;
mod handover;
mod helper;
mod id_claim;
mod id_ranges;
mod launcher_messages;
mod launching;
mod ledger;
mod log_bounds;
mod options;
mod poller;
mod shim_parts;
mod state_lock;

use std::fs::File;

pub use handover::number;
pub use id_claim::{ENDING_TIMEOUT, IDS_FILE, IdsTaken, ids_taken};
pub use launcher_messages::{Command, Order, Report, Start, Sweep};
pub use log_bounds::{BoundedLog, LogOrder};
pub use options::ShimOptions;
pub use poller::{PollToken, Poller};
pub use shim_parts::{
    ContainerStreams, HandedOverStreams, KeptStreams, KeptWatcher, ShimParts, StreamsUser,
    WatcherPlace,
};

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
pub fn run(options: ShimOptions, parts: ShimParts) -> std::io::Result<LastHold> {
    let mut control = match handover::asked()? {
        handover::HandoverOrder::Check(memory, socket) => {
            let answered = handover::check(memory, &socket);
            // This is not the shim: the caller must not clean up after it.
            std::process::exit(i32::from(answered.is_err()))
        }
        handover::HandoverOrder::Take(memory) => {
            let sealed = handover::Sealed::open(memory)?;
            control::Control::take_over(options, parts, sealed)?
        }
        handover::HandoverOrder::Nothing => control::Control::new(options, parts)?,
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
