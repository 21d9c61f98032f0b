//! The layer below every image's: what conman mounts on, where the image has nothing there.
//!
//! Made once in the image store, so that no start has to make it: making a file through an overlay
//! costs ten times as much as beside one, and takes the session's disk space and inodes.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::container_files::{OWN_DIRECTORY, OWN_FILES};

/// Below the image store. Another name when what is in it changes, since live sessions use the
/// one that they were started with.
const NAME: &str = "base.1";

/// Directories that containers have besides those above [`OWN_FILES`], and their modes.
const DIRECTORIES: [(&str, u32); 3] = [("proc", 0o555), ("dev", 0o755), ("dev/shm", 0o1777)];

/// Makes the layer where it is missing, and returns its path below `store`. Blocks.
///
/// `None` where that fails, such as on a full disk: each start makes what its image lacks then.
pub(super) fn ensure(store: &Path) -> Option<PathBuf> {
    match make(store) {
        Ok(name) => Some(name),
        Err(error) => {
            let path = store.join(NAME);
            tracing::warn!(path = %path.display(), %error, "starts go without the common layer");
            None
        }
    }
}

fn make(store: &Path) -> io::Result<PathBuf> {
    let path = store.join(NAME);
    if !path.is_dir() {
        let draft = store.join(format!("{NAME}.draft"));
        remove(&draft)?;
        fill(&draft)?;
        fs::rename(&draft, &path)?;
    }
    Ok(PathBuf::from(NAME))
}

/// What a process that died in the middle has left.
fn remove(draft: &Path) -> io::Result<()> {
    match fs::remove_dir_all(draft) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn fill(layer: &Path) -> io::Result<()> {
    directory(layer, 0o755)?;
    for (name, mode) in DIRECTORIES {
        directory(&layer.join(name), mode)?;
    }
    for (name, target) in OWN_FILES {
        let target = layer.join(target.trim_start_matches('/'));
        for above in target.ancestors().skip(1) {
            if above == layer {
                break;
            }
            fs::create_dir_all(above)?;
            fs::set_permissions(above, Permissions::from_mode(0o755))?;
        }
        if name == OWN_DIRECTORY {
            directory(&target, 0o755)?;
        } else {
            File::options()
                .write(true)
                .create_new(true)
                .mode(0o644)
                .open(&target)?;
        }
    }
    Ok(())
}

/// Its mode is set apart, so that no umask narrows it.
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
        fs::create_dir(store.path().join("base.1.draft")).expect("made");
        let name = ensure(store.path()).expect("made");
        assert_eq!(ensure(store.path()).expect("there"), name);
        let layer = store.path().join(&name);
        let mode = |path: &str| {
            let data = fs::metadata(layer.join(path)).expect(path);
            (data.is_dir(), data.permissions().mode() & 0o7777)
        };
        assert_eq!(mode("etc/hosts"), (false, 0o644));
        assert_eq!(mode("run/conman"), (true, 0o755));
        assert_eq!(mode("etc"), (true, 0o755));
        assert_eq!(mode("dev/shm"), (true, 0o1777));
        let beside = fs::read_dir(store.path()).expect("readable");
        assert_eq!(beside.count(), 1, "no draft is left");
        fs::write(store.path().join("file"), "").expect("written");
        assert_eq!(ensure(&store.path().join("file")), None);
    }
}
