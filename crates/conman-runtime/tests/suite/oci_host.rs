//! A harness for sessions with an OCI runtime.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use conman_core::Instance;
use conman_proto::RuntimeKind;
use conman_runtime::{NativeTimeouts, OciOptions, Runtime};
use conman_testkit::runtime_conformance::Harness;

use crate::native_host::{Host, IMAGE};

const CRUN: &str = "/usr/bin/crun";

/// A host with one OCI runtime.
pub(crate) struct WithRuntime {
    pub(crate) host: Host,
    pub(crate) kind: RuntimeKind,
    pub(crate) options: OciOptions,
    pub(crate) timeouts: NativeTimeouts,
}

impl WithRuntime {
    pub(crate) fn of(kind: RuntimeKind, options: OciOptions) -> Result<Self, String> {
        Ok(Self {
            host: Host::new()?,
            kind,
            options,
            timeouts: NativeTimeouts::default(),
        })
    }

    /// The tests' `runsc`, or where it is by default.
    pub(crate) fn gvisor() -> Result<Self, String> {
        let default = OciOptions::gvisor();
        let program = std::env::var_os("CONMAN_RUNSC").map(PathBuf::from);
        let options = OciOptions {
            program: program.unwrap_or(default.program.clone()),
            ..default
        };
        Self::of(RuntimeKind::Gvisor, options)
    }

    /// The host's `crun`.
    pub(crate) fn crun() -> Result<Self, String> {
        if !Path::new(CRUN).exists() {
            return Err(format!("{CRUN} is missing (package crun)"));
        }
        let options = OciOptions {
            is_gvisor: false,
            program: CRUN.into(),
            arguments: vec!["--cgroup-manager=disabled".to_owned()],
        };
        Self::of("crun".parse().expect("a name"), options)
    }

    fn open(&self, instance: &Instance, timeouts: NativeTimeouts) -> Arc<dyn Runtime> {
        let oci = BTreeMap::from([(self.kind, self.options.clone())]);
        let native = self.host.open_with_oci(instance, timeouts, oci);
        Arc::new(native.with_runtime(self.kind))
    }
}

impl Harness for WithRuntime {
    fn runtime(&self, instance: &Instance) -> Arc<dyn Runtime> {
        self.open(instance, self.timeouts)
    }

    fn runtime_that_loses_answers_of_start(&self, instance: &Instance) -> Arc<dyn Runtime> {
        let timeouts = NativeTimeouts {
            // Over as soon as the order is sent.
            start: Duration::ZERO,
            ..self.timeouts
        };
        self.open(instance, timeouts)
    }

    fn image(&self) -> String {
        IMAGE.to_owned()
    }

    fn keeps_outputs_apart(&self) -> bool {
        false
    }

    fn resizes_terminals(&self) -> bool {
        // `crun` passes the signal on, and not the size.
        self.options.is_gvisor
    }
}
