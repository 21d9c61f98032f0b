//! Files of the state directory that show whether the node is, or was, in a fleet: without the fleet's
//! store it must not start sessions that other nodes may have taken over.

use std::io;
use std::path::{Path, PathBuf};

use conman_linux::{remove_if_present, sync_parent};

use crate::files;

/// File with what a node has seen of its fleet's store; its content belongs to that store.
pub const SEEN: &str = "etcd-seen.json";

/// File that marks a node that has left its fleet, until it joins one again. [`SEEN`] is kept: the
/// fleet that the node joins then must not be an older one.
const LEFT: &str = "etcd-left";

/// Whether the node with this state directory has been in a fleet, so that other nodes may have
/// taken over its sessions.
pub fn was_in_fleet(state_dir: &Path) -> io::Result<bool> {
    state_dir.join(SEEN).try_exists()
}

/// The file that shows that the node with this state directory is in a fleet and has not left it
/// since.
pub fn in_fleet(state_dir: &Path) -> io::Result<Option<PathBuf>> {
    let file = state_dir.join(SEEN);
    let is = file.try_exists()? && !state_dir.join(LEFT).try_exists()?;
    Ok(is.then_some(file))
}

/// Marks the node as no longer in a fleet, durably.
pub fn leave_fleet(state_dir: &Path) -> io::Result<()> {
    let mark = state_dir.join(LEFT);
    remove_if_present(&mark)?;
    files::open_options().create_new(true).open(&mark)?;
    sync_parent(&mark)
}

/// The node is in a fleet again; `seen` is the path of its [`SEEN`].
pub fn rejoin(seen: &Path) -> io::Result<()> {
    remove_if_present(&seen.with_file_name(LEFT))
}
