//! `conman doctor`: which limits of a host bind on the way to so many sessions.
//!
//! Three steps, each of which can be tried without the others: [`Host`] reads what the kernel and
//! the machine say, below a root directory so that tests can invent a machine; [`examine`] turns
//! that, the [`Site`] and a runtime's [`Footprint`] into a [`Diagnosis`], which is data; [`Fix`] is
//! planned from the diagnosis and carried out last. [`room`] is the same for a daemon that is to
//! admit sessions: the one limit that binds first. [`Kernel`] tells which optional interfaces of the
//! kernel there are.
//!
//! Absent on purpose: sessions, the daemon's API, any knowledge of what is running beyond what
//! the kernel counts. No task runs here, and everything that is read is bounded.
#![forbid(unsafe_code)]

mod checks;
mod diagnosis;
mod fix;
mod footprint;
mod host;
mod kernel;
mod layers;
mod on_docker;
mod site;
mod table;

pub use checks::{examine, room};
pub use diagnosis::{Check, Diagnosis, Remedy, Verdict};
pub use fix::{Applied, Fix, FixError};
pub use footprint::Footprint;
pub use host::Host;
pub use kernel::{Kernel, KernelInterface};
pub use layers::{Isolation, MissingLayer};
pub use on_docker::ON_DOCKER;
pub use site::Site;
