//! Maps the owners of binds: host id `first_id + n` is id `n` inside the container.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use conman_linux::{CloneOptions, Mount, Namespaces, SoleThread, clone_process, reap};
use conman_shim_protocol::{BindSpec, LaunchError, seqpacket};

use super::launch::map_ids;

/// Maps the owners of one container's binds.
pub(super) struct BindOwners<'a> {
    pub(super) sole: &'a SoleThread,
    /// Whether the kernel maps owners at all (Linux 5.12).
    pub(super) supported: bool,
    /// The container's user namespace.
    pub(super) container: BorrowedFd<'a>,
    /// The container's first id on the host.
    pub(super) ids: u32,
    /// The last namespace made, by its `first_id`.
    pub(super) namespace: Option<(u32, File)>,
}

impl BindOwners<'_> {
    /// Maps the owners of one bind.
    ///
    /// Where the kernel or the file system cannot, a writable bind is refused unless the host mounts its
    /// file system `nosuid`: otherwise a set-user-id file that the container makes could be run on the
    /// host. Without a mapping the container sees the host's ids as the overflow user.
    pub(super) fn map(&mut self, fd: OwnedFd, bind: &BindSpec) -> Result<Mount, LaunchError> {
        let mount = Mount::from_fd(fd);
        let step = |error: &io::Error| {
            LaunchError::step(&format!("prepare the bind at {}", bind.target), error)
        };
        let mapped = if !self.supported {
            Err(io::ErrorKind::Unsupported.into())
        } else if bind.first_id == 0 {
            mount.map_owners(self.container)
        } else {
            mount.map_owners(self.namespace(bind.first_id)?)
        };
        let Err(error) = mapped else {
            return Ok(mount);
        };
        if bind.read_only || mount.is_nosuid().map_err(|error| step(&error))? {
            return Ok(mount);
        }
        Err(LaunchError::Step {
            step: format!("map the owners of files in the bind at {}", bind.target),
            errno: error.raw_os_error().unwrap_or(0),
            reason: format!(
                "{error}. Its file system or this kernel cannot map owners: mount the file system \
                 nosuid on the host, make the bind read-only, or use another file system"
            ),
        })
    }

    /// A user namespace in which the container's ids on the host stand for those from `first_id`.
    fn namespace(&mut self, first_id: u32) -> Result<BorrowedFd<'_>, LaunchError> {
        let namespace = match self.namespace.take() {
            Some((known, namespace)) if known == first_id => namespace,
            _ => make_namespace(self.sole, first_id, self.ids)?,
        };
        Ok(self.namespace.insert((first_id, namespace)).1.as_fd())
    }
}

/// A user namespace exists only with a process or a descriptor. So a process lives until the namespace
/// is open.
fn make_namespace(sole: &SoleThread, first_id: u32, ids: u32) -> Result<File, LaunchError> {
    let step = |error: io::Error| LaunchError::step("make a user namespace for binds", &error);
    let (ours, theirs) = seqpacket::pair().map_err(step)?;
    let options = CloneOptions {
        namespaces: Some(Namespaces::NEWUSER),
        keep_only: Some(&[theirs.as_fd()]),
        ..CloneOptions::default()
    };
    let holder = clone_process(sole, &options, || {
        // Ends when the launcher closes its end of the socket, or dies.
        let _ = rustix::net::recv(&theirs, &mut [0_u8; 1][..], rustix::net::RecvFlags::empty());
        0
    });
    let holder = holder.map_err(step)?;
    let namespace = map_ids(&holder, first_id, ids);
    drop((ours, theirs));
    reap(&holder).map_err(step)?;
    namespace
}
