//! The last output of a program, numbered from its first byte on.

use std::collections::VecDeque;

use conman_shim_protocol::{KEPT_OUTPUT_BYTES, OutputStream};

use crate::terminal_modes::Modes;

/// Changes between the two outputs that are kept; with more, older output is dropped earlier.
const MAX_RUNS: usize = 4_096;

/// Bytes of a terminal's output that may be skipped to begin at a line or a sequence.
const SEARCH: usize = 4_096;

/// Consecutive bytes of one output.
#[derive(Debug, Clone, Copy)]
struct Run {
    stream: OutputStream,
    length: usize,
}

/// The last bytes of the output. `start` is the offset of the first one.
#[derive(Debug, Default)]
pub(crate) struct OutputRing {
    start: u64,
    bytes: VecDeque<u8>,
    runs: VecDeque<Run>,
    /// Of a terminal: set by bytes that are no longer kept.
    modes: Option<Modes>,
}

impl OutputRing {
    pub(crate) fn of_terminal() -> Self {
        Self {
            modes: Some(Modes::default()),
            ..Self::default()
        }
    }

    /// A ring that another program has handed over; `runs` are as [`OutputRing::runs`] returns them.
    pub(crate) fn handed_over(
        start: u64,
        bytes: &[u8],
        runs: &[(OutputStream, usize)],
        modes: Option<&[u8]>,
    ) -> Self {
        let mut ring = Self {
            start,
            modes: modes.map(|bytes| {
                let mut modes = Modes::default();
                modes.pass(bytes.iter().copied());
                modes
            }),
            ..Self::default()
        };
        let mut rest = bytes;
        for (stream, length) in runs {
            let (run, later) = rest.split_at(rest.len().min(*length));
            ring.push(*stream, run);
            rest = later;
        }
        ring
    }

    pub(crate) fn push(&mut self, stream: OutputStream, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        match self.runs.back_mut() {
            Some(run) if run.stream == stream => run.length += bytes.len(),
            _ => {
                // Before, so that the runs never take more memory.
                if self.runs.len() == MAX_RUNS {
                    let oldest = self.runs.front().map_or(0, |run| run.length);
                    self.drop_oldest(oldest);
                }
                self.runs.push_back(Run {
                    stream,
                    length: bytes.len(),
                });
            }
        }
        let over = (self.bytes.len() + bytes.len()).saturating_sub(KEPT_OUTPUT_BYTES);
        let (gone, bytes) = bytes.split_at(over.saturating_sub(self.bytes.len()));
        self.drop_oldest(over - gone.len());
        self.pass(gone.iter().copied());
        self.bytes.extend(bytes);
        self.forget(gone.len());
    }

    fn drop_oldest(&mut self, count: usize) {
        if let Some(modes) = &mut self.modes {
            modes.pass(self.bytes.drain(..count));
        } else {
            self.bytes.drain(..count);
        }
        self.forget(count);
    }

    fn pass(&mut self, bytes: impl Iterator<Item = u8>) {
        if let Some(modes) = &mut self.modes {
            modes.pass(bytes);
        }
    }

    /// Removes what was dropped from the runs.
    fn forget(&mut self, mut count: usize) {
        self.start += count as u64;
        while count > 0
            && let Some(run) = self.runs.front_mut()
        {
            let part = run.length.min(count);
            run.length -= part;
            count -= part;
            if run.length == 0 {
                self.runs.pop_front();
            }
        }
    }

    pub(crate) fn is_terminals(&self) -> bool {
        self.modes.is_some()
    }

    /// The offset of the oldest byte that is kept.
    pub(crate) fn start(&self) -> u64 {
        self.start
    }

    /// The offset of the next byte that the program writes.
    pub(crate) fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    /// At most `most` bytes of one output from this offset on; `None` unless it is kept.
    pub(crate) fn piece(&self, offset: u64, most: usize) -> Option<(OutputStream, Vec<u8>)> {
        let at = usize::try_from(offset.checked_sub(self.start)?).ok()?;
        let mut end = self.bytes.len();
        // Most readers are at the end.
        for run in self.runs.iter().rev() {
            let begin = end - run.length;
            if (begin..end).contains(&at) {
                let until = end.min(at + most);
                let bytes = self.bytes.range(at..until).copied().collect();
                return Some((run.stream, bytes));
            }
            end = begin;
        }
        None
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.bytes.iter().copied().collect()
    }

    pub(crate) fn runs(&self) -> Vec<(OutputStream, usize)> {
        let runs = self.runs.iter();
        runs.map(|run| (run.stream, run.length)).collect()
    }

    /// Bytes that restore a terminal's modes set by output that is no longer kept.
    pub(crate) fn modes(&self) -> Option<Vec<u8>> {
        self.modes.as_ref().map(Modes::bytes)
    }

    /// What a terminal showed last: from the beginning of a line or a sequence, with the modes at that point,
    /// and without queries to the terminal, which another terminal would answer a second time.
    pub(crate) fn screen(&self) -> Vec<u8> {
        let bytes = self.bytes();
        let mut from = 0;
        if self.start > 0 {
            let head = &bytes[..bytes.len().min(SEARCH)];
            from = head
                .iter()
                .position(|byte| *byte == 0x1b || *byte == b'\n')
                .unwrap_or(0);
        }
        let mut modes = self.modes.clone().unwrap_or_default();
        modes.pass(bytes[..from].iter().copied());
        let mut screen = modes.bytes();
        screen.extend(without_questions(&bytes[from..]));
        screen
    }
}

/// Removes queries for device attributes and status reports: `ESC [ … c` and `ESC [ … n`.
fn without_questions(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let Some(at) = rest.windows(2).position(|pair| pair == b"\x1b[") {
        out.extend_from_slice(&rest[..at]);
        let body = &rest[at + 2..];
        let length = body.iter().position(|byte| (0x40..0x7f).contains(byte));
        let Some(length) = length else {
            rest = &rest[at..];
            break;
        };
        let sequence = &rest[at..at + 2 + length + 1];
        if !matches!(body[length], b'c' | b'n') {
            out.extend_from_slice(sequence);
        }
        rest = &rest[sequence.len() + at..];
    }
    out.extend_from_slice(rest);
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use OutputStream::{Stderr, Stdout};

    fn copy(ring: &OutputRing) -> OutputRing {
        let modes = ring.modes();
        OutputRing::handed_over(ring.start(), &ring.bytes(), &ring.runs(), modes.as_deref())
    }

    #[test]
    fn a_terminals_output_is_bounded_and_begins_at_a_line_once_some_was_dropped() {
        let mut ring = OutputRing::of_terminal();
        for number in 0..20_000 {
            ring.push(Stdout, format!("line {number}\n").as_bytes());
        }
        assert_eq!(ring.bytes().len(), KEPT_OUTPUT_BYTES);
        let screen = String::from_utf8(ring.screen()).expect("text");
        assert!(screen.starts_with("\nline "), "{}", &screen[..20]);
        assert!(screen.ends_with("line 19999\n"));
        ring.push(Stdout, &[b'x'; KEPT_OUTPUT_BYTES + 9]);
        assert_eq!(ring.bytes(), vec![b'x'; KEPT_OUTPUT_BYTES]);
    }

    #[test]
    fn the_modes_of_what_is_not_kept_any_more_are_told_first() {
        let mut ring = OutputRing::of_terminal();
        ring.push(Stdout, b"\x1b[?1049h\x1b[?2004h");
        let text = "line\n".repeat(KEPT_OUTPUT_BYTES);
        ring.push(Stdout, text.as_bytes());
        ring.push(Stdout, b"last");
        let modes = b"\x1b[?1049h\x1b[?2004h";
        let screen = ring.screen();
        assert!(screen.starts_with(modes), "{:?}", &screen[..40]);
        assert!(screen.ends_with(b"line\nlast"));
        assert_eq!(copy(&ring).screen(), screen);
    }

    #[test]
    fn questions_to_the_terminal_are_not_asked_again() {
        let bytes = b"a\x1b[31mred\x1b[>cq\x1b[6nb\x1b[2Jend\x1b[";
        assert_eq!(without_questions(bytes), b"a\x1b[31mredqb\x1b[2Jend\x1b[");
    }

    #[test]
    fn outputs_that_take_turns_at_every_byte_are_bounded_too() {
        let mut ring = OutputRing::default();
        for _ in 0..KEPT_OUTPUT_BYTES {
            ring.push(Stdout, b"o");
            ring.push(Stderr, b"e");
        }
        assert_eq!(ring.runs().len(), MAX_RUNS);
        assert_eq!(ring.end(), 2 * KEPT_OUTPUT_BYTES as u64);
        assert_eq!(ring.start(), ring.end() - MAX_RUNS as u64);
    }

    proptest! {
        #[test]
        fn what_is_kept_is_read_from_any_offset_as_it_was_written(
            writes in proptest::collection::vec((any::<bool>(), 0..30_000_usize), 1..12),
            most in 1..20_000_usize,
        ) {
            let mut ring = OutputRing::default();
            let mut written = Vec::new();
            for (number, (is_error, length)) in writes.into_iter().enumerate() {
                let stream = if is_error { Stderr } else { Stdout };
                let bytes: Vec<u8> = (0..length).map(|at| (at * 7 + number) as u8).collect();
                ring.push(stream, &bytes);
                written.extend(bytes.into_iter().map(|byte| (stream, byte)));
            }
            prop_assert_eq!(ring.end(), written.len() as u64);
            for ring in [copy(&ring), ring] {
                let mut offset = ring.start();
                while let Some((stream, bytes)) = ring.piece(offset, most) {
                    prop_assert!(!bytes.is_empty() && bytes.len() <= most);
                    let at = usize::try_from(offset).expect("short");
                    let same = written[at..].iter().take(bytes.len()).copied();
                    prop_assert!(same.eq(bytes.iter().map(|byte| (stream, *byte))));
                    offset += bytes.len() as u64;
                }
                prop_assert_eq!(offset, ring.end());
                let before = ring.start().checked_sub(1);
                prop_assert!(before.is_none_or(|offset| ring.piece(offset, most).is_none()));
            }
        }

        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = without_questions(&bytes);
        }
    }
}
