//! Keeps the namespaces of killed processes open.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use rustix::thread::CapabilitySet;

use crate::PidFd;
use crate::privileges::with_effective;

/// `_IO(0xFF, 3)` opens the mount namespace, `_IO(0xFF, 4)` the network namespace (Linux 6.11).
const GET_NAMESPACES: [libc::c_ulong; 2] = [0xFF03, 0xFF04];

/// Descriptors that keep the mount and network namespaces of processes. Without them the kernel takes the
/// namespaces down with their last process, which costs more processor time than the death itself.
///
/// Nothing is kept of dead processes, nor by kernels before 6.11.
#[derive(Debug, Default)]
pub struct KeptNamespaces(Vec<OwnedFd>);

impl KeptNamespaces {
    /// Most descriptors: a part of what a process may have open.
    const MAX: usize = 2_048;

    /// Keeps the namespaces of these processes too, as far as there is room.
    pub fn keep<'a>(&mut self, processes: impl Iterator<Item = &'a PidFd>) {
        let room = Self::MAX - self.0.len();
        with_effective(CapabilitySet::SYS_PTRACE, || {
            self.0.extend(processes.flat_map(namespaces_of).take(room));
        });
    }
}

#[expect(unsafe_code, reason = "this ioctl has no safe wrapper")]
fn namespaces_of(process: &PidFd) -> impl Iterator<Item = OwnedFd> {
    let process = process.as_fd().as_raw_fd();
    GET_NAMESPACES.into_iter().filter_map(move |request| {
        // SAFETY: the requests take no argument, for which they demand a zero.
        let namespace = unsafe { libc::ioctl(process, request, 0) };
        // SAFETY: the kernel has just opened it for this caller.
        (namespace >= 0).then(|| unsafe { OwnedFd::from_raw_fd(namespace) })
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
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
        let namespaces = ["mnt", "net"].map(|name| {
            let path = format!("/proc/{}/ns/{name}", child.id());
            fs::metadata(path).expect("it runs").ino()
        });
        let process = PidFd::open(child.id().cast_signed()).expect("it runs");
        let mut kept = KeptNamespaces::default();
        kept.keep(std::iter::once(&process));
        assert!(process.kill().expect("killed"));
        assert!(process.wait_dead(Duration::from_secs(20)).expect("waited"));
        child.wait().expect("reaped");
        if kept.0.is_empty() {
            println!("skipped: this kernel opens no namespaces by pidfd (before 6.11)");
            return;
        }
        let inodes = kept.0.iter().map(|kept| fstat(kept).expect("open").st_ino);
        assert_eq!(inodes.collect::<BTreeSet<_>>(), namespaces.into());
        let before = kept.0.len();
        kept.keep(std::iter::once(&process));
        assert_eq!(kept.0.len(), before, "a dead process has none");
    }
}
