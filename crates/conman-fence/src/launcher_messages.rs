//! The messages between the shim and its launcher.

use std::path::PathBuf;

use conman_linux::Features;
use conman_shim_protocol::{ExecSpec, LaunchError, LaunchSpec, Phases};
use serde::{Deserialize, Serialize};

/// The shim's orders.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Order {
    Launch(Box<Start>),
    /// Finish the container made ahead whose order had this ticket, as the one of this start. Comes with the start's
    /// descriptors. Without effect once that was reported as not taken.
    Complete(Box<Start>),
    /// Comes with a pidfd of the container's init and the three streams.
    Exec(Box<Command>),
    /// Remove, in the background, what a start of this or of a dead launcher may have left.
    Sweep(Sweep),
    /// Lets a killed container die that is throttled.
    LiftCpuLimit {
        cgroup: String,
    },
}

/// A container to start.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Start {
    pub ticket: u64,
    /// First of the container's own ids.
    pub ids: u32,
    pub spec: LaunchSpec,
}

/// A command to run in a container.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Command {
    pub ticket: u64,
    /// The container's.
    pub cgroup: String,
    /// New owner of its pipes: user and group on the host, where they are known.
    pub owner: Option<(u32, u32)>,
    pub spec: ExecSpec,
}

/// The launcher's reports.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Report {
    /// The launcher works; sent once, first.
    Ready {
        features: Features,
    },
    /// The launcher cannot work; sent instead.
    Broken {
        error: LaunchError,
    },
    /// The shim has a new child. Comes before the child can do anything.
    Cloned {
        ticket: u64,
        pid: i32,
    },
    /// A container made ahead waits.
    Waits {
        ticket: u64,
        phases: Phases,
    },
    Running {
        ticket: u64,
        phases: Phases,
    },
    /// The shim has a new child that is only reaped. Sent before the child can end.
    Helper {
        pid: i32,
    },
    /// No process of it is left, and everything that can be removed is removed.
    Swept {
        ticket: u64,
    },
    /// Nothing of it is left except a zombie where it was cloned; with `left`, something may live, and must
    /// be swept.
    Failed {
        ticket: u64,
        error: LaunchError,
        left: bool,
    },
    /// The same of a container made ahead that has ended before it was any start's.
    NotTaken {
        ticket: u64,
        error: LaunchError,
        left: bool,
    },
}

/// What one start may have left.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sweep {
    pub ticket: u64,
    pub cgroup: String,
    pub scratch: PathBuf,
}
