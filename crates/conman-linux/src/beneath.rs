//! Opens files below a directory that they cannot leave.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, mkdirat, openat, openat2};
use rustix::io::Errno;

/// Tries while a concurrent rename keeps the kernel from checking that `..` stayed below the root
/// (openat2(2), EAGAIN).
const ATTEMPTS: usize = 32;

/// Mode of new directories, before the umask.
const NEW_DIRECTORY: Mode = Mode::from_raw_mode(0o755);

/// Opens (`O_PATH`, close-on-exec) a file or directory below `root`, for bind mounts.
///
/// The kernel refuses to leave `root` and to follow any symbolic link below it, even during concurrent
/// renames; `root` itself is the operator's and may be reached through links. `relative` must have only
/// plain names: an absolute path and `..` are refused with `InvalidInput`, an empty path is `root`.
///
/// Errors besides those of open(2): ELOOP for a symbolic link, `Unsupported` before Linux 5.6.
pub fn open_beneath(root: &Path, relative: &Path) -> io::Result<OwnedFd> {
    check_plain(relative)?;
    let root = open_root(root)?;
    if relative.as_os_str().is_empty() {
        return Ok(root);
    }
    open_component(&root, relative, OFlags::empty())
}

/// Opens (`O_PATH`, close-on-exec) what `path` names when `root` is the root directory.
///
/// Symbolic links are followed, but neither they nor `..` lead out of `root`. The links of procfs
/// to open files and directories are refused with ELOOP: they lead anywhere.
pub fn open_in_root(root: impl AsFd, path: &Path, extra: OFlags) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    resolve_path(root, path, OFlags::PATH | extra, resolve)
}

/// Like [`open_in_root`], with these flags of open(2) instead of `O_PATH`.
pub fn open_file_in_root(root: impl AsFd, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    resolve_path(root, path, flags, resolve)
}

/// Like [`open_in_root`] for a directory, which is created with its parents if missing.
pub fn create_dir_in_root(root: impl AsFd, path: &Path) -> io::Result<OwnedFd> {
    let open = |path: &Path| open_in_root(&root, path, OFlags::DIRECTORY);
    let is_missing = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
    match open(path) {
        Err(error) if is_missing(&error) => {}
        other => return other,
    }
    let mut reached = PathBuf::from("/");
    let mut directory = open(&reached)?;
    for component in path.components() {
        let name = match component {
            Component::Normal(name) => name,
            Component::RootDir | Component::CurDir => continue,
            Component::ParentDir | Component::Prefix(_) => {
                return Err(io::ErrorKind::InvalidInput.into());
            }
        };
        reached.push(name);
        directory = match open(&reached) {
            Err(error) if is_missing(&error) => {
                match mkdirat(&directory, name, NEW_DIRECTORY) {
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(errno) => return Err(errno.into()),
                }
                open(&reached)?
            }
            other => other?,
        };
    }
    Ok(directory)
}

fn check_plain(relative: &Path) -> io::Result<()> {
    if relative
        .components()
        .all(|component| matches!(component, Component::Normal(_)))
    {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::InvalidInput,
        format!("{} has a part that is not a plain name", relative.display()),
    ))
}

fn open_root(root: &Path) -> io::Result<OwnedFd> {
    Ok(openat(
        CWD,
        root,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?)
}

fn open_component(directory: &OwnedFd, relative: &Path, extra: OFlags) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    resolve_path(directory, relative, OFlags::PATH | extra, resolve)
}

fn resolve_path(
    directory: impl AsFd,
    path: &Path,
    flags: OFlags,
    resolve: ResolveFlags,
) -> io::Result<OwnedFd> {
    let flags = OFlags::CLOEXEC | flags;
    let mut last = Errno::AGAIN;
    for _ in 0..ATTEMPTS {
        match openat2(&directory, path, flags, Mode::empty(), resolve) {
            Ok(fd) => return Ok(fd),
            Err(errno @ (Errno::AGAIN | Errno::INTR)) => last = errno,
            Err(errno) => return Err(errno.into()),
        }
    }
    Err(last.into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_stay_inside_and_missing_directories_are_made_where_they_lead() {
        let outer = tempfile::tempdir().expect("a directory");
        let top = outer.path().join("root");
        std::fs::create_dir_all(top.join("run")).expect("made");
        symlink("/run", top.join("var")).expect("linked");
        symlink("../../..", top.join("up")).expect("linked");
        symlink("/nowhere", top.join("dangling")).expect("linked");
        let root = open_root(&top).expect("opened");
        create_dir_in_root(&root, Path::new("/var/a/b")).expect("made");
        assert!(top.join("run/a/b").is_dir());
        create_dir_in_root(&root, Path::new("/up/etc/c")).expect("made");
        assert!(top.join("etc/c").is_dir());
        assert!(create_dir_in_root(&root, Path::new("/dangling/d")).is_err());
        assert!(create_dir_in_root(&root, Path::new("/x/../y")).is_err());
    }

    #[test]
    fn links_of_procfs_to_open_files_are_refused() {
        let root = open_root(Path::new("/")).expect("opened");
        for path in ["/proc/self/cwd", "/proc/self/root/etc", "/proc/self/fd/0"] {
            let error = open_in_root(&root, Path::new(path), OFlags::empty());
            let error = error.expect_err(path).raw_os_error();
            assert_eq!(error, Some(Errno::LOOP.raw_os_error()), "{path}");
        }
        open_in_root(&root, Path::new("/proc/self/fd"), OFlags::DIRECTORY).expect("opened");
    }
}
