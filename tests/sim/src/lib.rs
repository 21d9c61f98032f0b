//! Whole fleets of `conman_core::ownership` under simulated time, clocks, store and faults, from
//! one seed. [`checker`] sees true-time container runs and the store's history, and nothing of
//! the protocol. No task, thread or clock in here.
#![forbid(unsafe_code)]

pub mod checker;
mod random;
mod world;

pub use world::{Report, simulate};
