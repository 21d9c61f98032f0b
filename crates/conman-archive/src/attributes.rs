//! Extended attributes, as PAX records.

use std::io;
use std::os::fd::AsFd;

use rustix::fs::{XattrFlags, fgetxattr, flistxattr, fsetxattr};
use rustix::io::Errno;

/// The prefix of PAX records for extended attributes, as GNU tar and bsdtar write them.
const RECORD_PREFIX: &str = "SCHILY.xattr.";

/// The attributes that any owner of a file may set. Others give rights, or belong to the kernel.
const NAME_PREFIX: &str = "user.";

/// Maximum bytes of the names of a file's attributes, and of a value: the kernel's limits.
const MAX_BYTES: usize = 64 << 10;

/// Maximum bytes of all values of a file that are kept; those after it are not.
const MAX_FILE_BYTES: usize = 1 << 20;

/// A record's name and value.
pub(crate) type Record = (String, Vec<u8>);

/// The file's attributes as records; none where the file system has none.
pub(crate) fn read(file: impl AsFd) -> io::Result<Vec<Record>> {
    let mut names = vec![0_u8; MAX_BYTES];
    let length = match flistxattr(&file, &mut names[..]) {
        Ok(length) => length,
        Err(Errno::NOTSUP | Errno::RANGE) => return Ok(Vec::new()),
        Err(errno) => return Err(errno.into()),
    };
    let mut records = Vec::new();
    let mut value = vec![0_u8; MAX_BYTES];
    let mut left = MAX_FILE_BYTES;
    for name in names[..length].split(|byte| *byte == 0) {
        let Ok(name) = str::from_utf8(name) else {
            continue;
        };
        if !is_kept(name) {
            continue;
        }
        // Removed meanwhile.
        let Ok(length) = fgetxattr(&file, name, &mut value[..]) else {
            continue;
        };
        let Some(rest) = left.checked_sub(length) else {
            break;
        };
        // Many readers end a record at the first newline.
        if value[..length].contains(&b'\n') {
            continue;
        }
        left = rest;
        records.push((format!("{RECORD_PREFIX}{name}"), value[..length].to_vec()));
    }
    Ok(records)
}

/// Sets the attribute of a record, if it is one that is kept and the file system has room for it.
pub(crate) fn write(file: impl AsFd, record: &str, value: &[u8]) -> io::Result<()> {
    let name = record.strip_prefix(RECORD_PREFIX).unwrap_or_default();
    if !is_kept(name) {
        return Ok(());
    }
    match fsetxattr(file, name, value, XattrFlags::empty()) {
        Ok(())
        | Err(
            Errno::NOTSUP
            | Errno::PERM
            | Errno::ACCESS
            | Errno::NOSPC
            | Errno::TOOBIG
            | Errno::RANGE,
        ) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// A name with `=` would end early in a record.
fn is_kept(name: &str) -> bool {
    name.starts_with(NAME_PREFIX) && !name.contains(['=', '\0'])
}
