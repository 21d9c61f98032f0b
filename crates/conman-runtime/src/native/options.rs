//! The configuration of a [`super::NativeRuntime`].

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use conman_core::naming::Instance;
use conman_image::ImageStore;
use conman_linux::IoLimits;
use conman_proto::RuntimeKind;

use super::OciOptions;
use crate::fence_opening::FenceOpener;
use crate::shared::container_network::ContainerNetwork;
use crate::shared::kept_logs::KeptLogLimits;
use crate::shim_link::ShimCommand;

/// How the roots of containers are made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum RootStore {
    /// Overlays of the image store's layers.
    #[default]
    Overlay,
    /// Snapshots in a BTRFS file system of this size in bytes, where that is possible; half of what is free when it is
    /// made if absent.
    Btrfs(Option<u64>),
}

/// Configuration of a [`super::NativeRuntime`].
#[derive(Debug, Clone)]
pub struct NativeOptions {
    pub instance: Instance,
    /// Where the containers' directories are; used by this instance only.
    pub directory: PathBuf,
    pub images: ImageStore,
    pub roots: RootStore,
    /// Host id of user 0 in files of binds; user `n` is `bind_first_id + n`.
    pub bind_first_id: u32,
    /// The socket of this instance's shim.
    pub socket: PathBuf,
    /// Starts a shim where none answers. Without it, another program must start one.
    pub shim: Option<ShimCommand>,
    pub fence: FenceOpener,
    pub kept_logs: KeptLogLimits,
    /// Of each container.
    pub io: Option<IoLimits>,
    /// Processors that all containers together may use, if the shim limits them.
    pub total_cpus: Option<f64>,
    pub network: ContainerNetwork,
    /// The OCI runtimes that sessions may have.
    pub oci: BTreeMap<RuntimeKind, OciOptions>,
    pub timeouts: NativeTimeouts,
}

/// Bounds on calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NativeTimeouts {
    /// Requests that the shim answers at once.
    pub call: Duration,
    /// A start: it waits for earlier starts, and for a disk.
    pub start: Duration,
}

impl Default for NativeTimeouts {
    fn default() -> Self {
        Self {
            call: Duration::from_secs(10),
            start: Duration::from_secs(30),
        }
    }
}
