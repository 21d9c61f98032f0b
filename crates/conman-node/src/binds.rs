//! Checks a start's binds against the node's allow-list, with the file system as it is now.

use std::fmt;
use std::io;
use std::path::PathBuf;

use conman_core::{Bind, BindError, bind_root};
use conman_linux::open_beneath;
use conman_runtime::BindPlan;
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
                "the bind's source {} does not exist; make it first",
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

/// Opens every source below its root. Blocks on the file system.
pub(crate) fn check(binds: &[String], roots: &[PathBuf]) -> Result<Vec<BindPlan>, BadBind> {
    binds.iter().map(|bind| check_one(bind, roots)).collect()
}

fn check_one(text: &str, roots: &[PathBuf]) -> Result<BindPlan, BadBind> {
    let bind = Bind::parse(text).map_err(|error| BadBind::Form(text.to_owned(), error))?;
    let Some((root, below)) = bind_root(roots, &bind.source) else {
        return Err(BadBind::NotAllowed(bind.source));
    };
    match open_beneath(root, &below) {
        Ok(_) => Ok(BindPlan {
            root: root.to_owned(),
            below,
            target: bind.target,
            read_only: bind.read_only,
        }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(BadBind::Missing(bind.source)),
        Err(error) if error.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => {
            Err(BadBind::Symlink(bind.source))
        }
        Err(error) => Err(BadBind::Open(bind.source, error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_must_exist_below_a_root_and_lead_through_no_link() {
        let root = tempfile::tempdir().expect("a directory");
        let outside = tempfile::tempdir().expect("a directory");
        std::fs::create_dir(root.path().join("alice")).expect("made");
        std::os::unix::fs::symlink(outside.path(), root.path().join("link")).expect("linked");
        let roots = [root.path().to_owned()];
        let bind = |name: &str, rest: &str| format!("{}/{name}{rest}", root.path().display());

        let good = check(&[bind("alice", ":/work:ro")], &roots).expect("allowed");
        assert_eq!(good.len(), 1);
        assert_eq!(
            (good[0].source(), good[0].read_only),
            (root.path().join("alice"), true)
        );
        let whole = format!("{}:/work", root.path().display());
        let whole = check(&[whole], &roots).expect("allowed");
        assert_eq!(whole[0].source(), root.path());
        for (name, words) in [("bob", "does not exist"), ("link", "symbolic link")] {
            let error = check(&[bind(name, ":/work")], &roots).expect_err(name);
            assert!(error.to_string().contains(words), "{error}");
        }
        let elsewhere = format!("{}:/work", outside.path().display());
        let error = check(&[elsewhere], &roots).expect_err("outside");
        assert!(error.to_string().contains("binds.allow"), "{error}");
    }
}
