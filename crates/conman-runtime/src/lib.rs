//! Runtimes: programs that make containers.
//!
//! [`Runtime`] is the interface. The native runtime (through the shim's socket), Docker (through
//! its HTTP API on a Unix socket) and a fake made of plain namespaced processes implement it. All
//! three pass the same conformance suite (`conman-testkit`).
//!
//! A runtime creates, starts, describes and removes. It does **not** kill containers: the kernel
//! does (`conman-linux`), so that no daemon can block it. A command's processes are known only to
//! the runtime, so it kills those on request, also through the kernel.
#![forbid(unsafe_code)]

mod blocking;
mod container_files;
mod docker;
mod exec_channels;
mod exec_kill;
mod exec_streams;
mod fence_opening;
mod kernel_view;
mod log_files;
mod native;
mod process;
mod removals;
mod runtime;
mod shim_fence;
mod shim_link;
mod stored_plan;
mod terminal;
mod terminal_channels;

pub use docker::{DockerFence, DockerOptions, DockerRuntime, DockerTimeouts};
pub use exec_kill::{ExecKill, KillReply};
pub use fence_opening::{FenceOpener, Recorded};
pub use native::{NativeOptions, NativeRuntime, NativeTimeouts, SESSION_OPEN_FILES};
pub use process::{Fault, Faults, Operation, ProcessOptions, ProcessRuntime};
pub use runtime::{
    AttachOptions, BindPlan, ContainerKey, ContainerPlan, ExecIo, ExecPlan, FoundContainer,
    LogChunk, LogOptions, OutputStream, Runtime, RuntimeError, RuntimeInfo, Started, TerminalIo,
    TerminalOutput,
};
pub use shim_fence::{FenceFailure, FenceHeard, FenceSeen, ShimFence};
pub use shim_link::ShimCommand;
pub use terminal_channels::TERMINAL_SIZE;
