//! A terminal that the shim keeps: the master of a host PTY, its last output, and its watchers.
//!
//! The PTY is one of the host's, so that no container needs its own devpts; its slave belongs to the
//! container's user. A client that attaches gets a SEQPACKET socket; each message is one kind byte and
//! bytes ([`TerminalEvent`], [`TerminalInput`]). A watcher that does not read is skipped, and gets the
//! whole scrollback when it reads again. The terminal dies with the shim's process, but survives a
//! replacement of the shim's program, and the end of the daemon or of a watcher.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{Gid, Uid, fchown};
use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Winsize, tcgetpgrp, tcsetwinsize};

use crate::spec::TerminalSize;
use crate::terminal_modes::Modes;

/// Bytes of output that are kept: several screens of a full-screen program.
pub const SCROLLBACK_BYTES: usize = 64 * 1_024;

/// Typed bytes that wait for the program to read them; beyond, watchers' input is not read.
const MAX_INPUT: usize = 16 * 1_024;

/// Longest message of a watcher.
pub const MAX_TYPED: usize = 4_096;

/// Bytes of a wrapped scrollback that may be skipped to begin at a line or a sequence.
const SEARCH: usize = 4_096;

/// Messages to a watcher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TerminalEvent {
    /// The program wrote this.
    Output(Vec<u8>),
    /// Start again with an empty screen and this; `skipped` bytes were not sent.
    Replay { skipped: u64, scrollback: Vec<u8> },
    /// No process has the terminal open any more.
    End,
}

/// Messages from a watcher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TerminalInput {
    /// At most [`MAX_TYPED`] bytes.
    Typed(Vec<u8>),
    Resize(TerminalSize),
}

impl TerminalEvent {
    pub(crate) fn encode(&self) -> Vec<u8> {
        match self {
            Self::Output(bytes) => [b"o", bytes.as_slice()].concat(),
            Self::Replay {
                skipped,
                scrollback,
            } => [b"r", &skipped.to_le_bytes()[..], scrollback].concat(),
            Self::End => b"e".to_vec(),
        }
    }

    /// `None` for a malformed message.
    #[must_use]
    pub fn decode(message: &[u8]) -> Option<Self> {
        match message.split_first()? {
            (b'o', bytes) => Some(Self::Output(bytes.to_vec())),
            (b'r', rest) => {
                let (skipped, scrollback) = rest.split_first_chunk()?;
                Some(Self::Replay {
                    skipped: u64::from_le_bytes(*skipped),
                    scrollback: scrollback.to_vec(),
                })
            }
            (b'e', []) => Some(Self::End),
            _ => None,
        }
    }
}

impl TerminalInput {
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Typed(bytes) => [b"i", bytes.as_slice()].concat(),
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
            (b'i', bytes) if bytes.len() <= MAX_TYPED => Some(Self::Typed(bytes.to_vec())),
            (b's', [r0, r1, c0, c1]) => Some(Self::Resize(TerminalSize {
                rows: u16::from_le_bytes([*r0, *r1]),
                cols: u16::from_le_bytes([*c0, *c1]),
            })),
            _ => None,
        }
    }
}

/// The last bytes of the output.
#[derive(Debug, Default)]
pub(crate) struct Scrollback {
    bytes: VecDeque<u8>,
    wrapped: bool,
    /// Set by bytes that are no longer kept.
    modes: Modes,
}

impl Scrollback {
    pub(crate) fn kept(bytes: &[u8], wrapped: bool, modes: &[u8]) -> Self {
        let mut all = Self {
            wrapped,
            ..Self::default()
        };
        all.modes.pass(modes.iter().copied());
        all.push(bytes);
        all
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        let (gone, bytes) = bytes.split_at(bytes.len().saturating_sub(SCROLLBACK_BYTES));
        let over = (self.bytes.len() + bytes.len()).saturating_sub(SCROLLBACK_BYTES);
        self.wrapped |= over > 0;
        self.modes.pass(self.bytes.drain(..over));
        self.modes.pass(gone.iter().copied());
        self.bytes.extend(bytes);
    }

    pub(crate) fn is_wrapped(&self) -> bool {
        self.wrapped
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.bytes.iter().copied().collect()
    }

    /// Bytes that restore the modes set by output that is no longer kept.
    pub(crate) fn modes(&self) -> Vec<u8> {
        self.modes.bytes()
    }

    /// The scrollback from the beginning of a line or a sequence, with the modes at that point, and without
    /// queries to the terminal: another terminal would answer them a second time.
    fn replay(&self) -> Vec<u8> {
        let bytes = self.bytes();
        let mut from = 0;
        if self.wrapped {
            let head = &bytes[..bytes.len().min(SEARCH)];
            from = head
                .iter()
                .position(|byte| *byte == 0x1b || *byte == b'\n')
                .unwrap_or(0);
        }
        let mut modes = self.modes.clone();
        modes.pass(bytes[..from].iter().copied());
        let mut replay = modes.bytes();
        replay.extend(without_questions(&bytes[from..]));
        replay
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

/// A PTY and its state.
#[derive(Debug)]
pub(crate) struct Terminal {
    pub(crate) master: OwnedFd,
    pub(crate) scrollback: Scrollback,
    pub(crate) size: TerminalSize,
    pub(crate) input: VecDeque<u8>,
    /// No process has it open any more.
    pub(crate) hung_up: bool,
}

/// A watcher of a terminal.
#[derive(Debug)]
pub(crate) struct Watcher {
    pub(crate) terminal: String,
    pub(crate) socket: OwnedFd,
    /// Bytes that were not sent since it stopped reading; `None` while it reads.
    pub(crate) skipped: Option<u64>,
}

impl Terminal {
    /// Opens a new terminal; its slave belongs to the user.
    pub(crate) fn open(
        size: TerminalSize,
        owner: Option<(u32, u32)>,
    ) -> io::Result<(Self, OwnedFd)> {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = openpt(flags)?;
        grantpt(&master)?;
        unlockpt(&master)?;
        let slave = ioctl_tiocgptpeer(&master, flags)?;
        if let Some((user, group)) = owner {
            fchown(
                &slave,
                Some(Uid::from_raw(user)),
                Some(Gid::from_raw(group)),
            )?;
        }
        rustix::io::ioctl_fionbio(&master, true)?;
        let terminal = Self::kept(master, Scrollback::default(), size);
        terminal.apply_size()?;
        Ok((terminal, slave))
    }

    pub(crate) fn kept(master: OwnedFd, scrollback: Scrollback, size: TerminalSize) -> Self {
        Self {
            master,
            scrollback,
            size,
            input: VecDeque::new(),
            hung_up: false,
        }
    }

    fn apply_size(&self) -> io::Result<()> {
        Ok(tcsetwinsize(
            &self.master,
            Winsize {
                ws_row: self.size.rows,
                ws_col: self.size.cols,
                ws_xpixel: 0,
                ws_ypixel: 0,
            },
        )?)
    }

    /// Sets the size; the kernel notifies the program. With `redraw` the program is notified even of the
    /// same size.
    pub(crate) fn resize(&mut self, size: TerminalSize, redraw: bool) {
        if self.hung_up || size.rows == 0 || size.cols == 0 {
            return;
        }
        let same = size == self.size;
        self.size = size;
        let notified = if same && redraw {
            tcgetpgrp(&self.master)
                .and_then(|group| {
                    rustix::process::kill_process_group(group, rustix::process::Signal::WINCH)
                })
                .map_err(io::Error::from)
        } else {
            self.apply_size()
        };
        if let Err(error) = notified {
            tracing::debug!(%error, "cannot notify a terminal's program of its size");
        }
    }

    /// Whether watchers may type.
    pub(crate) fn takes_input(&self) -> bool {
        self.input.len() + MAX_TYPED <= MAX_INPUT
    }

    /// Writes typed input to the program as far as it reads.
    pub(crate) fn type_in(&mut self) {
        while !self.input.is_empty() && !self.hung_up {
            let (bytes, _) = self.input.as_slices();
            match rustix::io::write(&self.master, bytes) {
                Ok(written) => drop(self.input.drain(..written)),
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return,
            }
        }
    }

    /// The first message of a watcher.
    pub(crate) fn replay(&self, skipped: u64) -> TerminalEvent {
        TerminalEvent::Replay {
            skipped,
            scrollback: self.scrollback.replay(),
        }
    }
}

impl Watcher {
    /// Sends or skips; an error means that the watcher has closed.
    pub(crate) fn send(&mut self, event: &TerminalEvent) -> io::Result<()> {
        let length = match event {
            TerminalEvent::Output(bytes) => bytes.len() as u64,
            TerminalEvent::Replay { .. } | TerminalEvent::End => 0,
        };
        if let Some(skipped) = &mut self.skipped {
            *skipped += length;
            return Ok(());
        }
        match crate::seqpacket::send(self.socket.as_fd(), &event.encode(), &[]) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.skipped = Some(length);
                Ok(())
            }
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_scrollback_is_bounded_and_begins_at_a_line_once_it_has_wrapped() {
        let mut all = Scrollback::default();
        for number in 0..20_000 {
            all.push(format!("line {number}\n").as_bytes());
        }
        assert_eq!(all.bytes().len(), SCROLLBACK_BYTES);
        let replay = String::from_utf8(all.replay()).expect("text");
        assert!(replay.starts_with("\nline "), "{}", &replay[..20]);
        assert!(replay.ends_with("line 19999\n"));
        all.push(&[b'x'; SCROLLBACK_BYTES + 9]);
        assert_eq!(all.bytes(), vec![b'x'; SCROLLBACK_BYTES]);
    }

    #[test]
    fn the_modes_of_what_is_not_kept_any_more_are_told_first() {
        let mut all = Scrollback::default();
        all.push(b"\x1b[?1049h\x1b[?2004h");
        let text = "line\n".repeat(SCROLLBACK_BYTES);
        all.push(text.as_bytes());
        all.push(b"last");
        let modes = b"\x1b[?1049h\x1b[?2004h";
        let replay = all.replay();
        assert!(replay.starts_with(modes), "{:?}", &replay[..40]);
        assert!(replay.ends_with(b"line\nlast"));
        let kept = Scrollback::kept(&all.bytes(), all.is_wrapped(), &all.modes());
        assert_eq!(kept.replay(), replay);
    }

    #[test]
    fn questions_to_the_terminal_are_not_asked_again() {
        let bytes = b"a\x1b[31mred\x1b[>cq\x1b[6nb\x1b[2Jend\x1b[";
        assert_eq!(without_questions(bytes), b"a\x1b[31mredqb\x1b[2Jend\x1b[");
    }

    proptest! {
        #[test]
        fn no_message_panics_and_what_was_written_is_read(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
            skipped in any::<u64>(),
        ) {
            let _ = TerminalInput::decode(&bytes);
            let _ = TerminalEvent::decode(&bytes);
            let _ = without_questions(&bytes);
            for event in [
                TerminalEvent::Output(bytes.clone()),
                TerminalEvent::Replay { skipped, scrollback: bytes.clone() },
                TerminalEvent::End,
            ] {
                prop_assert_eq!(TerminalEvent::decode(&event.encode()), Some(event));
            }
            let typed = TerminalInput::Typed(bytes);
            prop_assert_eq!(TerminalInput::decode(&typed.encode()), Some(typed));
        }
    }
}
