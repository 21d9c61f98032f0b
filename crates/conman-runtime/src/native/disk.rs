//! Limits a container's disk usage: by a project quota if the file system supports them, otherwise by measuring. A
//! snapshot has a quota of BTRFS ([`super::snapshots`]).

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use conman_linux::{DiskUsage, ProjectQuotas, TreeUsage, nameless_usage, tree_usage};
use conman_proto::ResolvedSpec;
use conman_shim_protocol::SESSION_ROOT;

use super::failure::call_failed;
use super::snapshots::Snapshots;
use super::store;
use super::{Inner, away, pausing};
use crate::shared::container_files::host_error;
use crate::shim_link::LinkError;
use crate::{ContainerKey, DiskExcess, PausedBy, RuntimeError};

/// Most descriptors and mappings of one container that are searched for files without a name: a few tenths
/// of a second's work. One with more cannot be measured.
const MAX_LOOKS: usize = 200_000;

impl Inner {
    /// The quota of a container's directory, if it has a limit and the file system has project quotas.
    pub(super) fn disk_quota(&self, spec: &ResolvedSpec) -> Option<DiskUsage> {
        let ResolvedSpec {
            disk_bytes,
            disk_inodes,
            ..
        } = spec;
        let is_limited = self.quotas.is_some() && disk_bytes.or(*disk_inodes).is_some();
        is_limited.then(|| DiskUsage {
            bytes: disk_bytes.unwrap_or_default(),
            inodes: disk_inodes.unwrap_or_default(),
        })
    }

    /// Sets the quota of a container's new directory. If that fails, the container is measured.
    pub(super) fn limit_disk(&self, directory: &Path, quota: Option<DiskUsage>) {
        let (Some(quotas), Some(quota)) = (self.quotas, quota) else {
            return;
        };
        match quotas.limit(directory, quota) {
            Ok(true) => {}
            Ok(false) => {
                tracing::debug!(directory = %directory.display(), "no project id for a quota")
            }
            Err(error) => tracing::warn!(
                directory = %directory.display(), %error,
                "cannot set a project quota; the session's disk usage is measured"
            ),
        }
    }

    /// Freezes the container meanwhile. Without cgroup v2, where a frozen one would not die at once, it runs.
    pub(super) async fn excess_when_frozen(
        self: &Arc<Self>,
        key: &ContainerKey,
        limits: DiskUsage,
    ) -> Result<Option<DiskExcess>, RuntimeError> {
        if !pausing::is_possible() {
            return self.excess_disk_usage(key, limits).await;
        }
        let (inner, own) = (Arc::clone(self), key.clone());
        // A task, so that it is resumed also if the caller gives up.
        let measured = tokio::spawn(async move {
            let _standing = inner.standing.begin(&own);
            // One that does not freeze in time, because it waits for the disk, is measured nevertheless.
            if let Err(error) = inner.hold(&own, PausedBy::IdleTimeout).await {
                tracing::debug!(container = %own, %error, "measuring a session that is not frozen");
            }
            let excess = inner.excess_disk_usage(&own, limits).await;
            inner.resume(&own).await.and(excess)
        });
        let panicked = |_| call_failed("measure", key, LinkError::Unexpected);
        measured.await.map_err(panicked)?
    }

    /// Takes as long as it takes to visit every file of the container.
    pub(super) async fn excess_disk_usage(
        self: &Arc<Self>,
        key: &ContainerKey,
        limits: DiskUsage,
    ) -> Result<Option<DiskExcess>, RuntimeError> {
        let (inner, key) = (Arc::clone(self), key.clone());
        away("measure", move || inner.visit(&key, limits)).await
    }

    fn visit(
        &self,
        key: &ContainerKey,
        limits: DiskUsage,
    ) -> Result<Option<DiskExcess>, RuntimeError> {
        let dir = self.store.container(key);
        let is_snapshot = |snapshots: &Snapshots| snapshots.has(&store::name(key));
        if self.snapshots.as_ref().is_some_and(is_snapshot) {
            return Ok(None);
        }
        let failed = |source| host_error("measure", dir.path(), source);
        let mut excess = None;
        // Twice: a file that is moved during a measurement may count twice.
        for _ in 0..2 {
            match self.disk_usage(key, dir.path(), limits) {
                Ok(None) => return Ok(None),
                Ok(found) => excess = found,
                // It has been removed.
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(excess)
    }

    fn disk_usage(
        &self,
        key: &ContainerKey,
        directory: &Path,
        limits: DiskUsage,
    ) -> io::Result<Option<DiskExcess>> {
        if ProjectQuotas::is_limited(directory)? {
            return Ok(None);
        }
        let TreeUsage { mut usage, steady } = tree_usage(directory, limits.inodes)?;
        if !usage.is_within(limits) {
            return Ok(Some(DiskExcess::Measured(usage)));
        }
        let pids = self.kernel.pids(key)?;
        // Files of an overlay have its device number, or that of the file system below.
        let mut devices = vec![fs::metadata(directory)?.dev()];
        devices.extend(pids.iter().flat_map(|pid| devices_of_roots(*pid)));
        devices.sort_unstable();
        devices.dedup();
        let Some(nameless) = nameless_usage(&pids, &devices, MAX_LOOKS) else {
            return Ok(Some(DiskExcess::Unmeasurable));
        };
        usage += nameless;
        if !usage.is_within(limits) {
            return Ok(Some(DiskExcess::Measured(usage)));
        }
        Ok((!steady).then_some(DiskExcess::Unsteady))
    }
}

/// The devices of a process's root, and of the session's root if the process is of its OCI runtime.
fn devices_of_roots(pid: i32) -> impl Iterator<Item = u64> {
    let root = format!("/proc/{pid}/root");
    // The session may have a link of that name.
    let session = fs::symlink_metadata(format!("{root}{SESSION_ROOT}"));
    let roots = [fs::metadata(root), session];
    roots.into_iter().flatten().map(|found| found.dev())
}
