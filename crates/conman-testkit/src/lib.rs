//! What tests of several crates share: the conformance suites that every registry, fleet and runtime
//! must pass, and a fleet in memory. Only tests depend on it.
#![forbid(unsafe_code)]

pub mod fleet_conformance;
mod fleet_model;
pub mod registry_conformance;
pub mod runtime_conformance;

pub use fleet_model::{ModelFleet, ModelNode};
