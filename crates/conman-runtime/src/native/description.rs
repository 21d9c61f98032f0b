//! What the native runtime and the OCI runtimes report of themselves.

use std::sync::PoisonError;

use conman_linux::{Features, Interface};
use conman_proto::RuntimeKind;
use conman_shim_protocol::Request;

use super::Inner;
use super::failure::call_failed;
use crate::{RuntimeError, RuntimeInfo};

impl Inner {
    pub(super) async fn describe(&self, kind: RuntimeKind) -> Result<RuntimeInfo, RuntimeError> {
        let failed = |error| call_failed("describe itself", "the shim", error);
        let connection = self.link.connection().await.map_err(failed)?;
        self.ask(&Request::Fence).await.map_err(failed)?;
        let version = match kind {
            RuntimeKind::Gvisor | RuntimeKind::Oci(_) => self.runtime_version(kind).await?,
            RuntimeKind::Native | RuntimeKind::Docker | RuntimeKind::Process => {
                env!("CARGO_PKG_VERSION").to_owned()
            }
        };
        let warnings = connection.features.as_ref().map(warnings);
        Ok(RuntimeInfo {
            version,
            warnings: warnings.unwrap_or_default(),
        })
    }

    /// Without the program no session of this kind can start, which is reported to other nodes.
    async fn runtime_version(&self, kind: RuntimeKind) -> Result<String, RuntimeError> {
        let lock = || self.versions.lock().unwrap_or_else(PoisonError::into_inner);
        let known = lock().get(&kind).cloned();
        let found = self.oci(kind)?.version_unless(known).await;
        let found = found.map_err(|fault| RuntimeError::Unavailable {
            runtime: kind,
            action: "describe itself",
            reason: fault.to_string(),
        })?;
        let version = found.1.clone();
        lock().insert(kind, found);
        Ok(version)
    }
}

fn warnings(features: &Features) -> Vec<String> {
    let mut warnings = Vec::new();
    if !features.reaches_floor() {
        let (major, minor) = Features::FLOOR;
        warnings.push(format!(
            "Linux {} is too old, so no session can start; use Linux {major}.{minor} or later",
            features.release
        ));
    }
    for weaker in [Interface::MappedLayers, Interface::MountAttributes] {
        if !features.has(weaker) {
            warnings.push(format!(
                "Linux {} lacks `{}` (Linux {} has it): {}",
                features.release,
                weaker.name(),
                weaker.since(),
                weaker.without()
            ));
        }
    }
    if !features.user_namespaces {
        warnings.push(
            "user namespaces are switched off, so no session can start; raise \
             user.max_user_namespaces"
                .to_owned(),
        );
    }
    warnings
}
