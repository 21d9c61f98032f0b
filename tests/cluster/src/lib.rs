//! Whole fleets on one machine: every host is a network namespace, three real etcd members and any
//! number of real conman nodes among them, joined by a bridge in a namespace of its own.
//!
//! ```text
//!   n1 eth0 ─┐                    ┌─ eth0 e1        nothing of the machine's own network is touched;
//!   n2 eth0 ─┼─ bridge (switch) ──┼─ eth0 e2        it reaches a host through a [`Forward`], a
//!   n3 eth0 ─┘                    └─ eth0 e3        process's sockets on loopback
//! ```
//!
//! A node has a directory, a daemon, a shim and an instance id of its own, hence cgroups of its own:
//! several share one kernel. Faults are injected from outside: nftables drops in the receiver's
//! namespace, signals by pid. A [`Layout`] names everything, so that any process can find and remove
//! all of a cluster, whoever made it: [`remove`] does that on drop, for `down`, and for those whose
//! maker died ([`sweep`]).
//!
//! [`overlap`] judges what sessions wrote about themselves, and drives random faults; [`mod@bench`]
//! measures how soon sessions are served again elsewhere. `conman bench storm` is built on this crate, too.
#![forbid(unsafe_code)]

mod balancer;
pub mod bench;
mod builder;
mod certificates;
mod cluster;
mod command;
mod cut;
mod delay;
mod docker;
pub mod echo;
mod engine;
mod etcd;
mod forward;
mod holdings;
mod image;
mod layout;
mod leftovers;
mod network;
mod node;
pub mod overlap;
pub mod people;
mod process;
mod requirements;
mod slots;
mod timing;

pub use balancer::{Balancer, has_haproxy};
pub use builder::Builder;
pub use certificates::{Authority, etcd_files, trust_for_etcd};
pub use cluster::Cluster;
pub use cut::Cut;
pub use delay::Delay;
pub use docker::has_docker;
pub use engine::Engine;
pub use etcd::Member;
pub use forward::Forward;
pub use holdings::Holdings;
pub use layout::{AGENT_PORT, Host, Layout};
pub use leftovers::{Leftover, leftovers, remove, sweep};
pub use node::Node;
pub use requirements::{Ready, find, requirements};
pub use slots::QUIET_MACHINE;

/// The image of the sessions, for conman and for Docker.
pub const IMAGE: &str = conman_e2e::ROOT;
