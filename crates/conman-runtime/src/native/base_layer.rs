//! The layer below every image's: the mount points of conman that the image lacks.
//!
//! It is made once in the image store, so that no start has to make it: creating a file through
//! an overlay costs ten times as much as directly, and uses the session's disk space and inodes.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use crate::shared::container_files::{OWN_FILES, if_present};

/// Name below the image store. It changes with the layer's content, since live sessions use the
/// one that they were started with.
const NAME: &str = "base.3";

/// Directories that containers have besides those above [`OWN_FILES`], and their modes.
const DIRECTORIES: [(&str, u32); 3] = [("proc", 0o555), ("dev", 0o755), ("dev/shm", 0o1777)];

/// The same for stores whose files belong to a range of ids.
const OWNED_NAME: &str = "base.3.owned";

/// Makes the layer if it is missing, and returns its path below `store`. Its files belong to
/// `owner`, which is root inside. Blocks.
///
/// `None` if that fails, such as on a full disk: each start then makes what its image lacks.
pub(super) fn ensure(store: &Path, owner: u32) -> Option<PathBuf> {
    let name = if owner == 0 { NAME } else { OWNED_NAME };
    match make(store, name, owner) {
        Ok(name) => Some(name),
        Err(error) => {
            let path = store.join(name);
            tracing::warn!(path = %path.display(), %error, "cannot make the common layer");
            None
        }
    }
}

fn make(store: &Path, name: &str, owner: u32) -> io::Result<PathBuf> {
    let path = store.join(name);
    if !path.is_dir() {
        let draft = store.join(format!("{name}.draft"));
        // Left by a process that died half-way.
        if_present(fs::remove_dir_all(&draft))?;
        fill(&draft)?;
        if owner != 0 {
            give(&draft, owner)?;
        }
        fs::rename(&draft, &path)?;
    }
    Ok(PathBuf::from(name))
}

/// Changes the owner of the directory and all below it, which [`fill`] has made.
fn give(directory: &Path, owner: u32) -> io::Result<()> {
    chown(directory, Some(owner), Some(owner))?;
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            give(&entry.path(), owner)?;
        } else {
            chown(entry.path(), Some(owner), Some(owner))?;
        }
    }
    Ok(())
}

fn fill(layer: &Path) -> io::Result<()> {
    directory(layer, 0o755)?;
    for (name, mode) in DIRECTORIES {
        directory(&layer.join(name), mode)?;
    }
    for (_, target) in OWN_FILES {
        let target = layer.join(target.trim_start_matches('/'));
        for above in target.ancestors().skip(1) {
            if above == layer {
                break;
            }
            fs::create_dir_all(above)?;
            fs::set_permissions(above, Permissions::from_mode(0o755))?;
        }
        File::options()
            .write(true)
            .create_new(true)
            .mode(0o644)
            .open(&target)?;
    }
    Ok(())
}

/// The mode is set separately, so that no umask narrows it.
fn directory(path: &Path, mode: u32) -> io::Result<()> {
    DirBuilder::new().mode(mode).create(path)?;
    fs::set_permissions(path, Permissions::from_mode(mode))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_has_every_place_that_is_mounted_on_and_half_of_one_is_made_anew() {
        let store = tempfile::tempdir().expect("a directory");
        fs::create_dir(store.path().join("base.3.draft")).expect("made");
        let name = ensure(store.path(), 0).expect("made");
        assert_eq!(ensure(store.path(), 0).expect("there"), name);
        let layer = store.path().join(&name);
        let mode = |path: &str| {
            let data = fs::metadata(layer.join(path)).expect(path);
            (data.is_dir(), data.permissions().mode() & 0o7777)
        };
        assert_eq!(mode("etc/hosts"), (false, 0o644));
        assert_eq!(mode("etc"), (true, 0o755));
        assert_eq!(mode("dev/shm"), (true, 0o1777));
        let entries = fs::read_dir(store.path()).expect("readable");
        assert_eq!(entries.count(), 1, "no draft is left");
        fs::write(store.path().join("file"), "").expect("written");
        assert_eq!(ensure(&store.path().join("file"), 0), None);
    }

    #[test]
    #[expect(clippy::print_stderr, reason = "tests report there what they skip")]
    fn where_a_range_owns_the_store_all_of_it_is_that_ranges() {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("skipped: changing owners needs root");
            return;
        }
        let store = tempfile::tempdir().expect("a directory");
        let plain = ensure(store.path(), 0).expect("made");
        let owned = ensure(store.path(), 70_000).expect("made next to it");
        let owner = |layer: &Path, path: &str| {
            let data = fs::metadata(store.path().join(layer).join(path)).expect(path);
            std::os::unix::fs::MetadataExt::uid(&data)
        };
        for path in ["", "etc", "etc/hosts", "dev/shm"] {
            assert_eq!(owner(&plain, path), 0, "{path}");
            assert_eq!(owner(&owned, path), 70_000, "{path}");
        }
        let mode = fs::metadata(store.path().join(&owned).join("dev/shm")).expect("made");
        assert_eq!(mode.permissions().mode() & 0o7777, 0o1777);
    }
}
