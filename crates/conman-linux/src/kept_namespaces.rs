//! Keeps the namespaces of killed processes open.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use rustix::thread::CapabilitySet;

use crate::PidFd;
use crate::privileges::with_effective;

/// `_IO(0xFF, 3)` opens the mount namespace, `_IO(0xFF, 4)` the network namespace (Linux 6.11).
const GET_MOUNTS: libc::c_ulong = 0xFF03;
const GET_NETWORK: libc::c_ulong = 0xFF04;

/// Descriptors that keep the mount and network namespaces of processes. Without them the kernel takes the
/// namespaces down with their last process, which costs more processor time than the death itself.
///
/// Nothing is kept of dead processes, nor by kernels before 6.11.
#[derive(Debug, Default)]
pub struct KeptNamespaces {
    mounts: Vec<OwnedFd>,
    networks: Vec<OwnedFd>,
}

impl KeptNamespaces {
    /// Most descriptors: a part of what a process may have open.
    const MAX: usize = 2_048;

    /// Keeps the namespaces of these processes too, as far as there is room.
    pub fn keep<'a>(&mut self, processes: impl Iterator<Item = &'a PidFd>) {
        let room = (Self::MAX - self.mounts.len() - self.networks.len()) / 2;
        with_effective(CapabilitySet::SYS_PTRACE, || {
            for process in processes.take(room) {
                self.mounts.extend(namespace_of(process, GET_MOUNTS));
                self.networks.extend(namespace_of(process, GET_NETWORK));
            }
        });
    }

    /// Takes out the network namespaces, whose links disappear when they are closed.
    pub fn take_networks(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.networks)
    }
}

#[expect(unsafe_code, reason = "this ioctl has no safe wrapper")]
fn namespace_of(process: &PidFd, request: libc::c_ulong) -> Option<OwnedFd> {
    // SAFETY: the requests take no argument, for which they demand a zero.
    let namespace = unsafe { libc::ioctl(process.as_fd().as_raw_fd(), request, 0) };
    // SAFETY: the kernel has just opened it for this caller.
    (namespace >= 0).then(|| unsafe { OwnedFd::from_raw_fd(namespace) })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt as _;
    use std::process::Command;
    use std::time::Duration;

    use rustix::fs::fstat;

    use super::*;

    #[expect(clippy::print_stdout, reason = "a test that is skipped says so")]
    #[test]
    fn the_namespaces_of_a_killed_process_are_kept() {
        let mut child = Command::new("unshare")
            .args(["--mount", "--net", "sh", "-c", "echo; exec sleep 600"])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("spawned");
        // It has its namespaces once it writes.
        let written = std::io::Read::read(child.stdout.as_mut().expect("piped"), &mut [0]);
        assert_eq!(written.expect("readable"), 1);
        let [mounts, network] = ["mnt", "net"].map(|name| {
            let path = format!("/proc/{}/ns/{name}", child.id());
            fs::metadata(path).expect("it runs").ino()
        });
        let process = PidFd::open(child.id().cast_signed()).expect("it runs");
        let mut kept = KeptNamespaces::default();
        kept.keep(std::iter::once(&process));
        assert!(process.kill().expect("killed"));
        assert!(process.wait_dead(Duration::from_secs(20)).expect("waited"));
        child.wait().expect("reaped");
        if kept.mounts.is_empty() {
            println!("skipped: this kernel opens no namespaces by pidfd (before 6.11)");
            return;
        }
        let inodes = |kept: &[OwnedFd]| -> Vec<u64> {
            let inodes = kept.iter().map(|kept| fstat(kept).expect("open").st_ino);
            inodes.collect()
        };
        kept.keep(std::iter::once(&process));
        assert_eq!(inodes(&kept.mounts), [mounts], "a dead process has none");
        assert_eq!(inodes(&kept.take_networks()), [network]);
        assert_eq!(kept.networks.len(), 0);
    }
}
