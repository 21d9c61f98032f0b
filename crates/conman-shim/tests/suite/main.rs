//! A real shim on the real kernel: launching, fencing, terminals, confinement.

mod ahead;
mod bad_ground;
mod commands;
mod confinement;
mod containers;
mod ending;
mod fence;
mod foreign;
mod fuzz;
mod hardening;
#[cfg(target_arch = "x86_64")]
mod hostile_logs;
mod init;
mod kept;
mod layouts;
mod logs;
mod opening;
mod protocol;
mod replacing;
mod standby;
mod standing_still;
mod support;
mod sweeping;
mod terminals;
mod trouble;
mod waiting;
