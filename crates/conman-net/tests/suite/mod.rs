//! The modules of the network plane's tests.

mod bandwidth;
mod connecting;
mod egress;
mod encapsulated;
mod fabric;
mod groups;
mod inside;
mod interfaces;
mod isolation;
mod many_nodes;
mod namespace;
mod pairs;
mod sweeping;
