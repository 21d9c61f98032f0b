//! The native runtime, OCI runtimes in its containers, and that of plain processes.

mod crun;
mod disk;
mod gvisor;
mod native;
mod native_host;
mod oci_host;
#[cfg(target_arch = "x86_64")]
mod oci_trouble;
mod pool;
mod process;
