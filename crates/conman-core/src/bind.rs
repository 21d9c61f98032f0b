//! Rules for bind mounts of the host's files and directories.

use std::fmt;
use std::path::{Component, Path, PathBuf};

use conman_proto::SessionId;

/// Maximum length of a source or target in bytes (PATH_MAX with its NUL is 4,096).
const MAX_PATH_BYTES: usize = 4_095;

/// Default host id of user 0 in files of binds: 0x7f00_0000, in a range that systemd leaves unused,
/// and with its 65,536 ids below 2^31.
pub const DEFAULT_BIND_FIRST_ID: u32 = 0x7f00_0000;

/// Placeholder for the session's id in a source.
const ID_PLACEHOLDER: &str = "{id}";

/// Paths in a container that are reserved by conman or the kernel; nothing is mounted on them or
/// below.
const RESERVED_TARGETS: [&str; 6] = [
    "/proc",
    "/sys",
    "/dev",
    "/run/conman",
    "/etc/hosts",
    "/etc/resolv.conf",
];

/// A directory or file of the host that a session sees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bind {
    /// On the host: absolute, without `.`, `..` or a placeholder.
    pub source: PathBuf,
    /// In the container: absolute, without `.` or `..`.
    pub target: String,
    pub read_only: bool,
}

/// Why a bind is refused, as text that can follow `binds[0]: `.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BindError {
    #[error("write it as SOURCE:TARGET or SOURCE:TARGET:ro")]
    Form,
    #[error("the source must be an absolute path without `.`, `..` or `//`")]
    Source,
    #[error("`{{id}}` is the only placeholder, and only the source may hold it")]
    Placeholder,
    #[error("the target must be an absolute path other than `/`, without `.`, `..` or `//`")]
    Target,
    #[error("the target is reserved: nothing is mounted at or below {}", RESERVED_TARGETS.join(", "))]
    Reserved,
    #[error("a path is longer than {MAX_PATH_BYTES} bytes")]
    TooLong,
    #[error("a path holds a control character")]
    Control,
    #[error("this node allows no binds: its configuration lists no directories for them")]
    NoneAllowed,
    #[error("the source must be {} or lie below", roots.join(" or "))]
    Outside { roots: Vec<String> },
}

impl Bind {
    /// Parses `SOURCE:TARGET` or `SOURCE:TARGET:ro` from a resolved spec.
    pub fn parse(text: &str) -> Result<Self, BindError> {
        if text.len() > 2 * MAX_PATH_BYTES + 4 {
            return Err(BindError::TooLong);
        }
        if text.chars().any(char::is_control) {
            return Err(BindError::Control);
        }
        let parts: Vec<&str> = text.split(':').collect();
        let (source, target, read_only) = match parts.as_slice() {
            [source, target] => (*source, *target, false),
            [source, target, "ro"] => (*source, *target, true),
            _ => return Err(BindError::Form),
        };
        if source.len() > MAX_PATH_BYTES || target.len() > MAX_PATH_BYTES {
            return Err(BindError::TooLong);
        }
        if source.contains(['{', '}']) || target.contains(['{', '}']) {
            return Err(BindError::Placeholder);
        }
        if !is_plain(source) {
            return Err(BindError::Source);
        }
        if !is_plain(target) {
            return Err(BindError::Target);
        }
        let reserved = RESERVED_TARGETS
            .iter()
            .any(|place| Path::new(target).starts_with(place));
        if reserved {
            return Err(BindError::Reserved);
        }
        Ok(Self {
            source: PathBuf::from(source),
            target: target.to_owned(),
            read_only,
        })
    }

    /// Expands `{id}` in the source, and checks the result against the node's allow-list.
    pub(crate) fn resolve(
        text: &str,
        id: &SessionId,
        roots: &[PathBuf],
    ) -> Result<Self, BindError> {
        if roots.is_empty() {
            return Err(BindError::NoneAllowed);
        }
        let (source, rest) = text.split_once(':').ok_or(BindError::Form)?;
        let source = source.replace(ID_PLACEHOLDER, id.as_str());
        let bind = Self::parse(&format!("{source}:{rest}"))?;
        if bind_root(roots, &bind.source).is_none() {
            let roots = roots
                .iter()
                .map(|root| root.display().to_string())
                .collect();
            return Err(BindError::Outside { roots });
        }
        Ok(bind)
    }
}

impl fmt::Display for Bind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = if self.read_only { ":ro" } else { "" };
        write!(
            formatter,
            "{}:{}{suffix}",
            self.source.display(),
            self.target
        )
    }
}

/// Returns the allowed directory that is `source` or contains it, the deepest if there are several,
/// and the relative path from there, which is empty for the directory itself. A lookup that follows
/// no symbolic link starts there. `None` when no allowed directory contains `source`.
#[must_use]
pub fn bind_root<'a>(roots: &'a [PathBuf], source: &Path) -> Option<(&'a Path, PathBuf)> {
    roots
        .iter()
        .filter(|root| root.is_absolute())
        .filter_map(|root| Some((root.as_path(), source.strip_prefix(root).ok()?)))
        .filter(|(_, below)| {
            below
                .components()
                .all(|part| matches!(part, Component::Normal(_)))
        })
        .max_by_key(|(root, _)| root.components().count())
        .map(|(root, below)| (root, below.to_path_buf()))
}

/// Whether it is absolute, not `/`, and consists of plain names only.
pub(crate) fn is_plain(path: &str) -> bool {
    path.strip_prefix('/')
        .is_some_and(|rest| rest.split('/').all(|part| !matches!(part, "" | "." | "..")))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn id() -> SessionId {
        "alice".parse().expect("a session id")
    }

    fn resolve(text: &str) -> Result<Bind, BindError> {
        Bind::resolve(
            text,
            &id(),
            &[PathBuf::from("/srv/work"), PathBuf::from("/data/")],
        )
    }

    #[test]
    fn the_placeholder_becomes_the_id() {
        let bind = resolve("/srv/work/{id}/x-{id}:/work:ro").expect("a bind");
        assert_eq!(bind.to_string(), "/srv/work/alice/x-alice:/work:ro");
        assert!(bind.read_only);
    }

    #[test]
    fn an_allowed_directory_itself_may_be_bound() {
        for text in ["/srv/work:/w", "/data:/w:ro"] {
            assert_eq!(resolve(text).expect(text).to_string(), text);
        }
    }

    #[test]
    fn what_no_allowed_directory_contains_is_refused() {
        for text in ["/srv/workx/a:/w", "/srv:/w", "/etc/shadow:/w"] {
            let error = resolve(text).expect_err(text);
            assert!(
                matches!(error, BindError::Outside { .. }),
                "{text}: {error}"
            );
            assert!(error.to_string().contains("/srv/work or /data"), "{error}");
        }
        for text in [
            "/srv/work/../etc:/w",
            "/srv/work/./a:/w",
            "/srv/work//a:/w",
            "a:/w",
            ":/w",
        ] {
            assert_eq!(resolve(text), Err(BindError::Source), "{text}");
        }
        assert_eq!(
            Bind::resolve("/srv/work/a:/w", &id(), &[]),
            Err(BindError::NoneAllowed)
        );
    }

    #[test]
    fn targets_that_would_hide_the_kernel_or_conman_are_refused() {
        for target in [
            "/proc",
            "/proc/1",
            "/sys/fs",
            "/dev",
            "/dev/shm",
            "/run/conman/x",
            "/etc/hosts",
        ] {
            assert_eq!(
                resolve(&format!("/data/a:{target}")),
                Err(BindError::Reserved),
                "{target}"
            );
        }
        for target in ["", "/", "work", "/work/", "/a/../proc", "//proc", "/./proc"] {
            assert_eq!(
                resolve(&format!("/data/a:{target}")),
                Err(BindError::Target),
                "{target}"
            );
        }
        for target in ["/process", "/developer", "/run", "/etc"] {
            assert!(resolve(&format!("/data/a:{target}")).is_ok(), "{target}");
        }
    }

    #[test]
    fn other_placeholders_and_other_options_are_refused() {
        for text in [
            "/data/{name}:/w",
            "/data/{id:/w",
            "/data/}:/w",
            "/data/a:/{id}",
        ] {
            assert_eq!(resolve(text), Err(BindError::Placeholder), "{text}");
        }
        for text in [
            "",
            "/data/a",
            "/data/a:/w:rw",
            "/data/a:/w:ro:ro",
            "/data/a:/w:",
        ] {
            assert_eq!(resolve(text), Err(BindError::Form), "{text}");
        }
        assert_eq!(resolve("/data/a\n:/w"), Err(BindError::Control));
    }

    #[test]
    fn the_deepest_allowed_directory_is_where_the_lookup_starts() {
        let roots = [
            PathBuf::from("/a"),
            PathBuf::from("/a/b"),
            PathBuf::from("relative"),
        ];
        assert_eq!(
            bind_root(&roots, Path::new("/a/b/c")),
            Some((Path::new("/a/b"), PathBuf::from("c")))
        );
        assert_eq!(
            bind_root(&roots, Path::new("/a/b")),
            Some((Path::new("/a/b"), PathBuf::new()))
        );
        assert_eq!(bind_root(&roots, Path::new("/")), None);
    }

    proptest! {
        #[test]
        fn an_accepted_bind_lies_below_a_root_and_reads_back(
            source in "(/data|/srv/work|/srv)?(/(\\.\\.|\\.|a|\\{id\\}|b c)?){0,4}",
            target in "(/(\\.\\.|\\.|proc|w)?){0,3}",
            suffix in "(:ro|:rw)?",
        ) {
            if let Ok(bind) = resolve(&format!("{source}:{target}{suffix}")) {
                let below = |root: &str| bind.source.starts_with(root);
                prop_assert!(below("/srv/work") || below("/data"));
                prop_assert!(bind.source.components().all(|c| c != Component::ParentDir));
                prop_assert_eq!(Bind::parse(&bind.to_string()), Ok(bind));
            }
        }
    }
}
