//! The messages on the socket that comes with [`crate::Reply::Attached`]. Each is one kind byte and its bytes.

use serde::{Deserialize, Serialize};

use crate::spec::TerminalSize;

/// Bytes of output that are kept: several screens of a full-screen program.
pub const KEPT_OUTPUT_BYTES: usize = 64 * 1_024;

/// Longest input in one message.
pub const MAX_INPUT_BYTES: usize = 4_096;

/// One of a program's outputs. A terminal has only the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum OutputStream {
    #[serde(rename = "1")]
    Stdout,
    #[serde(rename = "2")]
    Stderr,
}

/// Where a watcher is in the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// Offset of the next byte of [`StreamEvent::Output`], counted over both outputs.
    pub offset: u64,
    /// Bytes before it that are no longer kept, and that the watcher did not get.
    pub dropped: u64,
}

/// Messages to a watcher. The first one is a `Position` or a `Screen`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StreamEvent {
    /// The output continues here.
    Position(Position),
    /// Only of a terminal: start again with an empty screen and these bytes. The output continues at the
    /// position.
    Screen(Position, Vec<u8>),
    /// The program wrote this.
    Output(OutputStream, Vec<u8>),
    /// No process has the terminal or an output open any more.
    End,
}

/// Messages from a watcher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StreamInput {
    /// At most [`MAX_INPUT_BYTES`].
    Bytes(Vec<u8>),
    /// The end of the input; a terminal has none.
    End,
    Resize(TerminalSize),
}

impl StreamEvent {
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let at = |kind: &[u8], position: &Position, bytes: &[u8]| {
            let (offset, dropped) = (
                position.offset.to_le_bytes(),
                position.dropped.to_le_bytes(),
            );
            [kind, &offset, &dropped, bytes].concat()
        };
        match self {
            Self::Position(position) => at(b"p", position, &[]),
            Self::Screen(position, bytes) => at(b"r", position, bytes),
            Self::Output(OutputStream::Stdout, bytes) => [b"1", bytes.as_slice()].concat(),
            Self::Output(OutputStream::Stderr, bytes) => [b"2", bytes.as_slice()].concat(),
            Self::End => b"e".to_vec(),
        }
    }

    /// `None` for a malformed message.
    #[must_use]
    pub fn decode(message: &[u8]) -> Option<Self> {
        let (kind, rest) = message.split_first()?;
        let position = |rest| -> Option<(Position, Vec<u8>)> {
            let (offset, rest) = <[u8]>::split_first_chunk(rest)?;
            let (dropped, bytes) = rest.split_first_chunk()?;
            let position = Position {
                offset: u64::from_le_bytes(*offset),
                dropped: u64::from_le_bytes(*dropped),
            };
            Some((position, bytes.to_vec()))
        };
        match kind {
            b'p' => position(rest).map(|(position, _)| Self::Position(position)),
            b'r' => position(rest).map(|(position, bytes)| Self::Screen(position, bytes)),
            b'1' => Some(Self::Output(OutputStream::Stdout, rest.to_vec())),
            b'2' => Some(Self::Output(OutputStream::Stderr, rest.to_vec())),
            b'e' => rest.is_empty().then_some(Self::End),
            _ => None,
        }
    }
}

impl StreamInput {
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Bytes(bytes) => [b"i", bytes.as_slice()].concat(),
            Self::End => b"e".to_vec(),
            Self::Resize(size) => {
                let (rows, cols) = (size.rows.to_le_bytes(), size.cols.to_le_bytes());
                [b"s", &rows[..], &cols[..]].concat()
            }
        }
    }

    /// `None` for a malformed message.
    #[must_use]
    pub fn decode(message: &[u8]) -> Option<Self> {
        match message.split_first()? {
            (b'i', bytes) if bytes.len() <= MAX_INPUT_BYTES => Some(Self::Bytes(bytes.to_vec())),
            (b'e', []) => Some(Self::End),
            (b's', [r0, r1, c0, c1]) => Some(Self::Resize(TerminalSize {
                rows: u16::from_le_bytes([*r0, *r1]),
                cols: u16::from_le_bytes([*c0, *c1]),
            })),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_message_panics_and_what_was_written_is_read(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
            offset in any::<u64>(),
            dropped in any::<u64>(),
        ) {
            let _ = StreamInput::decode(&bytes);
            let _ = StreamEvent::decode(&bytes);
            let position = Position { offset, dropped };
            for event in [
                StreamEvent::Position(position),
                StreamEvent::Screen(position, bytes.clone()),
                StreamEvent::Output(OutputStream::Stdout, bytes.clone()),
                StreamEvent::Output(OutputStream::Stderr, bytes.clone()),
                StreamEvent::End,
            ] {
                prop_assert_eq!(StreamEvent::decode(&event.encode()), Some(event));
            }
            for input in [StreamInput::Bytes(bytes), StreamInput::End] {
                prop_assert_eq!(StreamInput::decode(&input.encode()), Some(input));
            }
        }
    }
}
