//! The keys that detach from a terminal.

use std::fmt;
use std::str::FromStr;

/// As with Docker.
pub(crate) const DETACH_KEYS: &str = "ctrl-p,ctrl-q";

/// Most keys in the sequence.
const MOST: usize = 8;

/// The keys that detach from a terminal, typed one after the other. If complete, none of them
/// reaches the program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DetachKeys(Vec<u8>);

impl FromStr for DetachKeys {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.is_empty() {
            return Ok(Self(Vec::new()));
        }
        let keys = text.split(',').map(key).collect::<Result<Vec<u8>, _>>()?;
        if keys.len() > MOST {
            return Err(format!("more than {MOST} keys"));
        }
        Ok(Self(keys))
    }
}

fn key(text: &str) -> Result<u8, String> {
    let unknown = || {
        format!(
            "`{}` is not a key: one character, or ctrl- and one of a-z, @, [, \\, ], ^, _",
            text.escape_default()
        )
    };
    match text.strip_prefix("ctrl-").unwrap_or(text).as_bytes() {
        // What a terminal sends for them: the character's lowest five bits.
        [letter] if text.len() > 1 => match letter.to_ascii_uppercase() {
            upper @ b'@'..=b'_' => Ok(upper & 0x1f),
            _ => Err(unknown()),
        },
        [one] if one.is_ascii_graphic() || *one == b' ' => Ok(*one),
        _ => Err(unknown()),
    }
}

impl fmt::Display for DetachKeys {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.0.iter().map(|key| match key {
            0..=0x1f => format!("Ctrl-{}", char::from(key | 0x40)),
            other => char::from(*other).to_string(),
        });
        formatter.write_str(&names.collect::<Vec<_>>().join(" "))
    }
}

impl DetachKeys {
    /// Whether no keys detach.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Finds the keys in the input, however it is split.
#[derive(Debug)]
pub(crate) struct DetachWatch {
    keys: DetachKeys,
    /// Keys of the sequence that were typed, and are held back.
    typed: usize,
}

impl DetachWatch {
    pub(crate) fn new(keys: DetachKeys) -> Self {
        Self { keys, typed: 0 }
    }

    /// Returns the part of `bytes` for the program, and whether the keys are complete. Later input is
    /// dropped.
    pub(crate) fn pass(&mut self, bytes: &[u8]) -> (Vec<u8>, bool) {
        let keys = &self.keys.0;
        let mut passed = Vec::with_capacity(bytes.len() + self.typed);
        if keys.is_empty() {
            passed.extend_from_slice(bytes);
            return (passed, false);
        }
        for byte in bytes {
            if *byte == keys[self.typed] {
                self.typed += 1;
                if self.typed == keys.len() {
                    self.typed = 0;
                    return (passed, true);
                }
                continue;
            }
            // Not the sequence after all, though its end may begin another.
            let mut held = keys[..self.typed].to_vec();
            held.push(*byte);
            let kept = (0..=held.len())
                .find(|from| keys.starts_with(&held[*from..]))
                .unwrap_or(held.len());
            passed.extend_from_slice(&held[..kept]);
            self.typed = held.len() - kept;
        }
        (passed, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(text: &str) -> DetachKeys {
        text.parse().expect("keys")
    }

    #[test]
    fn keys_are_named_as_docker_names_them() {
        assert_eq!(keys(DETACH_KEYS), DetachKeys(vec![16, 17]));
        assert_eq!(
            keys("ctrl-@,ctrl-[,ctrl-\\,a,~"),
            DetachKeys(vec![0, 27, 28, b'a', b'~'])
        );
        assert_eq!(keys(""), DetachKeys(Vec::new()));
        assert_eq!(keys(DETACH_KEYS).to_string(), "Ctrl-P Ctrl-Q");
        for wrong in [
            "ctrl-",
            "ctrl-1",
            "ab",
            "ctrl-p,",
            "\u{e4}",
            "a,a,a,a,a,a,a,a,a",
        ] {
            assert!(wrong.parse::<DetachKeys>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_keys_are_found_in_whatever_pieces_and_the_rest_goes_through() {
        let mut watch = DetachWatch::new(keys("ctrl-p,ctrl-q"));
        assert_eq!(watch.pass(b"ab\x10"), (b"ab".to_vec(), false));
        assert_eq!(watch.pass(b"c"), (b"\x10c".to_vec(), false));
        assert_eq!(watch.pass(b"\x10\x10"), (b"\x10".to_vec(), false));
        assert_eq!(watch.pass(b"\x11more"), (Vec::new(), true));
        let mut none = DetachWatch::new(keys(""));
        assert_eq!(none.pass(b"\x10\x11"), (b"\x10\x11".to_vec(), false));
        let mut twice = DetachWatch::new(keys("a,a,b"));
        assert_eq!(twice.pass(b"aaab"), (b"a".to_vec(), true));
    }
}
