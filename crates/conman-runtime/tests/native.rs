//! The native runtime, on a real shim, does what every runtime must.

mod native_host;

use std::sync::Arc;
use std::time::Duration;

use conman_core::Instance;
use conman_runtime::conformance::Harness;
use conman_runtime::{NativeTimeouts, Runtime, runtime_conformance};

use native_host::{Host, IMAGE};

impl Harness for Host {
    fn runtime(&self, instance: &Instance) -> Arc<dyn Runtime> {
        Arc::new(self.open(instance, NativeTimeouts::default()))
    }

    fn runtime_that_loses_answers_of_start(&self, instance: &Instance) -> Arc<dyn Runtime> {
        let timeouts = NativeTimeouts {
            // Over as soon as the order is sent.
            start: Duration::ZERO,
            ..NativeTimeouts::default()
        };
        Arc::new(self.open(instance, timeouts))
    }

    fn image(&self) -> String {
        IMAGE.to_owned()
    }

    fn keeps_outputs_apart(&self) -> bool {
        false
    }
}

runtime_conformance!(Host::new());
