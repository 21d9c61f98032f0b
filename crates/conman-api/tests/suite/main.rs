//! The API over a node on real processes; several nodes that share one registry.

mod attach;
mod cors;
mod events;
mod exec_socket;
mod fleet;
mod images;
mod openapi;
mod refusals;
mod sessions;
mod stage;
