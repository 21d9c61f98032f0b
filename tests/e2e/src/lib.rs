//! The end-to-end tests' own world: a real `conman serve` with its state in a temporary
//! directory, on ports of its own, on the machine's real kernel and Docker.
//!
//! A test of the native runtime asks for [`native()`] first, and needs nothing else.
//!
//! A test of Docker's asks [`docker_shared`] for Docker first and returns when there is none; what it gets is
//! a share of a lock across all test binaries, which only a test that stops dockerd holds alone
//! ([`docker_exclusive`]). From it a [`Builder`] makes a [`Conman`]: one daemon, or several one
//! after the other on the same state. Dropping it ends the daemon, every process of its sessions
//! and every container of its instance, also when the test panics; then the end of the log is
//! printed, too.
//!
//! Nothing here sleeps for a guess: [`eventually`] looks until a bound that is an error. Bounds are those of a
//! usual machine, and on a slower one a multiple of them: [`slowness()`].
#![forbid(unsafe_code)]

mod api;
mod binary;
mod builder;
mod chromium;
mod cli;
mod conman;
mod docker;
mod docker_lock;
mod echo;
mod id_range;
mod memory;
mod metadata_server;
mod native;
mod port;
mod programs;
mod raw_http;
mod requests;
mod skips;
mod slowness;
mod small_disk;
mod sse;
mod wait;

pub use api::{Answer, Api, Streamed};
pub use binary::{binary, copy_program};
pub use builder::Builder;
pub use chromium::{Chromium, chromium};
pub use cli::{CliOutput, PATIENCE as CLI_PATIENCE};
pub use conman::Conman;
pub use docker::{BUSYBOX, Docker, HungDockerd, PYTHON, docker_exclusive, docker_shared};
pub use echo::{ECHO_TEMPLATE, log_with};
pub use id_range::IdRange;
pub use memory::{peak_resident_bytes, resident_bytes};
pub use metadata_server::MetadataServer;
pub use native::{NATIVE_TEMPLATES, Native, ROOT, native};
pub use port::Port;
pub use programs::programs_archive;
pub use raw_http::{RawClient, raw_exchange};
pub use requests::{WebSocket, answer, websocket, with};
pub use skips::lacks;
pub use slowness::slowness;
pub use small_disk::SmallDisk;
pub use sse::EventStream;
pub use wait::{eventually, eventually_some};
