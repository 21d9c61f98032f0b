//! The layer's directory while it is filled.
//!
//! Every file is made in a directory whose descriptor was opened by openat2 below the layer's
//! root without following any symbolic link, and by a call that fails if the name exists
//! (`O_EXCL`, mkdirat, linkat, symlinkat, mknodat). So nothing is written through a name that the
//! archive planted.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, Stat, XattrFlags, chownat, fchmod, fchown, fgetxattr,
    fsetxattr, futimens, linkat, mkdirat, mknodat, openat, statat, symlinkat, unlinkat, utimensat,
};
use rustix::fs::{Timespec, Timestamps};
use rustix::io::Errno;
use rustix::process::{Gid, Uid};

use crate::beneath;
use crate::unpack::entry_path::EntryPath;
use crate::unpack::error::{EntryName, Refusal, UnpackError};

/// overlayfs's mark of a directory that hides that directory in the layers below.
pub(crate) const OPAQUE_XATTR: &str = "trusted.overlay.opaque";

/// Mode of directories that the archive does not mention.
const IMPLIED_DIRECTORY: Mode = Mode::from_raw_mode(0o755);

/// Owner, mode and time of a file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attributes {
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) modified: Timespec,
}

impl Attributes {
    fn times(&self) -> Timestamps {
        Timestamps {
            last_access: self.modified,
            last_modification: self.modified,
        }
    }

    fn owner(&self) -> (Option<Uid>, Option<Gid>) {
        (Some(Uid::from_raw(self.uid)), Some(Gid::from_raw(self.gid)))
    }
}

/// A layer's directory, being filled.
#[derive(Debug)]
pub(super) struct Tree {
    root: OwnedFd,
    /// The directory of the last entry. Directories are never removed while unpacking, so its path
    /// stays valid.
    recent: Option<(Vec<Vec<u8>>, OwnedFd)>,
    /// The root hides all layers below, for which overlayfs has no attribute.
    pub(super) root_is_opaque: bool,
}

/// The file that a name already has.
enum Present {
    Nothing,
    Whiteout,
    Directory,
    Other(Stat),
}

type Outcome<T> = Result<T, Problem>;

/// An error, before the name of its entry is added.
#[derive(Debug)]
pub(super) enum Problem {
    Refused(Refusal),
    System(&'static str, io::Error),
    /// Of the archive, whichever its entry.
    Archive(UnpackError),
}

impl Problem {
    pub(super) fn at(self, raw: &[u8]) -> UnpackError {
        let entry = EntryName::new(raw);
        match self {
            Self::Refused(why) => UnpackError::Refused { entry, why },
            Self::System(action, source) => UnpackError::Write {
                action,
                entry,
                source,
            },
            Self::Archive(error) => error,
        }
    }
}

impl From<Refusal> for Problem {
    fn from(why: Refusal) -> Self {
        Self::Refused(why)
    }
}

impl From<UnpackError> for Problem {
    fn from(error: UnpackError) -> Self {
        Self::Archive(error)
    }
}

fn during(action: &'static str) -> impl Fn(Errno) -> Problem {
    move |errno| Problem::System(action, errno.into())
}

impl Tree {
    pub(super) fn new(root: OwnedFd) -> Self {
        Self {
            root,
            recent: None,
            root_is_opaque: false,
        }
    }

    /// Makes a directory, or gives an existing one these attributes. Its time is set at the end, since
    /// filling the directory changes it.
    pub(super) fn directory(&mut self, path: &EntryPath, attributes: &Attributes) -> Outcome<()> {
        let Some((parents, name)) = path.split() else {
            return dress(&self.root, attributes);
        };
        let parent = self.enter(parents)?;
        let present = match present(parent, name)? {
            Present::Other(_) => {
                remove(parent, name)?;
                Present::Nothing
            }
            present => present,
        };
        dress(&make_directory(parent, name, &present)?, attributes)
    }

    /// Makes an empty regular file, in place of any other file of that name.
    pub(super) fn file(&mut self, path: &EntryPath) -> Outcome<OwnedFd> {
        let (parent, name) = self.clear(path)?;
        openat(
            parent,
            os(name),
            OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
            Mode::from_raw_mode(0o600),
        )
        .map_err(during("make the file"))
    }

    pub(super) fn symlink(
        &mut self,
        path: &EntryPath,
        target: &[u8],
        attributes: &Attributes,
    ) -> Outcome<()> {
        if target.is_empty() || target.len() > 4095 || target.contains(&0) {
            return Err(Refusal::BadLink.into());
        }
        let (parent, name) = self.clear(path)?;
        symlinkat(os(target), parent, os(name)).map_err(during("make the symbolic link"))?;
        let (uid, gid) = attributes.owner();
        chownat(parent, os(name), uid, gid, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(during("set the owner of"))?;
        utimensat(
            parent,
            os(name),
            &attributes.times(),
            AtFlags::SYMLINK_NOFOLLOW,
        )
        .map_err(during("set the time of"))
    }

    pub(super) fn hard_link(&mut self, path: &EntryPath, target: &EntryPath) -> Outcome<()> {
        let Some((target_parents, target_name)) = target.split() else {
            return Err(Refusal::LinkToDirectory.into());
        };
        if path == target {
            return Err(Refusal::BadLink.into());
        }
        let from = match self.look_up(target_parents) {
            Ok(directory) => directory,
            Err(Errno::NOENT) => return Err(Refusal::LinkTargetMissing.into()),
            Err(Errno::LOOP) => {
                return Err(Refusal::LinkTarget(Box::new(Refusal::ThroughSymlink)).into());
            }
            Err(Errno::NOTDIR) => {
                return Err(Refusal::LinkTarget(Box::new(Refusal::ThroughFile)).into());
            }
            Err(errno) => return Err(during("find the target of")(errno)),
        };
        let source = match present(from.as_fd(), target_name)? {
            Present::Nothing => return Err(Refusal::LinkTargetMissing.into()),
            Present::Whiteout => return Err(Refusal::LinkToWhiteout.into()),
            Present::Directory => return Err(Refusal::LinkToDirectory.into()),
            Present::Other(source) => source,
        };
        let Some((parents, name)) = path.split() else {
            return Err(Refusal::RootNotDirectory.into());
        };
        let parent = self.enter(parents)?;
        if let Present::Other(existing) = present(parent, name)?
            && (existing.st_dev, existing.st_ino) == (source.st_dev, source.st_ino)
        {
            return Ok(());
        }
        let (parent, name) = self.clear(path)?;
        linkat(from, os(target_name), parent, os(name), AtFlags::empty())
            .map_err(during("make the hard link"))
    }

    pub(super) fn fifo(&mut self, path: &EntryPath, attributes: &Attributes) -> Outcome<()> {
        let (parent, name) = self.clear(path)?;
        mknodat(
            parent,
            os(name),
            FileType::Fifo,
            Mode::from_raw_mode(0o600),
            0,
        )
        .map_err(during("make the FIFO"))?;
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fifo = openat(parent, os(name), flags, Mode::empty()).map_err(during("open"))?;
        dress(&fifo, attributes)?;
        futimens(&fifo, &attributes.times()).map_err(during("set the time of"))
    }

    /// Hides `name` of the layers below in `parents`. This layer's entries there stay, in either
    /// order: whiteouts affect only the layers below.
    pub(super) fn whiteout(&mut self, parents: &[Vec<u8>], name: &[u8]) -> Outcome<()> {
        let parent = self.enter(parents)?;
        match present(parent, name)? {
            Present::Nothing => mknodat(
                parent,
                os(name),
                FileType::CharacterDevice,
                Mode::empty(),
                0,
            )
            .map_err(during("make the whiteout")),
            Present::Directory => set_opaque(&open_directory(parent, name)?),
            Present::Whiteout | Present::Other(_) => Ok(()),
        }
    }

    /// Hides everything that the layers below have in the directory.
    pub(super) fn opaque(&mut self, directory: &[Vec<u8>]) -> Outcome<()> {
        if directory.is_empty() {
            self.root_is_opaque = true;
            return Ok(());
        }
        self.enter(directory)?;
        let (name, parents) = directory.split_last().expect("is not the root");
        let parent = self.enter(parents)?;
        set_opaque(&open_directory(parent, name)?)
    }

    pub(super) fn set_directory_time(
        &mut self,
        path: &EntryPath,
        modified: Timespec,
    ) -> Outcome<()> {
        let times = Timestamps {
            last_access: modified,
            last_modification: modified,
        };
        let Some((parents, name)) = path.split() else {
            return futimens(&self.root, &times).map_err(during("set the time of"));
        };
        let parent = self.enter(parents)?;
        // Entries that replace a directory with another kind of file are refused.
        utimensat(parent, os(name), &times, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(during("set the time of"))
    }

    /// The directory of an entry and its name there, with the name free.
    fn clear<'a>(&'a mut self, path: &'a EntryPath) -> Outcome<(BorrowedFd<'a>, &'a [u8])> {
        let Some((parents, name)) = path.split() else {
            return Err(Refusal::RootNotDirectory.into());
        };
        let parent = self.enter(parents)?;
        match present(parent, name)? {
            Present::Nothing => {}
            Present::Directory => return Err(Refusal::ReplacesDirectory.into()),
            Present::Whiteout | Present::Other(_) => remove(parent, name)?,
        }
        Ok((parent, name))
    }

    fn look_up(&self, names: &[Vec<u8>]) -> Result<OwnedFd, Errno> {
        if names.is_empty() {
            return rustix::io::fcntl_dupfd_cloexec(&self.root, 0);
        }
        let path = names.join(&b'/');
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        beneath::open(&self.root, Path::new(os(&path)), flags)
    }

    /// Opens a directory; creates it and its parents if they are missing.
    fn enter(&mut self, names: &[Vec<u8>]) -> Outcome<BorrowedFd<'_>> {
        let known = matches!(&self.recent, Some((path, _)) if path == names);
        if !known {
            let directory = match self.look_up(names) {
                Ok(directory) => directory,
                Err(Errno::LOOP) => return Err(Refusal::ThroughSymlink.into()),
                Err(Errno::NOENT | Errno::NOTDIR) => self.make_parents(names)?,
                Err(errno) => return Err(during("find the directory of")(errno)),
            };
            self.recent = Some((names.to_vec(), directory));
        }
        let (_, directory) = self.recent.as_ref().expect("was set above");
        Ok(directory.as_fd())
    }

    fn make_parents(&self, names: &[Vec<u8>]) -> Outcome<OwnedFd> {
        let mut directory = self.look_up(&[]).map_err(during("open the root of"))?;
        for name in names {
            let present = present(directory.as_fd(), name)?;
            if let Present::Other(stat) = &present {
                return Err(match FileType::from_raw_mode(stat.st_mode) {
                    FileType::Symlink => Refusal::ThroughSymlink.into(),
                    _ => Refusal::ThroughFile.into(),
                });
            }
            directory = make_directory(directory.as_fd(), name, &present)?;
        }
        Ok(directory)
    }
}

/// Opens a directory; makes it if it is missing. In place of a whiteout it hides what the layers below have there.
fn make_directory(parent: BorrowedFd<'_>, name: &[u8], present: &Present) -> Outcome<OwnedFd> {
    if let Present::Directory = present {
        return open_directory(parent, name);
    }
    let opaque = matches!(present, Present::Whiteout);
    if opaque {
        remove(parent, name)?;
    }
    mkdirat(parent, os(name), IMPLIED_DIRECTORY).map_err(during("make the directory"))?;
    let directory = open_directory(parent, name)?;
    // Independent of the umask.
    fchmod(&directory, IMPLIED_DIRECTORY).map_err(during("set the mode of"))?;
    if opaque {
        set_opaque(&directory)?;
    }
    Ok(directory)
}

/// Sets a written file's attributes and, from `capability`, its file capabilities.
pub(super) fn finish_file(
    file: &OwnedFd,
    attributes: &Attributes,
    capability: Option<&[u8]>,
) -> Outcome<()> {
    dress(file, attributes)?;
    // After the owner, whose change drops them.
    if let Some(capability) = capability {
        match fsetxattr(file, "security.capability", capability, XattrFlags::empty()) {
            Ok(()) => {}
            Err(Errno::INVAL) => return Err(Refusal::BadCapability.into()),
            Err(errno) => return Err(during("set the capabilities of")(errno)),
        }
    }
    futimens(file, &attributes.times()).map_err(during("set the time of"))
}

/// Whether overlayfs treats the directory as opaque.
pub(crate) fn is_opaque(directory: impl AsFd) -> Result<bool, Errno> {
    let mut value = [0_u8; 8];
    match fgetxattr(directory, OPAQUE_XATTR, &mut value[..]) {
        Ok(length) => Ok(&value[..length] == b"y"),
        Err(Errno::NODATA | Errno::NOTSUP | Errno::RANGE) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Whether this is overlayfs's mark of a removed file.
pub(crate) fn is_whiteout(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice && stat.st_rdev == 0
}

/// Owner first: changing it clears the set-user-id bit that the mode may have.
fn dress(file: &OwnedFd, attributes: &Attributes) -> Outcome<()> {
    let (uid, gid) = attributes.owner();
    fchown(file, uid, gid).map_err(during("set the owner of"))?;
    fchmod(file, Mode::from_raw_mode(attributes.mode & 0o7777)).map_err(during("set the mode of"))
}

fn open_directory(parent: impl AsFd, name: &[u8]) -> Outcome<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(parent, os(name), flags, Mode::empty()).map_err(during("open the directory"))
}

fn set_opaque(directory: &OwnedFd) -> Outcome<()> {
    fsetxattr(directory, OPAQUE_XATTR, b"y", XattrFlags::empty()).map_err(during("mark as opaque"))
}

fn present(parent: BorrowedFd<'_>, name: &[u8]) -> Outcome<Present> {
    match statat(parent, os(name), AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) if is_whiteout(&stat) => Ok(Present::Whiteout),
        Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => {
            Ok(Present::Directory)
        }
        Ok(stat) => Ok(Present::Other(stat)),
        Err(Errno::NOENT) => Ok(Present::Nothing),
        Err(errno) => Err(during("look at")(errno)),
    }
}

fn remove(parent: BorrowedFd<'_>, name: &[u8]) -> Outcome<()> {
    unlinkat(parent, os(name), AtFlags::empty()).map_err(during("replace"))
}

fn os(bytes: &[u8]) -> &OsStr {
    OsStr::from_bytes(bytes)
}
