//! Tracks the terminal modes set by output that is no longer kept: the alternate screen, mouse reports,
//! bracketed paste, application keys. A program sets them once, at its beginning, and a redraw does not
//! repeat them.

use std::collections::BTreeMap;
use std::mem::take;

/// Modes that are remembered for one terminal: more than programs use with xterm.
const MAX_MODES: usize = 48;

/// Numbers in one sequence; a longer one is ignored.
const MAX_NUMBERS: usize = 16;

/// Modes set and reset, and the parser's position in a sequence.
#[derive(Debug, Clone, Default)]
pub(crate) struct Modes {
    /// DEC's private modes, by `ESC [ ? … h` and `ESC [ ? … l`.
    private: BTreeMap<u16, bool>,
    /// `ESC =` and `ESC >`.
    keypad: Option<u8>,
    place: Place,
}

#[derive(Debug, Clone, Default)]
enum Place {
    #[default]
    Text,
    Escape,
    /// Behind `ESC [`.
    Sequence,
    /// Behind `ESC [ ?`.
    Private(Vec<u16>),
}

impl Modes {
    /// Reads bytes that are dropped from the scrollback.
    pub(crate) fn pass(&mut self, bytes: impl IntoIterator<Item = u8>) {
        for byte in bytes {
            self.step(byte);
        }
    }

    fn step(&mut self, byte: u8) {
        self.place = match (take(&mut self.place), byte) {
            (_, 0x1b) => Place::Escape,
            (Place::Escape, b'[') => Place::Sequence,
            // A reset of everything.
            (Place::Escape, b'c') => return *self = Self::default(),
            (Place::Escape, b'=' | b'>') => {
                self.keypad = Some(byte);
                Place::Text
            }
            (Place::Sequence, b'?') => Place::Private(vec![0]),
            (Place::Private(mut numbers), b'0'..=b'9') => {
                if let Some(last) = numbers.last_mut() {
                    *last = last
                        .saturating_mul(10)
                        .saturating_add(u16::from(byte - b'0'));
                }
                Place::Private(numbers)
            }
            (Place::Private(mut numbers), b';') if numbers.len() < MAX_NUMBERS => {
                numbers.push(0);
                Place::Private(numbers)
            }
            (Place::Private(numbers), b'h' | b'l') => {
                for number in numbers {
                    if self.private.len() < MAX_MODES || self.private.contains_key(&number) {
                        self.private.insert(number, byte == b'h');
                    }
                }
                Place::Text
            }
            _ => Place::Text,
        };
    }

    /// Bytes that put a terminal into these modes.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (number, set) in &self.private {
            let end = if *set { 'h' } else { 'l' };
            bytes.extend_from_slice(format!("\x1b[?{number}{end}").as_bytes());
        }
        if let Some(keypad) = self.keypad {
            bytes.extend_from_slice(&[0x1b, keypad]);
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn after(bytes: &[u8]) -> String {
        let mut modes = Modes::default();
        modes.pass(bytes.iter().copied());
        String::from_utf8(modes.bytes()).expect("text")
    }

    #[test]
    fn what_was_set_last_counts_and_a_reset_forgets_it() {
        let vim = b"\x1b[?1049h\x1b[22;0;0t\x1b[?1;2004h\x1b=text\x1b[?25l\x1b[31mmore\x1b[?25h";
        let expected = "\x1b[?1h\x1b[?25h\x1b[?1049h\x1b[?2004h\x1b=";
        assert_eq!(after(vim), expected);
        assert_eq!(after(b"\x1b[?1049h\x1b[?1049l"), "\x1b[?1049l");
        assert_eq!(after(b"\x1b[?1049h\x1bc"), "");
        assert_eq!(after(b"\x1b[?10\x1b[49h[?7h"), "");
    }

    proptest! {
        #[test]
        fn no_bytes_grow_it_and_what_it_says_it_understands(
            bytes in proptest::collection::vec(
                prop_oneof![any::<u8>(), Just(0x1b), Just(b'['), Just(b'?'), b'0'..=b'9', Just(b'h')],
                0..2_000,
            ),
        ) {
            let mut modes = Modes::default();
            modes.pass(bytes);
            let said = modes.bytes();
            prop_assert!(said.len() <= MAX_MODES * 9 + 2, "{}", said.len());
            let mut again = Modes::default();
            again.pass(said.iter().copied());
            prop_assert_eq!(again.bytes(), said);
        }
    }
}
