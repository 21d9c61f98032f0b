//! Runtimes: programs that make containers.
//!
//! [`Runtime`] is the interface: [`Lifecycle`], [`Exec`] and [`KeptStreams`]. The native runtime (through the shim's socket) and Docker (through
//! its HTTP API on a Unix socket) implement it, and so does a fake of the tests (`conman-testkit`).
//! All three pass the same conformance suite.
//!
//! A runtime creates, starts, describes and removes. It does **not** kill containers: the kernel
//! does (`conman-linux`), so that no daemon can block it. A command's processes are known only to
//! the runtime, so it kills those on request, also through the kernel.
#![forbid(unsafe_code)]

mod attached_channels;
mod docker;
mod error;
mod exec;
mod fence_opening;
mod files;
mod kept_streams;
mod lifecycle;
mod native;
mod runtime;
pub mod shared;
mod shim_fence;
mod shim_link;
mod shim_lookups;

pub use attached_channels::TERMINAL_SIZE;
pub use conman_shim_protocol::{ByteRange, FilesFailure, FilesOrder, FilesReply};
pub use docker::{DockerFence, DockerOptions, DockerRuntime, DockerTimeouts};
pub use error::RuntimeError;
pub use exec::{Exec, ExecIo, ExecPlan, LogChunk, LogOptions, OutputStream};
pub use fence_opening::{FenceOpener, Recorded};
pub use files::{FilesInput, FilesOutput, files_streams};
pub use kept_streams::{AttachOptions, AttachedIo, AttachedOutput, KeptStreams};
pub use lifecycle::{
    BindPlan, ContainerKey, ContainerPlan, DiskExcess, FoundContainer, Lifecycle, MADE_AHEAD,
    PausedBy, RunningContainer, RuntimeInfo, Started,
};
pub use native::{
    NativeOptions, NativeRuntime, NativeTimeouts, OciFault, OciOptions, RootStore,
    SESSION_OPEN_FILES, SNAPSHOTS_FILE,
};
pub use runtime::Runtime;
pub use shared::container_network::ContainerNetwork;
pub use shared::exec_kill::{ExecKill, KillReply};
pub use shared::host_ports::HostPorts;
pub use shared::kept_logs::KeptLogLimits;
pub use shim_fence::ShimFence;
pub use shim_link::ShimCommand;
