//! What the launcher hands to a container's first process.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use conman_linux::{Mount, SessionCgroup};
use conman_shim_protocol::{KERNEL_FILES, LaunchError, LaunchSpec, decode, encode, seqpacket};
use serde::{Deserialize, Serialize};

use super::steps::step;
use super::under_way::last_words;

/// Longest [`Go`], as it is sent: a host has a dozen hierarchies of cgroups.
const GO_BYTES: usize = 256;

/// The order to continue. Its descriptors come along: the overlay, the log, /dev, the log of standard error if it has
/// one, a mount for each file and each bind, the root and the files of a session's kernel if it has one, /sys and a mount for each cgroup in it if the container has them, the
/// file that sets the CPU limit if there is one, and the descriptors for joining the cgroups.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Go {
    /// What to write for the CPU limit.
    pub(super) quota: Option<String>,
    /// The places of the cgroups in /sys.
    pub(super) places: Vec<u8>,
}

impl Go {
    /// Sends it with its descriptors. Those of the cgroup are the last.
    pub(super) fn hand_over<'a>(
        &self,
        socket: &OwnedFd,
        cgroup: &'a SessionCgroup,
        first: [BorrowedFd<'a>; 3],
        rest: impl Iterator<Item = BorrowedFd<'a>>,
    ) -> Result<(), LaunchError> {
        const STEP: &str = "hand over the root";
        let quota = cgroup.cpu_quota().map(|(file, _)| file);
        let fds: Vec<_> = first
            .into_iter()
            .chain(rest)
            .chain(quota)
            .chain(cgroup.entrances())
            .collect();
        let message = encode(self).map_err(|error| step(STEP)(io::Error::other(error)))?;
        seqpacket::send(socket, &message, &fds).map_err(|error| match error.raw_os_error() {
            // It has ended, and may have sent the reason.
            Some(libc::EPIPE | libc::ECONNRESET) => last_words(socket),
            _ => step(STEP)(error),
        })
    }
}

/// The same as it arrives.
#[derive(Debug)]
pub(super) struct Handed {
    pub(super) overlay: Mount,
    pub(super) log: OwnedFd,
    pub(super) log_stderr: Option<OwnedFd>,
    pub(super) dev: Mount,
    pub(super) files: Vec<Mount>,
    pub(super) binds: Vec<Mount>,
    /// The root of a session's kernel, and its files.
    pub(super) kernel: Vec<Mount>,
    pub(super) sys: Option<Mount>,
    /// With the numbers of their places.
    pub(super) cgroups: Vec<(usize, Mount)>,
    /// The file that sets the CPU limit, and what to write.
    pub(super) quota: Option<(OwnedFd, String)>,
    pub(super) entrances: Vec<OwnedFd>,
}

impl Handed {
    /// Waits for it.
    pub(super) fn receive(socket: &OwnedFd, spec: &LaunchSpec) -> Result<Self, LaunchError> {
        let mut buffer = [0_u8; GO_BYTES];
        let received =
            seqpacket::receive(socket, &mut buffer).map_err(step("wait for the root"))?;
        let received = received.ok_or(LaunchError::LauncherDied)?;
        let go: Go = decode(received.bytes).map_err(|_| LaunchError::LauncherDied)?;
        let mut fds = received.fds.into_iter();
        let (Some(overlay), Some(log), Some(dev)) = (fds.next(), fds.next(), fds.next()) else {
            return Err(LaunchError::LauncherDied);
        };
        let log_stderr = spec.log_stderr.as_ref().and_then(|_| fds.next());
        let mut mounts = |count| -> Vec<Mount> {
            let taken = fds.by_ref().take(count);
            taken.map(Mount::from_fd).collect()
        };
        let (files, binds) = (mounts(spec.files.len()), mounts(spec.binds.len()));
        let kernel = match spec.hardening.own_kernel {
            true => mounts(1 + KERNEL_FILES.len()),
            false => Vec::new(),
        };
        let sys = mounts(usize::from(spec.sys)).pop();
        let places = go.places.iter().map(|place| usize::from(*place));
        let cgroups = places.zip(mounts(go.places.len())).collect();
        Ok(Self {
            overlay: Mount::from_fd(overlay),
            log,
            log_stderr,
            dev: Mount::from_fd(dev),
            files,
            binds,
            kernel,
            sys,
            cgroups,
            quota: go.quota.and_then(|text| Some((fds.next()?, text))),
            entrances: fds.collect(),
        })
    }
}
