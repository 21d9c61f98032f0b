//! Checks a start's binds against the node's allow-list, with the file system as it is now.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use conman_core::{Bind, BindError, bind_root};
use conman_linux::open_beneath;
use conman_runtime::BindPlan;
use rustix::fs::{
    AtFlags, Gid, Mode, OFlags, RenameFlags, Uid, fchmod, fchown, mkdirat, openat, renameat_with,
    unlinkat,
};
use rustix::io::Errno;

/// Why a bind is refused. The text is for the client that requested the session.
#[derive(Debug)]
pub(crate) enum BadBind {
    /// The record of an older conman, or one with other rules.
    Form(String, BindError),
    NotAllowed(PathBuf),
    Missing(PathBuf),
    Symlink(PathBuf),
    Open(PathBuf, io::Error),
    Create(PathBuf, io::Error),
}

impl fmt::Display for BadBind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Form(text, error) => write!(formatter, "the bind `{text}` is not valid: {error}"),
            Self::NotAllowed(path) => write!(
                formatter,
                "the bind's source {} is not in a directory of binds.allow",
                path.display()
            ),
            Self::Missing(path) => write!(
                formatter,
                "the bind's source {} does not exist; make it first, or set `create` in [binds] of \
                 the node's configuration, which makes directories that are named like their session",
                path.display()
            ),
            Self::Create(path, error) => write!(
                formatter,
                "the bind's source {} cannot be made: {error}",
                path.display()
            ),
            Self::Symlink(path) => write!(
                formatter,
                "the bind's source {} leads through a symbolic link, which is not allowed; name \
                 the place itself",
                path.display()
            ),
            Self::Open(path, error) => {
                write!(
                    formatter,
                    "the bind's source {} cannot be opened: {error}",
                    path.display()
                )
            }
        }
    }
}

/// A directory that is made where a session's source is missing.
#[derive(Debug, Clone)]
pub(crate) struct NewSource {
    /// The session's id; no other name is made.
    pub(crate) name: String,
    pub(crate) mode: u32,
    /// User and group on the host.
    pub(crate) owner: u32,
}

/// Opens every source below its root, and makes it if `new` allows that. Blocks on the file system.
pub(crate) fn check(
    binds: &[String],
    roots: &[PathBuf],
    new: Option<&NewSource>,
) -> Result<Vec<BindPlan>, BadBind> {
    binds
        .iter()
        .map(|bind| check_one(bind, roots, new))
        .collect()
}

fn check_one(text: &str, roots: &[PathBuf], new: Option<&NewSource>) -> Result<BindPlan, BadBind> {
    let bind = Bind::parse(text).map_err(|error| BadBind::Form(text.to_owned(), error))?;
    let Some((root, below)) = bind_root(roots, &bind.source) else {
        return Err(BadBind::NotAllowed(bind.source));
    };
    let is_missing = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
    let mut opened = open_beneath(root, &below);
    if let Some(new) = new
        && opened.as_ref().is_err_and(is_missing)
        && below.file_name() == Some(new.name.as_ref())
    {
        create(root, &below, new).map_err(|error| BadBind::Create(bind.source.clone(), error))?;
        opened = open_beneath(root, &below);
    }
    match opened {
        Ok(_) => Ok(BindPlan {
            root: root.to_owned(),
            below,
            target: bind.target,
            read_only: bind.read_only,
        }),
        Err(error) if is_missing(&error) => Err(BadBind::Missing(bind.source)),
        Err(error) if error.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => {
            Err(BadBind::Symlink(bind.source))
        }
        Err(error) => Err(BadBind::Open(bind.source, error)),
    }
}

/// Makes a directory whose parent exists. It gets its name last, so that it is complete under that even
/// after a crash, and follows no link. One that has appeared meanwhile stays as it is.
fn create(root: &Path, below: &Path, new: &NewSource) -> io::Result<()> {
    let parent = open_beneath(root, below.parent().unwrap_or(Path::new("")))?;
    let draft = format!(".{}.new", new.name);
    match mkdirat(&parent, &draft, Mode::RWXU) {
        // An interrupted start has left it.
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(error.into()),
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = openat(&parent, &draft, flags, Mode::empty())?;
    let owner = (Uid::from_raw(new.owner), Gid::from_raw(new.owner));
    fchown(&directory, Some(owner.0), Some(owner.1))?;
    fchmod(&directory, Mode::from_raw_mode(new.mode))?;
    match renameat_with(&parent, &draft, &parent, &new.name, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(()),
        Err(Errno::EXIST) => Ok(unlinkat(&parent, &draft, AtFlags::REMOVEDIR)?),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn a_missing_directory_of_the_session_is_made_with_its_owner_and_nothing_else_is() {
        let root = tempfile::tempdir().expect("a directory");
        let outside = tempfile::tempdir().expect("a directory");
        std::os::unix::fs::symlink(outside.path(), root.path().join("link")).expect("linked");
        // As an interrupted start leaves it.
        std::fs::create_dir(root.path().join(".alice.new")).expect("made");
        let roots = [root.path().to_owned()];
        let own = nix::unistd::geteuid().as_raw();
        let new = NewSource {
            name: "alice".to_owned(),
            mode: 0o750,
            owner: own,
        };
        let bind = |name: &str| [format!("{}/{name}:/work", root.path().display())];
        check(&bind("alice"), &roots, Some(&new)).expect("made");
        let made = std::fs::metadata(root.path().join("alice")).expect("there");
        assert_eq!((made.mode() & 0o7777, made.uid()), (0o750, own));
        assert!(!root.path().join(".alice.new").exists());
        std::fs::write(root.path().join("alice/file"), "x").expect("written");
        check(&bind("alice"), &roots, Some(&new)).expect("kept");
        assert!(root.path().join("alice/file").exists());
        for other in ["bob", "none/alice", "link/alice"] {
            let error = check(&bind(other), &roots, Some(&new)).expect_err(other);
            assert!(!error.to_string().is_empty());
        }
        assert_eq!(
            std::fs::read_dir(outside.path()).expect("readable").count(),
            0
        );
        check(&bind("bob"), &roots, None).expect_err("it is not to be made");
    }

    #[test]
    fn a_source_must_exist_below_a_root_and_lead_through_no_link() {
        let root = tempfile::tempdir().expect("a directory");
        let outside = tempfile::tempdir().expect("a directory");
        std::fs::create_dir(root.path().join("alice")).expect("made");
        std::os::unix::fs::symlink(outside.path(), root.path().join("link")).expect("linked");
        let roots = [root.path().to_owned()];
        let bind = |name: &str, rest: &str| format!("{}/{name}{rest}", root.path().display());

        let good = check(&[bind("alice", ":/work:ro")], &roots, None).expect("allowed");
        assert_eq!(good.len(), 1);
        assert_eq!(
            (good[0].source(), good[0].read_only),
            (root.path().join("alice"), true)
        );
        let whole = format!("{}:/work", root.path().display());
        let whole = check(&[whole], &roots, None).expect("allowed");
        assert_eq!(whole[0].source(), root.path());
        for (name, words) in [("bob", "does not exist"), ("link", "symbolic link")] {
            let error = check(&[bind(name, ":/work")], &roots, None).expect_err(name);
            assert!(error.to_string().contains(words), "{error}");
        }
        let elsewhere = format!("{}:/work", outside.path().display());
        let error = check(&[elsewhere], &roots, None).expect_err("outside");
        assert!(error.to_string().contains("binds.allow"), "{error}");
    }
}
