//! Resolves an image's user, by the image's `/etc/passwd` and `/etc/group`.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;

use crate::merged;

/// Most bytes of `/etc/passwd` and `/etc/group` that are read.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Most supplementary groups: the kernel's limit (NGROUPS_MAX).
const MAX_GROUPS: usize = 65_536;

/// A user, by numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvedUser {
    pub uid: u32,
    pub gid: u32,
    /// Supplementary groups, sorted, without `gid`. Empty if a group was given.
    pub groups: Vec<u32>,
    /// The home directory, if `/etc/passwd` has one.
    pub home: Option<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum UserError {
    #[error("the image's /etc/passwd has no user {name:?}")]
    NoSuchUser { name: String },
    #[error("the image's /etc/group has no group {name:?}")]
    NoSuchGroup { name: String },
    #[error("cannot read the image's {file}")]
    Read {
        file: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("cannot open {}", path.display())]
    Open {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl UserError {
    /// Whether the image is as it is, and not the host short of something for a moment.
    fn is_of_the_image(&self) -> bool {
        let Self::Read { source, .. } = self else {
            return false;
        };
        let errno = source.raw_os_error().map(Errno::from_raw_os_error);
        matches!(
            errno,
            None | Some(Errno::LOOP | Errno::NAMETOOLONG | Errno::NXIO)
        )
    }
}

/// Resolves `user` (`name`, `uid`, `name:group`, `uid:gid`, or empty for root) against a stack of
/// directories, the topmost first: an image's [`lower directories`](crate::Image::lower_directories)
/// as well as one merged root. Symbolic links are resolved inside the stack. A numeric user or group needs
/// neither file.
pub fn resolve_user(directories: &[&Path], user: &str) -> Result<ResolvedUser, UserError> {
    let roots = directories
        .iter()
        .map(|path| open_root(path))
        .collect::<Result<Vec<_>, _>>()?;
    let (wanted, group) = match user.split_once(':') {
        Some((user, group)) => (user, Some(group).filter(|group| !group.is_empty())),
        None => (user, None),
    };
    let wanted = if wanted.is_empty() { "0" } else { wanted };
    let passwd = match read_text(&roots, "/etc/passwd") {
        Err(error) if id(wanted).is_some() && error.is_of_the_image() => String::new(),
        read => read?,
    };
    let entry = passwd
        .lines()
        .filter_map(Passwd::parse)
        // A number is always an id: a line could have it as its name and be another user's.
        .find(|entry| id(wanted).map_or(entry.name == wanted, |uid| entry.uid == uid));
    let (uid, gid) = match (&entry, id(wanted)) {
        (Some(entry), _) => (entry.uid, entry.gid),
        (None, Some(uid)) => (uid, 0),
        (None, None) => {
            return Err(UserError::NoSuchUser {
                name: wanted.chars().take(100).collect(),
            });
        }
    };
    let home = entry
        .as_ref()
        .map(|entry| entry.home.to_owned())
        .filter(|home| home.starts_with('/') && !home.contains('\0'));
    let by_number = group.map_or(id(wanted), id).is_some();
    let group_file = match read_text(&roots, "/etc/group") {
        Err(error) if by_number && error.is_of_the_image() => String::new(),
        read => read?,
    };
    let groups: Vec<Group<'_>> = group_file.lines().filter_map(Group::parse).collect();
    if let Some(wanted) = group {
        let by_name = || groups.iter().find(|group| group.name == wanted);
        let gid = id(wanted)
            .or_else(|| by_name().map(|group| group.gid))
            .ok_or_else(|| UserError::NoSuchGroup {
                name: wanted.chars().take(100).collect(),
            })?;
        return Ok(ResolvedUser {
            uid,
            gid,
            groups: Vec::new(),
            home,
        });
    }
    let name = entry.map(|entry| entry.name);
    let mut member_of: Vec<u32> = groups
        .iter()
        .filter(|group| {
            group.gid != gid
                && name.is_some_and(|name| group.members.split(',').any(|member| member == name))
        })
        .map(|group| group.gid)
        .take(MAX_GROUPS)
        .collect();
    member_of.sort_unstable();
    member_of.dedup();
    Ok(ResolvedUser {
        uid,
        gid,
        groups: member_of,
        home,
    })
}

struct Passwd<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
}

impl<'a> Passwd<'a> {
    /// Lines that do not parse are skipped, as the C library does.
    fn parse(line: &'a str) -> Option<Self> {
        let fields: Vec<&str> = line.splitn(8, ':').collect();
        Some(Self {
            name: fields.first().filter(|name| !name.is_empty())?,
            uid: id(fields.get(2)?)?,
            gid: id(fields.get(3)?)?,
            home: fields.get(5).copied().unwrap_or_default(),
        })
    }
}

struct Group<'a> {
    name: &'a str,
    gid: u32,
    members: &'a str,
}

impl<'a> Group<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let fields: Vec<&str> = line.splitn(5, ':').collect();
        Some(Self {
            name: fields.first().filter(|name| !name.is_empty())?,
            gid: id(fields.get(2)?)?,
            members: fields.get(3).copied().unwrap_or_default(),
        })
    }
}

/// A numeric id. The greatest number means "none" to the kernel.
fn id(text: &str) -> Option<u32> {
    if !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    text.parse().ok().filter(|id| *id != u32::MAX)
}

fn open_root(path: &Path) -> Result<OwnedFd, UserError> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    openat(CWD, path, flags, Mode::empty()).map_err(|errno| UserError::Open {
        path: path.to_owned(),
        source: errno.into(),
    })
}

/// The file's text; empty if it is absent.
fn read_text(roots: &[OwnedFd], file: &'static str) -> Result<String, UserError> {
    let read = merged::read(roots, Path::new(file), MAX_FILE_BYTES);
    let bytes = read.map_err(|source| UserError::Read { file, source })?;
    Ok(bytes.map_or_else(String::new, |bytes| {
        String::from_utf8_lossy(&bytes).into_owned()
    }))
}
