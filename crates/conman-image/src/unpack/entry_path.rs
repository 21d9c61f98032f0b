//! Checks the paths of an archive's entries.

use crate::limits::ImageLimits;
use crate::unpack::error::Refusal;

/// Longest name in Linux file systems.
const MAX_NAME_BYTES: usize = 255;

/// A path from an archive as plain names below the layer's root; empty for the root itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct EntryPath {
    pub(super) names: Vec<Vec<u8>>,
}

impl EntryPath {
    /// `.` and repeated slashes are dropped; an absolute path is one below the root, as every builder's reader
    /// has it. `..` is refused even if it would stay inside: no proper tool writes it, and readers disagree on
    /// its meaning.
    pub(super) fn parse(raw: &[u8], limits: &ImageLimits) -> Result<Self, Refusal> {
        if raw.is_empty() {
            return Err(Refusal::EmptyPath);
        }
        if raw.len() > limits.max_path_bytes {
            return Err(Refusal::PathTooLong(limits.max_path_bytes));
        }
        if raw.contains(&0) {
            return Err(Refusal::NulByte);
        }
        let names: Vec<Vec<u8>> = raw
            .split(|byte| *byte == b'/')
            .filter(|name| !name.is_empty() && *name != b".")
            .map(<[u8]>::to_vec)
            .collect();
        if names.len() > limits.max_depth {
            return Err(Refusal::TooDeep(limits.max_depth));
        }
        for name in &names {
            if name == b".." {
                return Err(Refusal::ParentReference);
            }
            if name.len() > MAX_NAME_BYTES {
                return Err(Refusal::NameTooLong);
            }
        }
        Ok(Self { names })
    }

    /// The last name and the path of its parent; `None` for the root.
    pub(super) fn split(&self) -> Option<(&[Vec<u8>], &[u8])> {
        let (name, parents) = self.names.split_last()?;
        Some((parents, name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(raw: &str) -> Result<String, Refusal> {
        EntryPath::parse(raw.as_bytes(), &ImageLimits::default())
            .map(|path| String::from_utf8(path.names.join(&b'/')).expect("UTF-8 went in"))
    }

    #[test]
    fn dots_and_repeated_slashes_are_dropped() {
        for (raw, plain) in [
            ("./a//b/./c/", "a/b/c"),
            ("./", ""),
            (".", ""),
            ("/", ""),
            ("/etc/passwd", "etc/passwd"),
            ("//etc", "etc"),
            ("..a/b..", "..a/b.."),
        ] {
            assert_eq!(parse(raw).expect(raw), plain);
        }
    }

    #[test]
    fn what_could_leave_the_root_is_refused() {
        for raw in ["..", "/../a", "../a", "a/../b", "a/..", "./../a"] {
            assert!(matches!(parse(raw), Err(Refusal::ParentReference)), "{raw}");
        }
        assert!(matches!(parse("a\0b"), Err(Refusal::NulByte)));
        assert!(matches!(parse(""), Err(Refusal::EmptyPath)));
    }

    #[test]
    fn lengths_and_depth_are_bounded() {
        assert!(parse(&"n".repeat(255)).is_ok());
        assert!(matches!(parse(&"n".repeat(256)), Err(Refusal::NameTooLong)));
        assert!(parse(&"d/".repeat(128)).is_ok());
        assert!(matches!(
            parse(&"d/".repeat(129)),
            Err(Refusal::TooDeep(128))
        ));
        let long = format!("{}/", "n".repeat(250)).repeat(17);
        assert!(matches!(parse(&long), Err(Refusal::PathTooLong(4095))));
    }
}
