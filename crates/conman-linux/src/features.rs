//! Detects newer kernel interfaces.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::mounts::{Mount, NewFilesystem};

/// Which newer kernel interfaces this host has. Each is optional ([`Interface::without`]); the minimum
/// kernel is [`Features::FLOOR`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Features {
    /// `uname -r`.
    pub release: String,
    pub present: BTreeSet<Interface>,
    /// The unified cgroup hierarchy, alone or with v1.
    pub unified_cgroups: bool,
    /// User namespaces are allowed.
    pub user_namespaces: bool,
}

/// A newer kernel interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Interface {
    /// Layers of an overlay given as descriptors; otherwise by path.
    OverlayFdLayers,
    /// Overlay layers whose owners are mapped. Without them no container has its own range of ids.
    MappedLayers,
    /// mount_setattr(2), which also maps the owners of other mounts.
    MountAttributes,
    /// `cgroup.kill`; otherwise processes are killed one by one.
    CgroupKill,
    /// A non-child's exit status through its pidfd.
    ExitStatusByPidfd,
    /// One that only a later conman knows, which greets as the shim.
    #[serde(other)]
    Unknown,
}

impl Interface {
    /// All that this conman knows.
    pub const ALL: [Self; 5] = [
        Self::OverlayFdLayers,
        Self::MappedLayers,
        Self::MountAttributes,
        Self::CgroupKill,
        Self::ExitStatusByPidfd,
    ];

    /// The name in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.facts().0
    }

    /// The first kernel that has it.
    #[must_use]
    pub fn since(self) -> &'static str {
        self.facts().1
    }

    /// What happens without it.
    #[must_use]
    pub fn without(self) -> &'static str {
        self.facts().2
    }

    /// Returns the interface with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.name() == name)
    }

    /// Its name, the first kernel that has it, and what happens without it.
    fn facts(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::OverlayFdLayers => (
                "overlay_fd_layers",
                "6.13",
                "roots are mounted in the launcher's namespace for a moment, by the numbers of \
                 their layers' descriptors",
            ),
            Self::MappedLayers => (
                "mapped_layers",
                "5.19",
                "all containers share one unprivileged range of ids, so that limits by user are \
                 theirs together and file capabilities of images have no effect",
            ),
            Self::MountAttributes => (
                "mount_attributes",
                "5.12",
                "owners of binds are not mapped, so a writable bind is refused unless the host mounts \
                 its file system nosuid",
            ),
            Self::CgroupKill => (
                "cgroup_kill",
                "5.14",
                "the processes of a cgroup are killed one by one",
            ),
            Self::ExitStatusByPidfd => (
                "exit_status_by_pidfd",
                "6.15",
                "the exit status of a container whose shim has died is unknown",
            ),
            Self::Unknown => ("unknown", "?", "unknown"),
        }
    }
}

impl Features {
    /// The minimum kernel: overlays are volatile from 5.10 on.
    pub const FLOOR: (u32, u32) = (5, 10);

    /// Whether the kernel is [`Self::FLOOR`] or later.
    #[must_use]
    pub fn reaches_floor(&self) -> bool {
        kernel_version(&self.release) >= Self::FLOOR
    }

    /// Whether this interface is present.
    #[must_use]
    pub fn has(&self, interface: Interface) -> bool {
        self.present.contains(&interface)
    }

    /// The same host, as if its kernel lacked these; for testing the fallbacks.
    #[must_use]
    pub fn without(mut self, lacking: &[Interface]) -> Self {
        self.present.retain(|one| !lacking.contains(one));
        if !self.has(Interface::MountAttributes) {
            // The same call maps owners.
            self.present.remove(&Interface::MappedLayers);
        }
        self
    }

    /// Probes the kernel. Leaves nothing behind; needs root for most answers.
    pub fn probe() -> io::Result<Self> {
        let release = rustix::system::uname()
            .release()
            .to_string_lossy()
            .into_owned();
        let version = kernel_version(&release);
        let cgroups = crate::Cgroups::detect();
        let unified_cgroups = cgroups.as_ref().is_ok_and(crate::Cgroups::has_unified);
        let mount_attributes = Mount::copy_of(rustix::fs::CWD, Path::new("/"))
            .and_then(|copy| copy.set_attributes(crate::MountAttributes::MOUNT_ATTR_RDONLY))
            .is_ok();
        let is_present = |one: &Interface| match one {
            Interface::OverlayFdLayers => overlay_takes_descriptors().unwrap_or(false),
            Interface::MappedLayers => mount_attributes && version >= (5, 19),
            Interface::MountAttributes => mount_attributes,
            Interface::CgroupKill => unified_cgroups && version >= (5, 14),
            Interface::ExitStatusByPidfd => version >= (6, 15),
            Interface::Unknown => false,
        };
        Ok(Self {
            present: Interface::ALL.into_iter().filter(is_present).collect(),
            unified_cgroups,
            user_namespaces: std::fs::read_to_string("/proc/sys/user/max_user_namespaces")
                .is_ok_and(|text| text.trim() != "0"),
            release,
        })
    }
}

fn overlay_takes_descriptors() -> io::Result<bool> {
    let directory = std::fs::File::open("/")?;
    let overlay = NewFilesystem::open("overlay")?;
    Ok(overlay.set_fd("lowerdir+", directory.as_fd()).is_ok())
}

/// The first two numbers of a release; (0, 0) when it has none.
fn kernel_version(release: &str) -> (u32, u32) {
    let mut numbers = release
        .split(|letter: char| !letter.is_ascii_digit())
        .map_while(|part| part.parse().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_of_a_later_conman_do_not_hide_the_known_ones() {
        let text = r#"{"release": "9.9", "present": ["cgroup_kill", "of_a_later_conman"],
            "unified_cgroups": true, "user_namespaces": true}"#;
        let features: Features = serde_json::from_str(text).expect("read");
        assert!(features.has(Interface::CgroupKill) && !features.has(Interface::MappedLayers));
    }

    #[test]
    fn a_release_is_compared_by_its_numbers() {
        assert_eq!(kernel_version("6.18.44-fc-v595"), (6, 18));
        assert_eq!(kernel_version("5.4.0"), (5, 4));
        assert!(kernel_version("5.10.0-28-amd64") < (5, 19));
        assert_eq!(kernel_version("strange"), (0, 0));
    }
}
