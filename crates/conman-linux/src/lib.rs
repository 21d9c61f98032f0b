//! The kernel's interfaces that conman stands on: pidfds and process identity, network
//! namespaces, cgroups, path resolution below a root.
//!
//! The crate knows processes, descriptors and paths, and nothing of sessions. It keeps no state
//! but what a value owns, and nothing here runs by itself except the threads of
//! [`NetnsSockets`], which are joined to their callers by one bounded channel of requests and a
//! oneshot channel for each answer.
//!
//! Blocking: everything that is not `async` reads procfs or cgroupfs, or makes a system call that
//! does not wait, except [`PidFd::wait_dead`] and [`DeathWatch::wait`], which say so. Nothing
//! here talks to a daemon, so all of it works while every daemon hangs.
//!
//! It is the one crate that may hold `unsafe`; each use is opted into where it stands.
#![deny(unsafe_code)]

mod beneath;
mod cgroup_mounts;
mod cgroups;
mod death_watch;
mod identity;
mod netns_sockets;
mod pidfd;
pub mod proc_scan;
mod proc_stat;
mod process_facts;
mod signal_name;

pub use beneath::{create_dir_beneath, open_beneath};
pub use cgroups::{CgroupError, Cgroups};
pub use death_watch::DeathWatch;
pub use identity::{ProcessIdentity, boot_id};
pub use netns_sockets::NetnsSockets;
pub use pidfd::{PidFd, ProcessError};
pub use process_facts::{pid_namespace, raise_nofile, resident_bytes};
pub use rustix::process::Signal;
pub use signal_name::{parse_signal, signal_name};
