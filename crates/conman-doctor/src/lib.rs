//! `conman doctor`: which limits of a host bind for a target number of sessions.
//!
//! Three steps, each testable separately: [`Host`] reads what the kernel and the machine report, below a
//! root directory so that tests can simulate a machine; [`examine`] turns that, the [`Site`] and a
//! runtime's [`Footprint`] into a [`Diagnosis`], which is data; [`Fix`] is planned from the diagnosis and
//! carried out last. [`room`] is the same for a daemon that admits sessions: it returns the one limit that
//! binds first. [`Kernel`] reports which optional interfaces the kernel has, [`Superblocks`] a price of each session
//! that only a boot lowers, [`Roots`] where sessions write and how much room is left there.
//!
//! Absent on purpose: sessions, the daemon's API, any knowledge of running programs beyond the kernel's
//! counters. No task runs here, and everything that is read is bounded.
#![forbid(unsafe_code)]

mod advice;
mod checks;
mod diagnosis;
mod fix;
mod footprint;
mod host;
mod kernel;
mod layers;
mod limit;
mod on_docker;
mod pools;
mod roots;
mod site;
mod superblocks;
mod table;

pub use checks::{examine, room};
pub use diagnosis::{Check, Diagnosis, Remedy, Verdict};
pub use fix::{Applied, Fix};
pub use footprint::Footprint;
pub use host::Host;
pub use kernel::{Kernel, KernelInterface};
pub use layers::{MissingLayer, layers_text, missing_layers};
pub use on_docker::ON_DOCKER;
pub use roots::Roots;
pub use site::Site;
pub use superblocks::Superblocks;
