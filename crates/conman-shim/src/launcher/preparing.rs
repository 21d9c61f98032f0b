//! Prepares the kernel for many containers.
//!
//! Every memory cgroup holds an array with an entry for each superblock. When there are more superblocks
//! than ever before since the boot, the kernel enlarges every array on the host, every 64th time: with
//! ten thousand containers that is more than half of the cost of their starts. So as many superblocks as
//! they will need are created at once, while there are few cgroups, and removed again; the arrays stay
//! long.
//!
//! The cost: every memory cgroup takes from the beginning the memory that it would take in the end, 16
//! bytes for each superblock.

use std::fs::create_dir;
use std::io;
use std::path::Path;

use conman_fence::ShimOptions;
use conman_linux::{
    CloneOptions, Namespaces, PidFd, SoleThread, boot_id, clone_process, reap_if_dead, replace_file,
};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};

use super::places::{BENCH, new_tmpfs};

/// Superblocks of a container: its overlay, its procfs, its message queues (an IPC namespace's), its
/// terminals.
const SUPERBLOCKS: u32 = 4;

/// Additional ones, for other mounts of the host.
const SPARE: u32 = 2_048;

/// Maximum; the kernel allows 100,000 mounts in a namespace (fs.mount-max).
const MOST: u32 = 90_000;

/// The preparing process, until it has finished.
#[derive(Debug, Default)]
pub(super) struct Preparing {
    process: Option<PidFd>,
}

impl Preparing {
    /// Begins, unless it has been done since the boot. A failure only makes starts slower.
    pub(super) fn begin(sole: &SoleThread, options: &ShimOptions) -> Self {
        let wanted = match options.prepare_for {
            0 => 0,
            count => count
                .saturating_mul(SUPERBLOCKS)
                .saturating_add(SPARE)
                .min(MOST),
        };
        let boot = boot_id().unwrap_or_default();
        let mark = format!("{boot} {wanted}\n");
        let file = &options.prepared_file;
        if wanted == 0 || prepared(file, &boot) >= wanted {
            return Self::default();
        }
        let how = CloneOptions {
            namespaces: Some(Namespaces::NEWNS),
            keep_only: Some(&[]),
            ..CloneOptions::default()
        };
        let work = || match make_superblocks(wanted) {
            Ok(()) => 0,
            Err(error) => {
                tracing::warn!(%error, "cannot prepare the kernel for many containers");
                1
            }
        };
        let process = clone_process(sole, &how, work);
        // Recorded first: an attempt that runs out of memory must not be repeated.
        if let Err(error) = replace_file(file, mark.as_bytes()) {
            tracing::warn!(
                file = %file.display(),
                %error,
                "cannot record that the kernel is prepared"
            );
        }
        Self {
            process: process.ok(),
        }
    }

    /// Reaps the process when it has ended.
    pub(super) fn look(&mut self) {
        if let Some(process) = &self.process
            && let Ok(true) = process.is_dead()
        {
            let _ = reap_if_dead(process);
            self.process = None;
        }
    }
}

/// The number of superblocks for which the kernel has been prepared since this boot.
fn prepared(file: &Path, boot: &str) -> u32 {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    text.split_once(' ')
        .filter(|(noted, _)| *noted == boot)
        .and_then(|(_, count)| count.trim().parse().ok())
        .unwrap_or(0)
}

/// They are removed with the mount namespace of the calling process.
fn make_superblocks(count: u32) -> io::Result<()> {
    mount_change(
        "/",
        MountPropagationFlags::PRIVATE | MountPropagationFlags::REC,
    )?;
    new_tmpfs(BENCH)?;
    for number in 0..count {
        let directory = Path::new(BENCH).join(number.to_string());
        create_dir(&directory)?;
        mount("none", &directory, "ramfs", MountFlags::empty(), None)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_note_is_roots_alone_even_where_anybody_could_write_it() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("prepared");
        std::fs::write(&file, "old").expect("written");
        let shared = std::fs::Permissions::from_mode(0o666);
        std::fs::set_permissions(&file, shared).expect("set");
        replace_file(&file, b"boot 7\n").expect("noted");
        assert_eq!(prepared(&file, "boot"), 7);
        let mode = std::fs::metadata(&file).expect("it is there").permissions();
        assert_eq!(mode.mode() & 0o7777, 0o600);
    }

    #[test]
    fn a_note_counts_for_its_boot_alone() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("prepared");
        assert_eq!(prepared(&file, "boot"), 0);
        for (text, count) in [("boot 32048\n", 32_048), ("else 9\n", 0), ("boot x\n", 0)] {
            std::fs::write(&file, text).expect("written");
            assert_eq!(prepared(&file, "boot"), count, "{text}");
        }
    }
}
