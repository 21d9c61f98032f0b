//! Whose a cgroup is that was made before its container had a name.
//!
//! Cgroups of the unified hierarchy cannot be renamed, so such a cgroup keeps the name that it was made with. Its
//! container's name is an extended attribute of it, which only root of the host can read.

use std::io;
use std::path::Path;

use rustix::fs::{XattrFlags, getxattr, setxattr};

use crate::cgroups::Cgroups;
use crate::session_cgroup::SessionCgroup;

const ATTRIBUTE: &str = "trusted.conman";

/// Longest label: a container's name has at most 112 bytes.
const MAX_BYTES: usize = 256;

impl SessionCgroup {
    /// Sets the name of the container in it; empty while it has none. An error where the hierarchy that freezes takes
    /// no attributes (v1 without the mount option `xattr`).
    pub fn label(&self, name: &str) -> io::Result<()> {
        let directory = self.first_made().ok_or(io::ErrorKind::NotFound)?;
        Ok(setxattr(
            directory,
            ATTRIBUTE,
            name.as_bytes(),
            XattrFlags::empty(),
        )?)
    }
}

impl Cgroups {
    /// The name of the container in a cgroup, if the cgroup was made before that was known; empty while it has none.
    #[must_use]
    pub fn label(&self, path: &str) -> Option<String> {
        let directories = self.directories(path);
        directories.iter().find_map(|directory| read(directory))
    }
}

fn read(directory: &Path) -> Option<String> {
    let mut bytes = [0_u8; MAX_BYTES];
    let length = getxattr(directory, ATTRIBUTE, &mut bytes[..]).ok()?;
    String::from_utf8(bytes.get(..length)?.to_vec()).ok()
}
