//! What a container sees of its own cgroups, so that its programs know their limits.
//!
//! `/sys` is a small read-only tree that all containers share. At the places where the host has its hierarchies,
//! `/sys/fs/cgroup` or directories in it, the container's own cgroup of each is mounted: a part of the host's
//! mount, so it costs no superblock, and what lies above it has no path. OpenJDK looks at no limit of a v1 host
//! unless all of its hierarchies are mounted, each with the process's own cgroup as its root. Where a container has
//! no cgroup, one stands in that the launcher is in, so that all containers are born in it: it limits nothing, and
//! shows no process of another container.

use std::ffi::CString;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use conman_linux::{CgroupMaker, Mount, MountAttributes, SessionCgroup};
use conman_shim_protocol::LaunchError;
use rustix::fs::{CWD, Mode, OFlags, openat};

use super::places::{Places, no_programs};

/// The cgroup that stands in, for all conmans of the host.
const STAND_IN: &str = "/conman-view";

/// Below /sys.
const CGROUPS: &str = "fs/cgroup";

/// Read-only above all: some files of v1 may be written by everybody.
pub(super) fn attributes() -> MountAttributes {
    no_programs() | MountAttributes::MOUNT_ATTR_RDONLY
}

/// Where each hierarchy is shown below /sys/fs/cgroup; an empty name is that directory itself.
#[derive(Debug, Default)]
pub(super) struct CgroupView {
    /// In the order of the mounts that are handed to a container.
    places: Vec<String>,
    stand_ins: Vec<(String, PathBuf)>,
}

/// What is handed to one container; empty if it sees nothing of that.
#[derive(Debug, Default)]
pub(super) struct OwnView {
    sys: Option<Mount>,
    /// With the numbers of their places.
    cgroups: Vec<(u8, Mount)>,
}

impl OwnView {
    /// /sys, and the mounts in it.
    pub(super) fn mounts(&self) -> impl Iterator<Item = &Mount> {
        self.sys
            .iter()
            .chain(self.cgroups.iter().map(|(_, mount)| mount))
    }

    /// The numbers of the places.
    pub(super) fn places(&self) -> Vec<u8> {
        self.cgroups.iter().map(|(place, _)| *place).collect()
    }
}

impl CgroupView {
    /// Moves the calling process, which containers are born from, into the cgroups that stand in. A host whose
    /// hierarchies are elsewhere shows none.
    pub(super) fn new(cgroups: &CgroupMaker) -> Self {
        let stand_ins = cgroups.enter_stand_ins(STAND_IN);
        let stand_ins = stand_ins.unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot show all hierarchies of cgroups to containers");
            Vec::new()
        });
        Self {
            places: cgroups.places(),
            stand_ins,
        }
    }

    pub(super) fn places(&self) -> &[String] {
        &self.places
    }

    /// What a container with this cgroup gets. The caller is in the workshop.
    pub(super) fn of(
        &self,
        places: &Places,
        cgroup: &SessionCgroup,
    ) -> Result<OwnView, LaunchError> {
        let own = cgroup.shown();
        let stand_ins = self.stand_ins.iter();
        let stand_ins = stand_ins.map(|(place, directory)| (place.as_str(), directory.as_path()));
        let cgroups = own.chain(stand_ins).filter_map(|(place, directory)| {
            let number = self.places.iter().position(|known| known == place)?;
            let number = u8::try_from(number).ok()?;
            Some(Mount::copy_of(CWD, directory).map(|mount| (number, mount)))
        });
        let made = places.sys().and_then(|sys| {
            Ok(OwnView {
                sys: Some(sys),
                cgroups: cgroups.collect::<io::Result<_>>()?,
            })
        });
        made.map_err(|error| LaunchError::step("make the container's /sys", &error))
    }

    /// Attaches one of the mounts in a container's /sys.
    pub(super) fn attach(&self, sys: &Mount, number: usize, mount: &Mount) -> io::Result<()> {
        let place = self.places.get(number).map_or("", String::as_str);
        let path = CString::new(
            Path::new(CGROUPS)
                .join(place)
                .into_os_string()
                .into_encoded_bytes(),
        )?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let target = openat(sys.as_fd(), &path, flags, Mode::empty())?;
        mount.attach(&target, c"")
    }
}
