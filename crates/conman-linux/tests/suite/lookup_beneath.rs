//! Looking up paths below a root.

use std::fs;
use std::io::ErrorKind;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use conman_linux::open_beneath;
use rustix::io::Errno;

/// What a descriptor refers to.
fn target(fd: &OwnedFd) -> PathBuf {
    fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).expect("an open descriptor")
}

/// `outside/secret`, and beside it `root/dir/file` and links out of and within the root.
fn playground() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let base = directory.path().canonicalize().expect("it exists");
    let root = base.join("root");
    fs::create_dir_all(root.join("dir")).expect("writable");
    fs::create_dir_all(base.join("outside")).expect("writable");
    fs::write(root.join("dir/file"), "inside").expect("writable");
    fs::write(base.join("outside/secret"), "outside").expect("writable");
    symlink("../outside", root.join("out")).expect("writable");
    symlink("/etc", root.join("absolute")).expect("writable");
    symlink("dir", root.join("within")).expect("writable");
    symlink("missing", root.join("dangling")).expect("writable");
    (directory, root)
}

#[test]
fn files_and_directories_below_the_root_are_opened() {
    let (_directory, root) = playground();
    for path in ["dir", "dir/file"] {
        let opened = open_beneath(&root, Path::new(path)).expect(path);
        assert_eq!(target(&opened), root.join(path));
        assert_eq!(
            open_beneath(&root, Path::new(""))
                .map(|fd| target(&fd))
                .expect("root"),
            root
        );
    }
    let missing = open_beneath(&root, Path::new("nothing")).expect_err("missing");
    assert_eq!(missing.kind(), ErrorKind::NotFound);
}

#[test]
fn the_root_itself_may_be_reached_through_a_link() {
    let (directory, root) = playground();
    let link = directory.path().join("link-to-root");
    symlink(&root, &link).expect("writable");
    let opened = open_beneath(&link, Path::new("dir/file")).expect("below the root");
    assert_eq!(target(&opened), root.join("dir/file"));
}

#[test]
fn no_symbolic_link_below_the_root_is_followed_wherever_it_leads() {
    let (_directory, root) = playground();
    for path in [
        "out",
        "out/secret",
        "absolute",
        "absolute/passwd",
        "within",
        "within/file",
    ] {
        let error = open_beneath(&root, Path::new(path)).expect_err(path);
        assert_eq!(
            error.raw_os_error(),
            Some(Errno::LOOP.raw_os_error()),
            "{path}: {error}"
        );
    }
    assert!(open_beneath(&root, Path::new("dangling")).is_err());
}

#[test]
fn paths_that_are_not_made_of_names_are_refused() {
    let (_directory, root) = playground();
    for path in [
        "..",
        "../outside/secret",
        "dir/../../outside",
        "dir/..",
        "/etc",
        "/",
        "./dir",
    ] {
        let error = open_beneath(&root, Path::new(path)).expect_err(path);
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{path}");
    }
}
