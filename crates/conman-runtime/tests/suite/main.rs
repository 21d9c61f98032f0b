//! The native runtime and that of plain processes.

mod disk;
mod native;
mod native_host;
mod process;
