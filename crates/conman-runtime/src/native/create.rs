//! Creates a container: its directories, and the start order for the shim.

use std::path::Path;

use conman_core::naming::{self, CgroupDriver};
use conman_image::ImageGuard;
use conman_proto::{ResolvedSpec, RuntimeKind};
use conman_shim_protocol::{Ahead, BindSpec, Hardening, LaunchSpec, RootKind, RootSpec};

use super::Inner;
use super::ahead::StartKind;
use super::attach::shim_size;
use super::failure::refused;
use super::link::network_spec;
use super::program;
use super::store::{self, StoredPlan};
use crate::shared::container_files::{ContainerFiles, OWN_FILES, contents};
use crate::shared::container_network::StoredLink;
use crate::{ContainerKey, ContainerPlan, RuntimeError, TERMINAL_SIZE};

/// `fs.file-max` at present; without it nothing is known to bound them.
fn host_open_files() -> u64 {
    let text = std::fs::read_to_string("/proc/sys/fs/file-max").unwrap_or_default();
    text.trim().parse().unwrap_or(u64::MAX)
}

impl Inner {
    pub(super) fn create(&self, plan: &ContainerPlan) -> Result<String, RuntimeError> {
        let key = &plan.key;
        let image = self.images.pin(&key.to_string(), &plan.spec.image)?;
        let link = self.network.take(key, &plan.spec)?;
        let created = self.create_with(plan, image, link.clone());
        if let (Err(_), Some(link)) = (&created, link) {
            self.network.give_back(key, &link);
        }
        created
    }

    fn create_with(
        &self,
        plan: &ContainerPlan,
        image: ImageGuard,
        link: Option<StoredLink>,
    ) -> Result<String, RuntimeError> {
        let key = &plan.key;
        let dir = self.store.container(key);
        let mut stored = self.order(plan, image.image(), &dir, link)?;
        let quota = self.disk_quota(&plan.spec);
        let ahead = self.can_be_made_ahead(&plan.spec).then(|| StartKind {
            spec: stored.launch.kind(),
            quota,
            image: image.image().id,
        });
        let cgroup = &stored.launch.cgroup;
        if let Some(name) =
            ahead.and_then(|kind| self.pool.take(&plan.spec, kind, cgroup, dir.path()))
        {
            stored.launch.ahead = Ahead::Take { name };
            if let Some(cgroup) = stored.launch.cgroup_of_taken() {
                self.kernel.may_take(key, cgroup);
            }
        } else if dir.make()? {
            self.limit_disk(dir.path(), quota);
        } else {
            return Err(RuntimeError::Exists {
                subject: key.to_string(),
            });
        }
        // Empty: the files are in the order. While the directory exists, the container may start.
        let files = ContainerFiles::at(&plan.files_dir);
        let made = self.make_root(&stored, plan, image.image());
        let made = made.and_then(|()| files.make());
        if let Err(error) = made.and_then(|()| dir.write(&stored)) {
            self.remove_root(key);
            for taken_back in [files.remove(), self.store.discard(&dir)] {
                if let Err(error) = taken_back {
                    tracing::warn!(container = %key, %error, "cannot clean up a failed create");
                }
            }
            if let Ahead::Take { name } = stored.launch.ahead {
                self.kernel.forget(key);
                self.pool.drop_one(name);
            }
            return Err(error);
        }
        self.images.hold(key, image);
        if let Some((kind, _)) = stored.session_program {
            self.lock_with_runtime().insert(key.clone(), kind);
        }
        Ok(self.container_id(key))
    }

    /// An OCI runtime has no system call filter, and could make subvolumes. Nothing in the snapshots'
    /// file system waits until it is on the disk.
    pub(super) fn root_kind(&self, spec: &ResolvedSpec) -> RootKind {
        match spec.runtime {
            RuntimeKind::Native if self.snapshots.is_some() && !spec.durable => RootKind::Snapshot,
            RuntimeKind::Native
            | RuntimeKind::Gvisor
            | RuntimeKind::Oci(_)
            | RuntimeKind::Docker
            | RuntimeKind::Process => RootKind::Overlay,
        }
    }

    fn make_root(
        &self,
        stored: &StoredPlan,
        plan: &ContainerPlan,
        image: &conman_image::Image,
    ) -> Result<(), RuntimeError> {
        match (stored.launch.root.kind, &self.snapshots) {
            (RootKind::Snapshot, Some(snapshots)) => {
                let store = self.images.store().directory();
                let base = self.images.base().map(|base| store.join(base));
                let limit = plan.spec.disk_bytes;
                snapshots.make(&stored.launch.name, image, base.as_deref(), limit)
            }
            // The launcher makes it.
            (RootKind::Overlay, _) | (RootKind::Snapshot, None) => Ok(()),
        }
    }

    /// Removes the container's root if it is a snapshot.
    pub(super) fn remove_root(&self, key: &ContainerKey) {
        if let Some(snapshots) = &self.snapshots {
            snapshots.destroy(&store::name(key));
        }
    }

    /// The start order for the shim.
    fn order(
        &self,
        plan: &ContainerPlan,
        image: &conman_image::Image,
        dir: &store::ContainerDir,
        link: Option<StoredLink>,
    ) -> Result<StoredPlan, RuntimeError> {
        let key = &plan.key;
        let layers = image.lower_directories();
        let store = self.images.store().directory();
        let below = |layer: &&Path| layer.strip_prefix(store).map(Path::to_owned);
        let below: Result<Vec<_>, _> = layers.iter().map(below).collect();
        let mut below = below.map_err(|error| refused("create", key, error.to_string()))?;
        below.extend(self.images.base().map(Path::to_owned));
        let paths = OWN_FILES.map(|(_, target)| target.to_owned());
        let files = paths
            .into_iter()
            .zip(contents(key, &self.network.name_servers(&plan.spec)))
            .collect();
        let asked = plan.binds.iter().map(|bind| {
            let spec = BindSpec {
                target: bind.target.clone(),
                read_only: bind.read_only,
                first_id: self.bind_first_id,
            };
            ((bind.root.clone(), bind.below.clone()), spec)
        });
        let (sources, binds) = asked.unzip();
        let open_files = host_open_files();
        let program = program::first_program(key, &plan.spec, &image.config, &layers, open_files)?;
        let driver = CgroupDriver::Cgroupfs;
        let instance = self.kernel.instance();
        let mut launch = LaunchSpec {
            terminal: plan.spec.tty.then(|| shim_size(TERMINAL_SIZE)),
            log_bytes: None,
            ptys: plan.spec.ptys,
            ptys_when_asked: plan.spec.ptys_when_asked,
            sys: plan.spec.sys,
            init: plan.spec.has_own_init(),
            name: store::name(key),
            cgroup: naming::cgroup_parent(instance, &key.session, key.generation, driver).path,
            limits: program::limits(&plan.spec, self.io),
            root: RootSpec {
                kind: self.root_kind(&plan.spec),
                store: store.to_owned(),
                layers: below,
                scratch: dir.root(),
                read_only: false,
                durable: plan.spec.durable,
                shared_ids: self.images.store().first_id() != 0,
            },
            hostname: key.session.to_string(),
            program,
            log: dir.log(),
            log_stderr: plan.spec.log_streams.then(|| dir.log_stderr()),
            files,
            binds,
            network: network_spec(link.as_ref()),
            hardening: Hardening {
                own_filters: plan.spec.own_filters,
                without_ipc: plan.spec.without_ipc,
                no_new_privileges: !plan.spec.new_privs,
                ..Hardening::default()
            },
            ahead: Ahead::No,
        };
        let (session_program, late_cpu_millis) = match plan.spec.runtime {
            RuntimeKind::Native | RuntimeKind::Docker | RuntimeKind::Process => (None, None),
            kind @ (RuntimeKind::Gvisor | RuntimeKind::Oci(_)) => {
                let (program, cpu_millis) = self.oci(kind)?.wrap(&mut launch);
                (Some((kind, program)), cpu_millis)
            }
        };
        Ok(StoredPlan {
            launch,
            sources,
            files_dir: plan.files_dir.clone(),
            image: image.id,
            link,
            session_program,
            late_cpu_millis,
        })
    }
}
