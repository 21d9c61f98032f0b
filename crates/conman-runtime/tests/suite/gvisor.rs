//! Sessions with gVisor as their kernel do what every runtime must, but for what the host does not see.

use std::sync::Arc;
use std::time::Duration;

use conman_core::Instance;
use conman_runtime::{NativeTimeouts, Runtime};
use conman_testkit::runtime_conformance;
use conman_testkit::runtime_conformance::Harness;

use crate::native_host::{Host, IMAGE};

struct Sandboxed(Host);

impl Sandboxed {
    fn new() -> Result<Self, String> {
        Ok(Self(Host::new()?))
    }
}

impl Harness for Sandboxed {
    fn runtime(&self, instance: &Instance) -> Arc<dyn Runtime> {
        Arc::new(self.0.open(instance, NativeTimeouts::default()).gvisor())
    }

    fn runtime_that_loses_answers_of_start(&self, instance: &Instance) -> Arc<dyn Runtime> {
        let timeouts = NativeTimeouts {
            // Over as soon as the order is sent.
            start: Duration::ZERO,
            ..NativeTimeouts::default()
        };
        Arc::new(self.0.open(instance, timeouts).gvisor())
    }

    fn image(&self) -> String {
        IMAGE.to_owned()
    }

    fn keeps_outputs_apart(&self) -> bool {
        false
    }
}

runtime_conformance!(
    Sandboxed::new(),
    #[ignore = "needs runsc: `cargo xtask acceptance gvisor`"]
);
