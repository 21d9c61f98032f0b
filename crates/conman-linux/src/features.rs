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
    /// Layers of an overlay given as descriptors; otherwise by path.
    pub overlay_fd_layers: bool,
    /// Overlay layers whose owners are mapped (5.19). Without them no container has its own range of ids.
    pub mapped_layers: bool,
    /// mount_setattr(2) (5.12), which also maps the owners of other mounts.
    pub mount_attributes: bool,
    /// The unified cgroup hierarchy, alone or with v1.
    pub unified_cgroups: bool,
    /// Processes are created in their cgroup of the unified hierarchy (clone3(2), 5.7); otherwise they join it
    /// before they do anything.
    #[serde(default)]
    pub birth_in_cgroup: bool,
    /// `cgroup.kill` (5.14); otherwise processes are killed one by one.
    pub cgroup_kill: bool,
    /// A non-child's exit status through its pidfd (6.15).
    pub exit_status_by_pidfd: bool,
    /// User namespaces are allowed.
    pub user_namespaces: bool,
}

/// A newer kernel interface, by its field in [`Features`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Interface {
    OverlayFdLayers,
    MappedLayers,
    MountAttributes,
    BirthInCgroup,
    CgroupKill,
    ExitStatusByPidfd,
}

impl Interface {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::OverlayFdLayers,
        Self::MappedLayers,
        Self::MountAttributes,
        Self::BirthInCgroup,
        Self::CgroupKill,
        Self::ExitStatusByPidfd,
    ];

    /// The name in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::OverlayFdLayers => "overlay_fd_layers",
            Self::MappedLayers => "mapped_layers",
            Self::MountAttributes => "mount_attributes",
            Self::BirthInCgroup => "birth_in_cgroup",
            Self::CgroupKill => "cgroup_kill",
            Self::ExitStatusByPidfd => "exit_status_by_pidfd",
        }
    }

    /// The first kernel that has it.
    #[must_use]
    pub fn since(self) -> &'static str {
        match self {
            Self::OverlayFdLayers => "6.13",
            Self::MappedLayers => "5.19",
            Self::MountAttributes => "5.12",
            Self::BirthInCgroup => "5.7",
            Self::CgroupKill => "5.14",
            Self::ExitStatusByPidfd => "6.15",
        }
    }

    /// What happens without it.
    #[must_use]
    pub fn without(self) -> &'static str {
        match self {
            Self::OverlayFdLayers => {
                "roots are mounted in the launcher's namespace for a moment, by the numbers of \
                 their layers' descriptors"
            }
            Self::MappedLayers => {
                "all containers share one unprivileged range of ids, so that limits by user are \
                 theirs together and file capabilities of images have no effect"
            }
            Self::MountAttributes => {
                "owners of binds are not mapped, so a writable bind is refused unless the host mounts \
                 its file system nosuid"
            }
            Self::BirthInCgroup => "a process joins its cgroup before its program runs",
            Self::CgroupKill => "the processes of a cgroup are killed one by one",
            Self::ExitStatusByPidfd => {
                "the exit status of a container whose shim has died is unknown"
            }
        }
    }

    /// Returns the interface with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.name() == name)
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
        match interface {
            Interface::OverlayFdLayers => self.overlay_fd_layers,
            Interface::MappedLayers => self.mapped_layers,
            Interface::MountAttributes => self.mount_attributes,
            Interface::BirthInCgroup => self.birth_in_cgroup,
            Interface::CgroupKill => self.cgroup_kill,
            Interface::ExitStatusByPidfd => self.exit_status_by_pidfd,
        }
    }

    /// The missing interfaces.
    pub fn lacking(&self) -> impl Iterator<Item = Interface> {
        Interface::ALL.into_iter().filter(|one| !self.has(*one))
    }

    /// The same host, as if its kernel lacked these; for testing the fallbacks.
    #[must_use]
    pub fn without(mut self, lacking: &[Interface]) -> Self {
        for interface in lacking {
            match interface {
                Interface::OverlayFdLayers => self.overlay_fd_layers = false,
                Interface::MappedLayers => self.mapped_layers = false,
                Interface::MountAttributes => {
                    // The same call maps owners.
                    self.mount_attributes = false;
                    self.mapped_layers = false;
                }
                Interface::BirthInCgroup => self.birth_in_cgroup = false,
                Interface::CgroupKill => self.cgroup_kill = false,
                Interface::ExitStatusByPidfd => self.exit_status_by_pidfd = false,
            }
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
        Ok(Self {
            overlay_fd_layers: overlay_takes_descriptors().unwrap_or(false),
            mapped_layers: mount_attributes && version >= (5, 19),
            mount_attributes,
            unified_cgroups,
            birth_in_cgroup: unified_cgroups && version >= (5, 7),
            cgroup_kill: unified_cgroups && version >= (5, 14),
            exit_status_by_pidfd: version >= (6, 15),
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
    fn a_release_is_compared_by_its_numbers() {
        assert_eq!(kernel_version("6.18.44-fc-v595"), (6, 18));
        assert_eq!(kernel_version("5.4.0"), (5, 4));
        assert!(kernel_version("5.10.0-28-amd64") < (5, 19));
        assert_eq!(kernel_version("strange"), (0, 0));
    }
}
