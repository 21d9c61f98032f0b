//! Reads a file of a stack of directories, as an overlay of them shows it. Symbolic links are resolved inside
//! the stack.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, OFlags, fstat, readlinkat};
use rustix::io::Errno;

use crate::beneath::{open, open_file, read_bounded};
use crate::unpack::{is_opaque, is_whiteout};

/// Maximum number of symbolic links on the way to a file: the kernel's.
const MAX_LINKS: u32 = 40;

/// Maximum number of names on the way, those of links included: each is looked for in every layer.
const MAX_NAMES: u32 = 256;

/// What a name stands for.
enum Found {
    Nothing,
    Link(PathBuf),
    /// In the layer with this index.
    Other(usize),
}

/// Reads at most `limit` bytes of the regular file `path`; `None` if there is none. `roots`: the topmost first.
///
/// # Errors
/// `ELOOP` after [`MAX_LINKS`] links, `ENAMETOOLONG` after [`MAX_NAMES`] names; a longer file; a directory or a
/// device.
pub(crate) fn read(roots: &[OwnedFd], path: &Path, limit: u64) -> io::Result<Option<Vec<u8>>> {
    let mut resolved = PathBuf::new();
    let mut layer = 0;
    let mut links = 0;
    let mut names: VecDeque<OsString> = path.iter().map(OsStr::to_owned).collect();
    let mut visited = 0;
    while let Some(name) = names.pop_front() {
        visited += 1;
        if visited > MAX_NAMES {
            return Err(Errno::NAMETOOLONG.into());
        }
        match name.as_bytes() {
            b"/" => resolved.clear(),
            b"." => {}
            b".." => {
                resolved.pop();
            }
            _ => match look_up(roots, &resolved, &name)? {
                Found::Nothing => return Ok(None),
                Found::Link(_) if links == MAX_LINKS => return Err(Errno::LOOP.into()),
                Found::Link(target) => {
                    links += 1;
                    for name in target.iter().rev() {
                        names.push_front(name.to_owned());
                    }
                }
                Found::Other(found) => {
                    resolved.push(name);
                    layer = found;
                }
            },
        }
    }
    let file = open_file(&roots[layer], &resolved)?;
    read_bounded(file, limit).map(Some)
}

/// Looks for `name` in a directory whose path has no symbolic links.
fn look_up(roots: &[OwnedFd], directory: &Path, name: &OsStr) -> Result<Found, Errno> {
    let path = directory.join(name);
    for (layer, root) in roots.iter().enumerate() {
        match open(root, &path, OFlags::PATH | OFlags::NOFOLLOW) {
            Ok(found) => {
                let stat = fstat(&found)?;
                if is_whiteout(&stat) {
                    return Ok(Found::Nothing);
                }
                if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink {
                    return Ok(Found::Other(layer));
                }
                let target = readlinkat(&found, "", Vec::new())?;
                return Ok(Found::Link(OsStr::from_bytes(target.as_bytes()).into()));
            }
            // Something else than a directory, which hides the layers below from here on.
            Err(Errno::NOTDIR | Errno::LOOP) => return Ok(Found::Nothing),
            Err(Errno::NOENT) => {}
            Err(errno) => return Err(errno),
        }
        if hides_layers_below(root, directory)? {
            break;
        }
    }
    Ok(Found::Nothing)
}

/// Whether the layer has the directory, or one above it, as opaque, or something else in its place.
fn hides_layers_below(root: &OwnedFd, directory: &Path) -> Result<bool, Errno> {
    for ancestor in directory
        .ancestors()
        .filter(|path| !path.as_os_str().is_empty())
    {
        match open(root, ancestor, OFlags::RDONLY | OFlags::DIRECTORY) {
            Ok(opened) if is_opaque(&opened)? => return Ok(true),
            Ok(_) | Err(Errno::NOENT) => {}
            Err(Errno::NOTDIR | Errno::LOOP) => return Ok(true),
            Err(errno) => return Err(errno),
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use rustix::fs::{CWD, Mode, XattrFlags, fsetxattr, openat};

    use super::*;

    struct Stack(tempfile::TempDir);

    impl Stack {
        fn new() -> Self {
            Self(tempfile::tempdir().expect("a directory"))
        }

        fn write(&self, path: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().expect("below")).expect("directories");
            fs::write(
                &path,
                path.to_str()
                    .expect("text")
                    .rsplit('/')
                    .nth(1)
                    .expect("two"),
            )
            .expect("written");
        }

        fn link(&self, path: &str, target: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().expect("below")).expect("directories");
            symlink(target, path).expect("linked");
        }

        /// The content of the file in the layers `top` and `low`.
        fn read(&self, path: &str) -> io::Result<Option<String>> {
            let root = |name| {
                let path = self.0.path().join(name);
                fs::create_dir_all(&path).expect("made");
                openat(CWD, &path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).expect("open")
            };
            let found = read(&[root("top"), root("low")], Path::new(path), 100)?;
            Ok(found.map(|bytes| String::from_utf8(bytes).expect("text")))
        }
    }

    #[test]
    fn links_are_resolved_inside_the_stack() {
        let stack = Stack::new();
        stack.write("low/usr/share/real/file");
        stack.link("top/etc", "/usr/../../../usr/share");
        stack.link("low/usr/share/name", "./real/file");
        stack.link("low/usr/share/host", "../../../../../../../../etc/passwd");
        stack.link("low/loop", "loop");
        let real = Some("real".to_owned());
        assert_eq!(stack.read("/etc/name").expect("read"), real);
        assert_eq!(stack.read("etc/real/file").expect("read"), real);
        assert_eq!(stack.read("etc/host").expect("read"), None);
        let looped = stack.read("loop").expect_err("endless");
        assert_eq!(looped.raw_os_error(), Some(Errno::LOOP.raw_os_error()));
        assert!(stack.read("usr/share").is_err(), "a directory");
    }

    #[test]
    fn a_layer_hides_the_ones_below() {
        let stack = Stack::new();
        for path in ["low/a/file", "low/b/c/file", "low/d/file", "low/e/file"] {
            stack.write(path);
        }
        stack.write("top/a");
        stack.link("top/e", "/d");
        assert_eq!(stack.read("a/file").expect("read"), None);
        assert_eq!(stack.read("e/file").expect("read"), Some("d".to_owned()));
        assert_eq!(stack.read("b/c/file").expect("read"), Some("c".to_owned()));
        fs::create_dir_all(stack.0.path().join("top/b/c")).expect("made");
        let above = fs::File::open(stack.0.path().join("top/b")).expect("open");
        // Only root may set the attribute.
        let name = crate::unpack::OPAQUE_XATTR;
        if fsetxattr(above, name, b"y", XattrFlags::empty()).is_ok() {
            assert_eq!(stack.read("b/c/file").expect("read"), None);
        }
    }
}
