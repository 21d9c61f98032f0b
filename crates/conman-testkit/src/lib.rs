//! What tests of several crates share: the conformance suites that every registry, fleet and runtime
//! must pass, a registry, a fleet and a fence in memory, and a runtime without images. Only tests
//! depend on it.
#![forbid(unsafe_code)]

pub mod fleet_conformance;
mod fleet_model;
mod memory_fence;
mod process_runtime;
pub mod registry_conformance;
mod registry_model;
pub mod runtime_conformance;
mod specs;

pub use fleet_model::{ModelFleet, ModelNode};
pub use memory_fence::MemoryFence;
pub use process_runtime::{Fault, Faults, Operation, ProcessOptions, ProcessRuntime};
pub use registry_model::ModelRegistry;
pub use specs::resolved_spec;
