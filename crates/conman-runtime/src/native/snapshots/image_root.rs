//! Copies an image into a directory, as an overlay of its layers shows it.

use std::io::{self, Read as _};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Command, Stdio};

use conman_linux::{MountAttributes, NewFilesystem};
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, chmodat, mkdirat, openat, statat, unlinkat,
};
use rustix::io::Errno;

/// Directories that every container mounts on, parents first, and a mode if it matters.
const MOUNT_POINTS: [(&str, Option<u32>); 4] = [
    ("proc", None),
    ("sys", None),
    ("dev", None),
    ("dev/shm", Some(0o1777)),
];

/// Most of what `cp` reports that is read.
const MAX_ERROR_BYTES: u64 = 4 * 1024;

/// Copies the layers, the topmost first, with owners, modes, times, extended attributes and hard links.
///
/// The image is hostile, but nothing changes it meanwhile, and `cp` follows none of its links.
pub(super) fn copy(layers: &[&Path], target: &OwnedFd) -> io::Result<()> {
    let mut copying = Command::new("cp")
        .args(["--archive", "--no-target-directory"])
        .args(["/proc/self/fd/0/.", "/proc/self/fd/1/."])
        .env("LC_ALL", "C")
        .stdin(Stdio::from(merged(layers)?))
        .stdout(Stdio::from(target.try_clone()?))
        .stderr(Stdio::piped())
        .spawn()?;
    let mut errors = Vec::new();
    // It reports each file that fails, and ends by SIGPIPE behind the bound.
    let read = match copying.stderr.take() {
        Some(pipe) => pipe.take(MAX_ERROR_BYTES).read_to_end(&mut errors),
        None => Ok(0),
    };
    let copied = copying.wait()?;
    read?;
    if !copied.success() {
        let errors = String::from_utf8_lossy(&errors);
        let first = errors.lines().next().unwrap_or_default();
        let is_full = [Errno::NOSPC, Errno::DQUOT].into_iter().find(|errno| {
            let text = match *errno {
                Errno::DQUOT => "Disk quota exceeded",
                _ => "No space left on device",
            };
            errors.contains(text)
        });
        return Err(match is_full {
            Some(errno) => errno.into(),
            None => io::Error::other(format!("cannot copy the image: {first}")),
        });
    }
    MOUNT_POINTS
        .iter()
        .try_for_each(|(name, mode)| make_mount_point(target, name, *mode))
}

/// What an overlay of the layers shows, read-only.
fn merged(layers: &[&Path]) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let open = |layer: &&Path| openat(CWD, *layer, flags, Mode::empty());
    // One layer alone is no overlay.
    if let [only] = layers {
        return Ok(open(only)?);
    }
    let overlay = NewFilesystem::open("overlay")?;
    for layer in layers {
        overlay.set_fd("lowerdir+", open(layer)?)?;
    }
    let mount = overlay.mount(MountAttributes::MOUNT_ATTR_RDONLY)?;
    Ok(openat(mount.as_fd(), ".", flags, Mode::empty())?)
}

/// Something else of that name in the image is removed.
fn make_mount_point(root: &OwnedFd, name: &str, mode: Option<u32>) -> io::Result<()> {
    match statat(root, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(found) if FileType::from_raw_mode(found.st_mode).is_dir() => {}
        Ok(_) => {
            unlinkat(root, name, AtFlags::empty())?;
            mkdirat(root, name, Mode::from_raw_mode(0o755))?;
        }
        Err(Errno::NOENT) => mkdirat(root, name, Mode::from_raw_mode(0o755))?,
        Err(errno) => return Err(errno.into()),
    }
    if let Some(mode) = mode {
        // Not a link: it is a directory, in one.
        chmodat(root, name, Mode::from_raw_mode(mode), AtFlags::empty())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use super::*;

    #[test]
    fn every_mount_point_is_a_directory_whatever_the_image_has_there() {
        let directory = tempfile::tempdir().expect("a directory");
        let root = directory.path();
        symlink("/etc", root.join("dev")).expect("linked");
        fs::write(root.join("proc"), "").expect("written");
        let opened = OwnedFd::from(fs::File::open(root).expect("open"));
        for _ in 0..2 {
            for (name, mode) in MOUNT_POINTS {
                make_mount_point(&opened, name, mode).expect(name);
                let data = fs::symlink_metadata(root.join(name)).expect(name);
                assert!(data.is_dir(), "{name}");
            }
        }
        let shared = fs::metadata(root.join("dev/shm")).expect("made");
        assert_eq!(shared.permissions().mode() & 0o7777, 0o1777);
    }

    #[test]
    fn a_layer_is_copied_with_its_links_and_modes() {
        let directory = tempfile::tempdir().expect("a directory");
        let (layer, target) = (directory.path().join("layer"), directory.path().join("to"));
        for path in [&layer, &target] {
            fs::create_dir(path).expect("made");
        }
        fs::write(layer.join("program"), "x").expect("written");
        fs::set_permissions(layer.join("program"), fs::Permissions::from_mode(0o751)).expect("set");
        fs::hard_link(layer.join("program"), layer.join("same")).expect("linked");
        symlink("/etc/shadow", layer.join("link")).expect("linked");
        let opened = OwnedFd::from(fs::File::open(&target).expect("open"));
        copy(&[layer.as_path()], &opened).expect("copied");
        let program = fs::metadata(target.join("program")).expect("there");
        assert_eq!((program.mode() & 0o7777, program.nlink()), (0o751, 2));
        let link = fs::read_link(target.join("link")).expect("a link");
        assert_eq!(link, Path::new("/etc/shadow"));
        assert!(target.join("dev/shm").is_dir());
    }
}
