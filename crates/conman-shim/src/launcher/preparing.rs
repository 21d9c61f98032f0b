//! Prepares the kernel for many containers.
//!
//! Every memory cgroup holds an array over all superblocks, as long as there were ever superblocks at once
//! since the boot. One that exceeds this number makes the kernel enlarge every array on the host, every 64th
//! time: with ten thousand containers that is more than half of the cost of their starts. So superblocks are
//! created before they are needed, and removed again; the arrays stay long.
//!
//! The cost: every memory cgroup of the host takes the memory of a whole array, 16 bytes for each superblock, and
//! only a boot shortens it. So the number follows the use: [`STEP`] in the beginning, and a quarter more than are
//! used whenever an eighth is left.

use std::fs::create_dir;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use conman_fence::ShimOptions;
use conman_linux::{
    CloneOptions, Namespaces, PidFd, SoleThread, boot_id, clone_process, reap_if_dead, replace_file,
};
use rustix::event::{Timespec, poll};
use rustix::fs::{minor, stat};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};

use super::places::{BENCH, new_tmpfs};

/// Superblocks of a container: its overlay, its procfs, its message queues (an IPC namespace's), its
/// terminals.
const SUPERBLOCKS: u32 = 4;

/// Superblocks of the host and of two hundred containers. The kernel is prepared for them in the beginning, and for
/// as many beyond each part of those that are used.
const STEP: u32 = 1_024;

/// Maximum; the kernel allows 100,000 mounts in a namespace (fs.mount-max).
const MOST: u32 = 90_000;

/// The kernel enlarges the arrays for so many at a time.
const BATCH: u32 = 64;

/// A batch is followed by a rest of this multiple of its time. Starts wait while the kernel enlarges all arrays, and
/// it frees the former ones a moment later.
const REST: u32 = 4;

/// Keeps the kernel prepared.
#[derive(Debug)]
pub(super) struct Preparing {
    /// Where all shims of the host record for how many superblocks the kernel is prepared since the boot.
    file: PathBuf,
    boot: String,
    /// Maximum for this shim; 0 disables the preparation.
    most: u32,
    /// As last known.
    prepared: u32,
    /// The preparing process, until it has finished.
    process: Option<PidFd>,
}

impl Preparing {
    pub(super) fn new(options: &ShimOptions) -> Self {
        let most = match options.prepare_for {
            0 => 0,
            count => count.saturating_mul(SUPERBLOCKS).saturating_add(STEP),
        };
        Self {
            file: options.prepared_file.clone(),
            boot: boot_id().unwrap_or_default(),
            most: most.min(MOST),
            prepared: 0,
            process: None,
        }
    }

    /// Prepares for more if there are few left beyond `used`. A failure only makes starts slower.
    pub(super) fn follow(&mut self, sole: &SoleThread, used: u32) {
        if let Some(process) = &self.process {
            if let Ok(true) = process.is_dead() {
                let _ = reap_if_dead(process);
                self.process = None;
            }
            return;
        }
        let Some(wanted) = wanted(used, self.prepared, self.most) else {
            return;
        };
        // Another shim may have done it.
        self.prepared = self.prepared.max(prepared(&self.file, &self.boot));
        if self.prepared < wanted {
            self.begin(sole, wanted);
        }
    }

    fn begin(&mut self, sole: &SoleThread, wanted: u32) {
        let how = CloneOptions {
            namespaces: Some(Namespaces::NEWNS),
            keep_only: Some(&[]),
            ..CloneOptions::default()
        };
        let work = || match make_superblocks(wanted) {
            Ok(()) => 0,
            Err(error) => {
                tracing::warn!(wanted, %error, "cannot prepare the kernel for more containers");
                1
            }
        };
        self.process = clone_process(sole, &how, work).ok();
        // An attempt that runs out of memory must not be repeated.
        self.prepared = wanted;
        let mark = format!("{} {wanted}\n", self.boot);
        if let Err(error) = replace_file(&self.file, mark.as_bytes()) {
            tracing::warn!(
                file = %self.file.display(),
                %error,
                "cannot record that the kernel is prepared"
            );
        }
    }
}

/// The number of superblocks to prepare for; `None` if enough are left.
fn wanted(used: u32, prepared: u32, most: u32) -> Option<u32> {
    let left = prepared.saturating_sub(used);
    let few = (used / 8).max(STEP / 4);
    if left >= few || prepared >= most {
        return None;
    }
    Some((used + (used / 4).max(STEP)).min(most))
}

/// The number of superblocks for which the kernel has been prepared since this boot.
fn prepared(file: &Path, boot: &str) -> u32 {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    text.split_once(' ')
        .filter(|(noted, _)| *noted == boot)
        .and_then(|(_, count)| count.trim().parse().ok())
        .unwrap_or(0)
}

/// Creates superblocks until there are `count` on the host. They are removed with the mount namespace of the calling
/// process.
fn make_superblocks(count: u32) -> io::Result<()> {
    mount_change(
        "/",
        MountPropagationFlags::PRIVATE | MountPropagationFlags::REC,
    )?;
    new_tmpfs(BENCH)?;
    let mut begun = Instant::now();
    for number in 1..=count {
        let directory = Path::new(BENCH).join(number.to_string());
        create_dir(&directory)?;
        mount("none", &directory, "ramfs", MountFlags::empty(), None)?;
        if number % BATCH == 0 {
            if minor(stat(&directory)?.st_dev) >= count {
                break;
            }
            let rest = Timespec::try_from(begun.elapsed() * REST).ok();
            let _ = poll(&mut [], rest.as_ref());
            begun = Instant::now();
        }
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

    #[test]
    fn the_preparation_follows_the_use_up_to_its_maximum() {
        assert_eq!(wanted(0, 0, 81_024), Some(1_024));
        // Fifty containers need no more.
        assert_eq!(wanted(300, 1_024, 81_024), None);
        let mut prepared = 0;
        for used in 0..40_000 {
            if let Some(more) = wanted(used, prepared, 81_024) {
                prepared = more;
            }
            assert!(prepared > used + used / 9, "{prepared} for {used}");
            assert!(prepared <= 1_024 + used + used / 4, "{prepared} for {used}");
        }
        assert_eq!(wanted(40_000, 41_024, 41_024), None);
        assert_eq!(wanted(40_000, 40_000, 41_024), Some(41_024));
        assert_eq!(wanted(7, 0, 0), None);
    }
}
