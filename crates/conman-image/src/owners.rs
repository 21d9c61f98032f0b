//! The owners of unpacked layers' files on the host.
//!
//! If the kernel can map the owners of layers, they are the image's. If it cannot (before Linux
//! 5.19), all sessions share one range of ids, and user `n` of the image is the range's `n`th id.
//! A store that changes from one to the other changes its files' owners.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, Dir, FileType, Gid, Mode, OFlags, Stat, Uid, XattrFlags, chmodat, chownat, fgetxattr,
    fsetxattr, openat, statat,
};
use rustix::io::Errno;

/// Ids of a session.
pub(crate) const RANGE_SIZE: u32 = 65_536;

/// Bits that a change of the owner clears: set-user-id and set-group-id.
const PRIVILEGED: u32 = 0o6000;
const EXECUTABLE: u32 = 0o111;
const CAPABILITY: &str = "security.capability";
/// The kernel's three forms take at most 24 bytes.
const MAX_CAPABILITY_BYTES: usize = 64;

/// The move of every file from one range to another, each given by its first id; 0: the image's
/// ids.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Move {
    pub(crate) from: u32,
    pub(crate) to: u32,
}

impl Move {
    /// The new id. Ids that have been moved already stay, so that an interrupted move can be repeated.
    /// Ids beyond the range, which no session has, stay as well.
    fn of(self, id: u32) -> u32 {
        let inner = [self.from, self.to]
            .into_iter()
            .filter(|first| *first != 0)
            .filter_map(|first| id.checked_sub(first))
            .find(|inner| *inner < RANGE_SIZE);
        match inner.unwrap_or(id) {
            inner if inner < RANGE_SIZE => self.to + inner,
            _ => id,
        }
    }

    /// Moves the directory `root` and all below it. It must not change meanwhile.
    pub(crate) fn apply(self, root: impl AsFd) -> io::Result<()> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        self.apply_to(&root, OsStr::new("."))?;
        // Paths in a layer are bounded, and so is their number.
        let mut left = vec![PathBuf::from(".")];
        while let Some(path) = left.pop() {
            let directory = openat(&root, &path, flags, Mode::empty())?;
            for entry in Dir::read_from(&directory)? {
                let entry = entry?;
                let name = OsStr::from_bytes(entry.file_name().to_bytes());
                if name == "." || name == ".." {
                    continue;
                }
                if self.apply_to(&directory, name)?.is_dir() {
                    left.push(path.join(name));
                }
            }
        }
        Ok(())
    }

    fn apply_to(self, directory: impl AsFd, name: &OsStr) -> io::Result<FileType> {
        let data = statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let kind = FileType::from_raw_mode(data.st_mode);
        let (user, group) = (self.of(data.st_uid), self.of(data.st_gid));
        if (user, group) == (data.st_uid, data.st_gid) {
            return Ok(kind);
        }
        let capability = capability(&directory, name, &data)?;
        chownat(
            &directory,
            name,
            Some(Uid::from_raw(user)),
            Some(Gid::from_raw(group)),
            AtFlags::SYMLINK_NOFOLLOW,
        )?;
        if kind == FileType::RegularFile && data.st_mode & PRIVILEGED != 0 {
            let mode = Mode::from_raw_mode(data.st_mode & 0o7777);
            chmodat(&directory, name, mode, AtFlags::empty())?;
        }
        if let Some((file, value)) = capability {
            fsetxattr(&file, CAPABILITY, &value, XattrFlags::empty())?;
        }
        Ok(kind)
    }
}

/// A program's file capabilities, which a change of its owner removes.
fn capability(
    directory: impl AsFd,
    name: &OsStr,
    data: &Stat,
) -> io::Result<Option<(OwnedFd, Vec<u8>)>> {
    if FileType::from_raw_mode(data.st_mode) != FileType::RegularFile
        || data.st_mode & EXECUTABLE == 0
    {
        return Ok(None);
    }
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = openat(directory, Path::new(name), flags, Mode::empty())?;
    let mut value = vec![0_u8; MAX_CAPABILITY_BYTES];
    match fgetxattr(&file, CAPABILITY, &mut value[..]) {
        Ok(length) => {
            value.truncate(length);
            Ok(Some((file, value)))
        }
        Err(Errno::NODATA | Errno::NOTSUP) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, lchown, symlink};

    use super::*;

    const SHARED: u32 = 0x3FFF_0000;

    #[test]
    fn an_id_moves_there_and_back_and_never_twice() {
        let (there, back) = (
            Move {
                from: 0,
                to: SHARED,
            },
            Move {
                from: SHARED,
                to: 0,
            },
        );
        for id in [0, 7, 65_535] {
            assert_eq!(there.of(id), SHARED + id);
            assert_eq!(there.of(there.of(id)), SHARED + id);
            assert_eq!(back.of(there.of(id)), id);
            assert_eq!(back.of(id), id);
        }
        assert_eq!(there.of(65_536), 65_536);
        assert_eq!(back.of(SHARED + 65_536), SHARED + 65_536);
    }

    #[test]
    #[expect(clippy::print_stderr, reason = "tests report there what they skip")]
    fn every_file_moves_with_its_bits_and_capabilities() {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("skipped: changing owners needs root");
            return;
        }
        let stage = tempfile::tempdir().expect("temporary directory");
        let root = stage.path();
        let deep = root.join("usr/bin");
        fs::create_dir_all(&deep).expect("directories");
        let program = deep.join("program");
        fs::write(&program, "x").expect("a file");
        lchown(&program, Some(7), Some(8)).expect("owned");
        fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).expect("mode");
        fs::hard_link(&program, root.join("same")).expect("a link");
        symlink("/etc/shadow", root.join("link")).expect("a link");
        // CAP_NET_RAW, permitted and effective: `vfs_cap_data` of revision 2.
        let capability = [
            1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        ];
        let tool = root.join("tool");
        fs::write(&tool, "x").expect("a file");
        fs::set_permissions(&tool, fs::Permissions::from_mode(0o755)).expect("mode");
        let given = fsetxattr(
            fs::File::open(&tool).expect("open"),
            CAPABILITY,
            &capability,
            XattrFlags::empty(),
        );
        let mut kept = [0_u8; MAX_CAPABILITY_BYTES];
        let opened = fs::File::open(root).expect("open");
        for (from, to) in [(0, SHARED), (SHARED, 0)] {
            Move { from, to }.apply(&opened).expect("moved");
            let owner = |path: &Path| {
                let data = fs::symlink_metadata(path).expect("it is there");
                (data.uid(), data.gid())
            };
            assert_eq!(owner(&program), (to + 7, to + 8));
            for path in [root, &deep, &root.join("link"), &tool] {
                assert_eq!(owner(path), (to, to), "{}", path.display());
            }
            let mode = fs::metadata(&program).expect("there").mode();
            assert_eq!(mode & 0o7777, 0o4755);
            if given.is_ok() {
                let file = fs::File::open(&tool).expect("open");
                let length = fgetxattr(file, CAPABILITY, &mut kept[..]).expect("kept");
                assert_eq!(kept[..length], capability);
            }
        }
    }
}
