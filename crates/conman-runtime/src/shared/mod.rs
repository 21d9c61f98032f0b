//! What several runtimes are made of, the fake of the tests among them.

pub mod blocking;
pub(crate) mod connect;
pub mod container_files;
pub(crate) mod container_network;
pub mod exec_channels;
pub mod exec_kill;
pub mod exec_run;
pub mod exec_streams;
pub(crate) mod host_ports;
pub mod kept_logs;
pub mod kernel_view;
pub mod log_files;
pub mod removals;
pub mod stored_plan;
pub mod terminal;
