//! Opens, describes and changes files by paths that are resolved inside the container's root.

use std::ffi::{CStr, OsStr};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use conman_archive::{
    BUFFER_BYTES, MAX_DEPTH, PERMISSIONS, READ, entries, refuse_procfs, too_deep,
};
use conman_linux::{create_dir_in_root, open_file_in_root, open_in_root};
use conman_proto::{FileEntry, FileType};
use jiff::Timestamp;
use rustix::fs::{
    AtFlags, CWD, FileType as Kind, Mode, OFlags, RenameFlags, Stat, fchmod, fstat, mkdirat,
    openat, readlinkat, renameat, renameat_with, statat, unlinkat,
};
use rustix::io::Errno;

use super::{Failed, FilesFailure, failed};

/// Mode of new directories, before the umask.
const DIRECTORY_MODE: Mode = Mode::from_raw_mode(0o777);

/// Mode of new files, unless another is ordered.
const FILE_MODE: u32 = 0o644;

/// A directory that paths are resolved in, as if it were the root.
#[derive(Debug)]
pub(super) struct Tree {
    root: OwnedFd,
}

impl Tree {
    /// Everything that the process sees.
    pub(super) fn whole() -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = openat(CWD, "/", flags, Mode::empty())?;
        Ok(Self { root })
    }

    /// Opens a regular file for reading.
    pub(super) fn file(&self, path: &str) -> Result<(File, FileEntry), Failed> {
        let failed = failed(path);
        let opened = open_file_in_root(&self.root, Path::new(path), READ).map_err(&failed)?;
        let stat = fstat(&opened).map_err(|errno| failed(errno.into()))?;
        match Kind::from_raw_mode(stat.st_mode) {
            Kind::RegularFile => refuse_procfs(&opened).map_err(&failed)?,
            Kind::Directory => {
                let detail = format!("{path} is a directory; ask for it with archive=tar");
                return Err(Failed::new(FilesFailure::IsDirectory, detail));
            }
            _ => return Err(Failed::new(FilesFailure::Conflict, not_regular(path))),
        }
        let name = Path::new(path).file_name().unwrap_or_default();
        Ok((File::from(opened), entry(name.as_bytes(), &stat, None)))
    }

    /// Opens a directory for reading.
    pub(super) fn directory(&self, path: &str) -> Result<OwnedFd, Failed> {
        let flags = READ | OFlags::DIRECTORY;
        let opened = open_file_in_root(&self.root, Path::new(path), flags).map_err(failed(path))?;
        refuse_procfs(&opened).map_err(failed(path))?;
        Ok(opened)
    }

    /// Makes a directory and its missing parents.
    pub(super) fn make_directories(&self, path: &str) -> Result<OwnedFd, Failed> {
        create_dir_in_root(&self.root, Path::new(path)).map_err(failed(path))
    }

    pub(super) fn make_directory(&self, path: &str) -> Result<(), Failed> {
        let (parent, name) = self.parent(path).map_err(failed(path))?;
        mkdirat(&parent, name, DIRECTORY_MODE).map_err(|errno| failed(path)(errno.into()))
    }

    /// Replaces a file once all of its content has arrived. A link at `path` is replaced, not followed.
    pub(super) fn write(
        &self,
        path: &str,
        parents: bool,
        mode: Option<u32>,
        content: &mut impl Read,
    ) -> Result<(), Failed> {
        let failed = failed(path);
        if parents && let Some(parent) = Path::new(path).parent() {
            create_dir_in_root(&self.root, parent).map_err(&failed)?;
        }
        let (parent, name) = self.parent(path).map_err(&failed)?;
        let present = statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW).ok();
        let kind = present.map(|stat| Kind::from_raw_mode(stat.st_mode));
        match kind {
            None | Some(Kind::RegularFile | Kind::Symlink) => {}
            Some(Kind::Directory) => {
                let detail = format!("{path} is a directory; send an archive with archive=tar");
                return Err(Failed::new(FilesFailure::IsDirectory, detail));
            }
            Some(_) => return Err(Failed::new(FilesFailure::Conflict, not_regular(path))),
        }
        let kept = present.filter(|_| kind == Some(Kind::RegularFile));
        let mode = mode.or(kept.map(|stat| stat.st_mode & PERMISSIONS));
        let temporary = format!(".conman-upload-{}", nix::unistd::getpid());
        let outcome = new_file(
            &parent,
            OsStr::new(&temporary),
            mode.unwrap_or(FILE_MODE),
            content,
        )
        .and_then(|()| Ok(renameat(&parent, temporary.as_str(), &parent, name)?));
        if outcome.is_err() {
            let _ = unlinkat(&parent, temporary.as_str(), AtFlags::empty());
        }
        outcome.map_err(failed)
    }

    pub(super) fn rename(&self, from: &str, to: &str, overwrite: bool) -> Result<(), Failed> {
        let (old_parent, old) = self.parent(from).map_err(failed(from))?;
        let (new_parent, new) = self.parent(to).map_err(failed(to))?;
        let flags = match overwrite {
            true => RenameFlags::empty(),
            false => RenameFlags::NOREPLACE,
        };
        let renamed = renameat_with(&old_parent, old, &new_parent, new, flags);
        renamed.map_err(|errno| match errno {
            // An overlay cannot rename a directory of its lower layers.
            Errno::XDEV => Failed::new(
                FilesFailure::Conflict,
                format!(
                    "{from} cannot be renamed to {to}: it is a directory of the image, or they are in \
                     different file systems; copy it and remove the original"
                ),
            ),
            Errno::EXIST => failed(to)(errno.into()),
            errno => failed(from)(errno.into()),
        })
    }

    pub(super) fn remove(&self, path: &str, recursive: bool) -> Result<(), Failed> {
        let failed = failed(path);
        let (parent, name) = self.parent(path).map_err(&failed)?;
        let removed = match unlinkat(&parent, name, AtFlags::empty()) {
            Err(Errno::ISDIR) if recursive => {
                remove_tree(parent.as_fd(), name.as_bytes(), MAX_DEPTH)
            }
            Err(Errno::ISDIR) => {
                unlinkat(&parent, name, AtFlags::REMOVEDIR).map_err(io::Error::from)
            }
            other => other.map_err(io::Error::from),
        };
        removed.map_err(failed)
    }

    /// The directory that holds `path`, and its name there.
    pub(super) fn parent<'p>(&self, path: &'p str) -> io::Result<(OwnedFd, &'p OsStr)> {
        let path = Path::new(path);
        let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let parent = path
            .parent()
            .filter(|parent| !parent.as_os_str().is_empty());
        let parent = parent.unwrap_or(Path::new("/"));
        Ok((open_in_root(&self.root, parent, OFlags::DIRECTORY)?, name))
    }
}

fn not_regular(path: &str) -> String {
    format!("{path} is neither a file nor a directory")
}

/// Writes a file that does not exist yet.
fn new_file(parent: impl AsFd, name: &OsStr, mode: u32, content: &mut impl Read) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(openat(parent, name, flags, Mode::from_raw_mode(0o600))?);
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        match content.read(&mut buffer)? {
            0 => break,
            read => file.write_all(&buffer[..read])?,
        }
    }
    Ok(fchmod(&file, Mode::from_raw_mode(mode & PERMISSIONS))?)
}

/// Describes an entry of a directory; `None` if there is none any more.
pub(super) fn describe(directory: impl AsFd, name: &CStr) -> io::Result<Option<FileEntry>> {
    let stat = match statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => stat,
        Err(Errno::NOENT) => return Ok(None),
        Err(errno) => return Err(errno.into()),
    };
    let link = match Kind::from_raw_mode(stat.st_mode) {
        Kind::Symlink => readlinkat(&directory, name, Vec::new()).ok(),
        _ => None,
    };
    let link = link.map(|target| target.to_string_lossy().into_owned());
    Ok(Some(entry(name.to_bytes(), &stat, link)))
}

fn entry(name: &[u8], stat: &Stat, link_target: Option<String>) -> FileEntry {
    let kind = match Kind::from_raw_mode(stat.st_mode) {
        Kind::RegularFile => FileType::File,
        Kind::Directory => FileType::Directory,
        Kind::Symlink => FileType::Link,
        _ => FileType::Other,
    };
    FileEntry {
        name: String::from_utf8_lossy(name).into_owned(),
        kind,
        size: u64::try_from(stat.st_size).unwrap_or(0),
        mode: format!("{:04o}", stat.st_mode & PERMISSIONS),
        uid: stat.st_uid,
        gid: stat.st_gid,
        modified_at: time(stat.st_mtime, stat.st_mtime_nsec),
        accessed_at: time(stat.st_atime, stat.st_atime_nsec),
        changed_at: time(stat.st_ctime, stat.st_ctime_nsec),
        link_target,
    }
}

/// A time that cannot be written, which a session may set, becomes the epoch.
fn time(seconds: i64, nanoseconds: u64) -> Timestamp {
    let nanoseconds = i32::try_from(nanoseconds).unwrap_or(0);
    Timestamp::new(seconds, nanoseconds).unwrap_or_default()
}

/// Removes a directory with everything in it. Follows no link, also while they are exchanged.
fn remove_tree(parent: BorrowedFd<'_>, name: &[u8], depth: usize) -> io::Result<()> {
    if depth == 0 {
        return Err(too_deep());
    }
    let flags = READ | OFlags::DIRECTORY | OFlags::NOFOLLOW;
    let directory = openat(parent, name, flags, Mode::empty())?;
    refuse_procfs(&directory)?;
    entries(directory.as_fd(), |name| {
        match unlinkat(&directory, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(Errno::ISDIR) => remove_tree(directory.as_fd(), name.to_bytes(), depth - 1),
            Err(errno) => Err(errno.into()),
        }
    })?;
    Ok(unlinkat(parent, name, AtFlags::REMOVEDIR)?)
}
