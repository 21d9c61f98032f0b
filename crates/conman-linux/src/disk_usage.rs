//! Disk space and inodes used by hostile programs: by a directory tree, and by unlinked files that
//! processes still use.

use std::collections::HashSet;
use std::ffi::CStr;
use std::fs;
use std::io;
use std::ops::AddAssign;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, fstat, openat, statat};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};

/// The unit of `st_blocks` (stat(3type)).
const BLOCK_BYTES: u64 = 512;

/// `MAX_HANDLE_SZ` of name_to_handle_at(2).
const MAX_HANDLE_BYTES: usize = 128;

/// What procfs appends to the path of an unlinked file.
const DELETED: &[u8] = b" (deleted)";

/// Space and inodes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskUsage {
    pub bytes: u64,
    pub inodes: u64,
}

impl DiskUsage {
    /// Whether both values are within the limits.
    #[must_use]
    pub fn is_within(&self, limits: Self) -> bool {
        self.bytes <= limits.bytes && self.inodes <= limits.inodes
    }
}

impl AddAssign for DiskUsage {
    fn add_assign(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.inodes += other.inodes;
    }
}

/// A tree's usage.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TreeUsage {
    pub usage: DiskUsage,
    /// No directory below the top changed or disappeared meanwhile. Otherwise a file that was moved may be
    /// missing.
    pub steady: bool,
}

/// Measures a directory and everything below it; a file with several names counts once. Stops after more
/// than `max_inodes`, so that the time is bounded.
///
/// Programs may change the tree meanwhile: what they move may be missed or counted twice. Follows no
/// symbolic link. Directories are reopened by file handles, so neither the depth of the tree nor the length
/// of a path matters. The caller needs CAP_DAC_READ_SEARCH.
pub fn tree_usage(path: &Path, max_inodes: u64) -> io::Result<TreeUsage> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let top = openat(CWD, path, flags, Mode::empty())?;
    let top_inode = fstat(&top)?.st_ino;
    // The clock of the changes of files. A program cannot set the time of a change.
    let began = clock_gettime(ClockId::RealtimeCoarse);
    let (mut usage, mut steady) = (DiskUsage::default(), true);
    let mut linked = HashSet::new();
    let mut pending = vec![DirectoryHandle::of(top.as_fd(), c".")?];
    while let Some(handle) = pending.pop() {
        // It may have been removed.
        let Some(directory) = handle.open(top.as_fd())? else {
            steady = false;
            continue;
        };
        let Some(listing) = found(Dir::read_from(&directory))? else {
            steady = false;
            continue;
        };
        for entry in listing {
            // The directory may have been removed.
            let Some(entry) = found(entry)? else { break };
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            let Some(data) = found(statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW))? else {
                continue;
            };
            let is_directory = FileType::from_raw_mode(data.st_mode).is_dir();
            if !is_directory && data.st_nlink > 1 && !linked.insert(data.st_ino) {
                continue;
            }
            usage += of(&data);
            if usage.inodes > max_inodes {
                return Ok(TreeUsage { usage, steady });
            }
            if is_directory {
                match DirectoryHandle::of(directory.as_fd(), name) {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    other => pending.push(other?),
                }
            }
        }
        // Only now: a file may have been moved while the directory was read.
        let data = fstat(&directory)?;
        let unchanged = (data.st_ctime, data.st_ctime_nsec) < (began.tv_sec, began.tv_nsec as _);
        steady &= unchanged || data.st_ino == top_inode;
    }
    Ok(TreeUsage { usage, steady })
}

fn found<T>(result: Result<T, Errno>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

fn of(data: &Stat) -> DiskUsage {
    DiskUsage {
        bytes: u64::try_from(data.st_blocks).unwrap_or_default() * BLOCK_BYTES,
        inodes: 1,
    }
}

/// A directory that can be opened again without its path.
struct DirectoryHandle {
    kind: i32,
    bytes: Box<[u8]>,
}

/// `struct file_handle` with room for the longest handle.
#[repr(C)]
struct RawHandle {
    length: u32,
    kind: i32,
    bytes: [u8; MAX_HANDLE_BYTES],
}

impl DirectoryHandle {
    #[expect(unsafe_code, reason = "this system call has no safe wrapper")]
    fn of(directory: BorrowedFd<'_>, name: &CStr) -> io::Result<Self> {
        let mut raw = RawHandle {
            length: MAX_HANDLE_BYTES as u32,
            kind: 0,
            bytes: [0; MAX_HANDLE_BYTES],
        };
        let mut mount_id: libc::c_int = 0;
        // SAFETY: name_to_handle_at(2) reads `name`, which ends with a NUL byte, and writes at most
        // `length` bytes of `raw.bytes`, the two fields before them, and `mount_id`. All of these
        // live until it returns.
        let done = unsafe {
            libc::syscall(
                libc::SYS_name_to_handle_at,
                directory.as_raw_fd(),
                name.as_ptr(),
                &raw mut raw,
                &raw mut mount_id,
                0,
            )
        };
        if done < 0 {
            return Err(io::Error::last_os_error());
        }
        let length = usize::try_from(raw.length).unwrap_or(MAX_HANDLE_BYTES);
        Ok(Self {
            kind: raw.kind,
            bytes: raw.bytes[..length.min(MAX_HANDLE_BYTES)].into(),
        })
    }

    /// `None` if it does not exist any more. `mount`: any file of its file system.
    #[expect(unsafe_code, reason = "this system call has no safe wrapper")]
    fn open(&self, mount: BorrowedFd<'_>) -> io::Result<Option<OwnedFd>> {
        let mut raw = RawHandle {
            length: u32::try_from(self.bytes.len()).unwrap_or_default(),
            kind: self.kind,
            bytes: [0; MAX_HANDLE_BYTES],
        };
        raw.bytes[..self.bytes.len()].copy_from_slice(&self.bytes);
        // A program would see by the time of access where the measurement is.
        let flags = libc::O_RDONLY
            | libc::O_DIRECTORY
            | libc::O_NOFOLLOW
            | libc::O_CLOEXEC
            | libc::O_NOATIME;
        // SAFETY: open_by_handle_at(2) reads `raw`, which lives until it returns.
        let fd = unsafe {
            libc::syscall(
                libc::SYS_open_by_handle_at,
                mount.as_raw_fd(),
                &raw const raw,
                flags,
            )
        };
        if let Ok(fd) = i32::try_from(fd)
            && fd >= 0
        {
            // SAFETY: the kernel has just made this descriptor, and nothing else knows it.
            return Ok(Some(unsafe { OwnedFd::from_raw_fd(fd) }));
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::ESTALE | libc::ENOENT | libc::ENOTDIR) => Ok(None),
            _ => Err(error),
        }
    }
}

/// Measures unlinked regular files that these processes have open or mapped, each file once.
///
/// Counts only files of `devices`. `None` if there are more than `max_looks` descriptors and mappings, so
/// that the time is bounded. Files that are neither open nor mapped, but in a message that no process has
/// received, are not found.
#[must_use]
pub fn nameless_usage(pids: &[i32], devices: &[u64], max_looks: usize) -> Option<DiskUsage> {
    let mut search = NamelessFiles {
        devices,
        looks: max_looks,
        seen: HashSet::new(),
        usage: DiskUsage::default(),
    };
    for pid in pids {
        search.look_at_process(*pid);
    }
    (search.looks > 0).then_some(search.usage)
}

/// Whether a thread has the descriptors of its process, as nearly all have. `false` also if the kernel does
/// not say.
#[expect(unsafe_code, reason = "this system call has no safe wrapper")]
fn shares_descriptors(pid: i32, thread: &Path) -> bool {
    /// `KCMP_FILES` of linux/kcmp.h.
    const FILES: libc::c_int = 2;
    let id = thread
        .file_name()
        .and_then(|name| name.to_str()?.parse().ok());
    let Some(id) = id.filter(|id: &i32| *id != pid) else {
        return false;
    };
    // SAFETY: kcmp(2) with `KCMP_FILES` takes numbers only.
    unsafe { libc::syscall(libc::SYS_kcmp, pid, id, FILES, 0, 0) == 0 }
}

struct NamelessFiles<'a> {
    devices: &'a [u64],
    looks: usize,
    /// Device and inode.
    seen: HashSet<(u64, u64)>,
    usage: DiskUsage,
}

impl NamelessFiles<'_> {
    /// A process that ends meanwhile has no files.
    fn look_at_process(&mut self, pid: i32) {
        let process = PathBuf::from(format!("/proc/{pid}"));
        // Each thread may have a separate table.
        for thread in entries(&process.join("task")) {
            if shares_descriptors(pid, &thread) {
                continue;
            }
            for descriptor in entries(&thread.join("fd")) {
                if !self.may_look() {
                    return;
                }
                let target = fs::read_link(&descriptor);
                let is_deleted =
                    |path: PathBuf| ends_with_deleted(path.as_os_str().as_encoded_bytes());
                if target.is_ok_and(is_deleted) {
                    self.count(&descriptor);
                }
            }
        }
        let Ok(maps) = fs::read(process.join("maps")) else {
            return;
        };
        for line in maps.split(|byte| *byte == b'\n') {
            if !self.may_look() {
                return;
            }
            if ends_with_deleted(line)
                && let Some(name) = mapping_name(line)
            {
                self.count(&process.join("map_files").join(name));
            }
        }
    }

    fn may_look(&mut self) -> bool {
        self.looks = self.looks.saturating_sub(1);
        self.looks > 0
    }

    fn count(&mut self, link: &Path) {
        let Ok(data) = fs::metadata(link) else { return };
        if data.is_file()
            && data.nlink() == 0
            && self.devices.contains(&data.dev())
            && self.seen.insert((data.dev(), data.ino()))
        {
            self.usage += DiskUsage {
                bytes: data.blocks() * BLOCK_BYTES,
                inodes: 1,
            };
        }
    }
}

fn entries(directory: &Path) -> impl Iterator<Item = PathBuf> {
    let listed = fs::read_dir(directory).into_iter().flatten().flatten();
    listed.map(|entry| entry.path())
}

fn ends_with_deleted(text: &[u8]) -> bool {
    text.ends_with(DELETED)
}

/// The name in `map_files` for a line of `maps`; the line has leading zeros.
fn mapping_name(line: &[u8]) -> Option<String> {
    let range = line.split(|byte| *byte == b' ').next()?;
    let (from, to) = std::str::from_utf8(range).ok()?.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    Some(format!("{:x}-{:x}", number(from)?, number(to)?))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;
    use std::os::unix::fs::symlink;

    use rustix::fs::mkdirat;

    use super::*;

    const MANY: u64 = 1 << 20;

    fn is_root() -> bool {
        let root = nix::unistd::geteuid().is_root();
        if !root {
            #[expect(clippy::print_stderr, reason = "a skipped test says so there")]
            {
                eprintln!("skipped: file handles are opened by root");
            }
        }
        root
    }

    #[test]
    fn a_tree_is_measured_however_deep_it_is() {
        if !is_root() {
            return;
        }
        let root = tempfile::tempdir().expect("a directory");
        let empty = tree_usage(root.path(), MANY).expect("measured");
        assert_eq!(empty.usage, DiskUsage::default());
        fs::write(root.path().join("file"), vec![1; 100_000]).expect("written");
        fs::hard_link(root.path().join("file"), root.path().join("again")).expect("linked");
        symlink("/usr", root.path().join("link")).expect("linked");
        let mut at = openat(CWD, root.path(), OFlags::DIRECTORY, Mode::empty()).expect("opened");
        for _ in 0..5_000 {
            mkdirat(&at, "d", Mode::from_raw_mode(0o700)).expect("made");
            at = openat(&at, "d", OFlags::DIRECTORY, Mode::empty()).expect("opened");
        }
        let bottom = openat(&at, "f", OFlags::CREATE | OFlags::WRONLY, Mode::RUSR);
        let mut bottom = File::from(bottom.expect("made"));
        bottom.write_all(&vec![1; 200_000]).expect("written");
        bottom.sync_all().expect("on disk");
        File::open(root.path().join("file"))
            .and_then(|file| file.sync_all())
            .expect("on disk");
        let measured = || tree_usage(root.path(), MANY).expect("measured");
        // The clock of changes is coarse.
        while !measured().steady {}
        let usage = measured().usage;
        assert_eq!(usage.inodes, 5_003);
        assert!(usage.bytes >= 300_000, "{usage:?}");
        let part = tree_usage(root.path(), 100).expect("measured");
        assert_eq!(part.usage.inodes, 101);
        crate::remove_tree(&root.path().join("d")).expect("removed");
    }

    #[test]
    fn a_file_that_moves_between_directories_is_noticed() {
        if !is_root() {
            return;
        }
        let root = tempfile::tempdir().expect("a directory");
        let [left, right] = ["left", "right"].map(|name| root.path().join(name));
        for directory in [&left, &right] {
            fs::create_dir(directory).expect("made");
        }
        fs::write(left.join("file"), vec![1; 1 << 20]).expect("written");
        let over = std::sync::atomic::AtomicBool::new(false);
        let moves = || {
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                fs::rename(left.join("file"), right.join("file")).expect("moved");
                fs::rename(right.join("file"), left.join("file")).expect("moved back");
            }
        };
        let known = std::thread::scope(|scope| {
            scope.spawn(moves);
            let measured = || tree_usage(root.path(), MANY).expect("measured");
            // Found, or known to be missing.
            let known = |tree: TreeUsage| !tree.steady || tree.usage.inodes >= 3;
            let all = (0..200).all(|_| known(measured()));
            over.store(true, std::sync::atomic::Ordering::Relaxed);
            all
        });
        assert!(known, "a file was missed, and nothing said so");
    }

    #[test]
    fn files_without_a_name_are_counted_while_they_are_open() {
        let root = tempfile::tempdir().expect("a directory");
        let path = root.path().join("file");
        let device = fs::metadata(root.path()).expect("it exists").dev();
        let pids = [nix::unistd::getpid().as_raw()];
        let mut file = File::create(&path).expect("made");
        file.write_all(&vec![1; 1 << 20]).expect("written");
        file.sync_all().expect("on disk");
        let again = file.try_clone().expect("duplicated");
        let measured = || nameless_usage(&pids, &[device], 1 << 20).expect("few descriptors");
        let before = measured();
        fs::remove_file(&path).expect("removed");
        let with = measured();
        assert_eq!(nameless_usage(&pids, &[device], 3), None, "too many");
        // Other tests of this program may have some, too, but none as large.
        assert!(
            with.bytes >= before.bytes + (1 << 20),
            "{before:?} {with:?}"
        );
        assert!(with.bytes < before.bytes + (2 << 20), "{before:?} {with:?}");
        drop((file, again));
        let after = measured();
        assert!(after.bytes < 1 << 20, "{after:?}");
    }

    #[test]
    fn a_mapping_is_named_without_leading_zeros() {
        let line = b"00400000-0040b000 r-xp 00000000 fe:00 5 /tmp/x (deleted)";
        assert_eq!(mapping_name(line).as_deref(), Some("400000-40b000"));
        assert!(ends_with_deleted(line));
    }
}
