//! The native runtime and that of plain processes.

mod disk;
mod gvisor;
mod native;
mod native_host;
mod pool;
mod process;
