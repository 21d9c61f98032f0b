//! What the launcher hands to a container's first process.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use conman_linux::{Mount, SessionCgroup};
use conman_shim_protocol::{LaunchError, LaunchSpec, NetworkSpec, decode, encode, seqpacket};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::steps::step;
use super::under_way::last_words;

/// Longest [`Go`], as it is sent: a host has a dozen hierarchies of cgroups.
const GO_BYTES: usize = 256;

/// The first message: what all containers of a kind have. Its descriptors come along: the overlay, /dev, the root and
/// the root and the files of an OCI runtime if it has one, /sys and a mount for each cgroup in it if the container has them, and
/// the descriptors for joining the cgroups.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Go {
    /// The places of the cgroups in /sys.
    pub(super) places: Vec<u8>,
}

impl Go {
    /// Sends it with its descriptors. Those of the cgroup are the last.
    pub(super) fn hand_over<'a>(
        &self,
        socket: &OwnedFd,
        cgroup: &'a SessionCgroup,
        first: impl Iterator<Item = BorrowedFd<'a>>,
    ) -> Result<(), LaunchError> {
        let fds: Vec<_> = first.chain(cgroup.entrances()).collect();
        send(socket, self, &fds, "hand over the root")
    }
}

/// The same as it arrives.
#[derive(Debug)]
pub(super) struct Handed {
    pub(super) overlay: Mount,
    pub(super) dev: Mount,
    /// The root of an OCI runtime, and its files.
    pub(super) runtime: Vec<Mount>,
    pub(super) sys: Option<Mount>,
    /// With the numbers of their places.
    pub(super) cgroups: Vec<(usize, Mount)>,
    pub(super) entrances: Vec<OwnedFd>,
}

impl Handed {
    /// Waits for it.
    pub(super) fn receive(socket: &OwnedFd, spec: &LaunchSpec) -> Result<Self, LaunchError> {
        let mut buffer = [0_u8; GO_BYTES];
        let (go, fds): (Go, _) = receive(socket, &mut buffer, "wait for the root")?;
        let mut fds = fds.into_iter();
        let mut mounts = |count| -> Vec<Mount> {
            let taken = fds.by_ref().take(count);
            taken.map(Mount::from_fd).collect()
        };
        let (Some(overlay), Some(dev)) = (mounts(1).pop(), mounts(1).pop()) else {
            return Err(LaunchError::LauncherDied);
        };
        let runtime = match spec.hardening.has_runtime() {
            true => mounts(1 + spec.hardening.runtime_files.len()),
            false => Vec::new(),
        };
        let sys = mounts(usize::from(spec.sys)).pop();
        let places = go.places.iter().map(|place| usize::from(*place));
        let cgroups = places.zip(mounts(go.places.len())).collect();
        Ok(Self {
            overlay,
            dev,
            runtime,
            sys,
            cgroups,
            entrances: fds.collect(),
        })
    }
}

/// The second message: what one start has. Its descriptors come along: the log, the log of standard error if it has
/// one, a mount for each file and each bind, the socket for a link that was not there before, and the file that sets
/// the CPU limit if there is one.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Finish {
    /// What to write for the CPU limit.
    pub(super) quota: Option<String>,
    /// The start's spec, for a container made ahead.
    pub(super) spec: Option<Box<LaunchSpec>>,
}

impl Finish {
    pub(super) fn hand_over(
        &self,
        socket: &OwnedFd,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), LaunchError> {
        send(socket, self, fds, "hand over the files")
    }
}

/// The same as it arrives.
#[derive(Debug)]
pub(super) struct Finishing {
    pub(super) spec: Option<Box<LaunchSpec>>,
    pub(super) log: OwnedFd,
    pub(super) log_stderr: Option<OwnedFd>,
    pub(super) files: Vec<Mount>,
    pub(super) binds: Vec<Mount>,
    /// Of a container made ahead.
    pub(super) link: Option<OwnedFd>,
    /// The file that sets the CPU limit, and what to write.
    pub(super) quota: Option<(OwnedFd, String)>,
}

impl Finishing {
    /// Waits for it. `spec` is the one that the container was made with.
    pub(super) fn receive(socket: &OwnedFd, spec: &LaunchSpec) -> Result<Self, LaunchError> {
        let mut buffer = seqpacket::buffer();
        let (finish, fds): (Finish, _) = receive(socket, &mut buffer, "wait for the files")?;
        let is_linked = finish.spec.is_some() && spec.network == NetworkSpec::Linked;
        let spec = finish.spec.as_deref().unwrap_or(spec);
        let mut fds = fds.into_iter();
        let log = fds.next().ok_or(LaunchError::LauncherDied)?;
        let log_stderr = spec.log_stderr.as_ref().and_then(|_| fds.next());
        let mut mounts = |count| -> Vec<Mount> {
            let taken = fds.by_ref().take(count);
            taken.map(Mount::from_fd).collect()
        };
        let (files, binds) = (mounts(spec.files.len()), mounts(spec.binds.len()));
        let link = is_linked.then(|| fds.next()).flatten();
        Ok(Self {
            log,
            log_stderr,
            files,
            binds,
            link,
            quota: finish.quota.and_then(|text| Some((fds.next()?, text))),
            spec: finish.spec,
        })
    }
}

fn send(
    socket: &OwnedFd,
    message: &impl Serialize,
    fds: &[BorrowedFd<'_>],
    name: &'static str,
) -> Result<(), LaunchError> {
    let message = encode(message).map_err(|error| step(name)(io::Error::other(error)))?;
    seqpacket::send(socket, &message, fds).map_err(|error| match error.raw_os_error() {
        // It has ended, and may have sent the reason.
        Some(libc::EPIPE | libc::ECONNRESET) => last_words(socket),
        _ => step(name)(error),
    })
}

fn receive<T: DeserializeOwned>(
    socket: &OwnedFd,
    buffer: &mut [u8],
    name: &'static str,
) -> Result<(T, Vec<OwnedFd>), LaunchError> {
    let received = seqpacket::receive(socket, buffer).map_err(step(name))?;
    let received = received.ok_or(LaunchError::LauncherDied)?;
    let message = decode(received.bytes).map_err(|_| LaunchError::LauncherDied)?;
    Ok((message, received.fds))
}
