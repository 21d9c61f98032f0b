//! The terminals part: PTYs, their output, their watchers. It needs nothing of the other parts.
//!
//! ```text
//! terminal: open ──▶ open ── the last process closes it ──▶ hung up ── container forgotten ──▶ closed
//!
//! watcher:  attach ──▶ reads ◀── the scrollback, once it reads again ──┐
//!             │          └───────── its socket is full ──────────▶ behind
//!             └─ the terminal has hung up: the scrollback and the end, and no watcher is kept
//! ```
//! Typed input is read from watchers only while there is room for it.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use conman_linux::inherited_fd;
use rustix::event::epoll::EventFlags;

use super::poller::{Poller, Token};
use super::{full, host_error};
use crate::handover::{Handover, KeptTerminal, KeptWatcher, number};
use crate::protocol::CallError;
use crate::seqpacket;
use crate::spec::TerminalSize;
use crate::terminal::{MAX_TYPED, Scrollback, Terminal, TerminalEvent, TerminalInput, Watcher};

/// Terminals at a time; their scrollback is the largest part of the shim's memory.
const MAX_TERMINALS: usize = 1_024;

/// Watchers at a time, of all terminals together.
const MAX_WATCHERS: usize = 1_024;

/// Bytes that are read from a PTY at once, and reads before the next terminal's turn.
const OUTPUT_BYTES: usize = 4_096;
const OUTPUTS_A_TURN: usize = 4;

/// The terminals of containers and commands.
#[derive(Debug, Default)]
pub(super) struct Terminals {
    by_name: BTreeMap<String, (u64, Terminal)>,
    names: BTreeMap<u64, String>,
    watchers: BTreeMap<u64, Watcher>,
    /// The next terminal's or watcher's number.
    next_number: u64,
}

impl Terminals {
    /// Opens a terminal for a start, and returns its slave.
    pub(super) fn open(
        &mut self,
        poller: &Poller,
        name: &str,
        size: TerminalSize,
        owner: Option<(u32, u32)>,
    ) -> Result<OwnedFd, CallError> {
        if self.by_name.len() >= MAX_TERMINALS {
            return Err(full("terminals"));
        }
        let (terminal, slave) =
            Terminal::open(size, owner).map_err(host_error("open a terminal for", name))?;
        let watched = self.add(poller, name, terminal);
        watched.map_err(host_error("watch the terminal of", name))?;
        Ok(slave)
    }

    fn add(&mut self, poller: &Poller, name: &str, terminal: Terminal) -> io::Result<()> {
        let number = self.take_number();
        if !terminal.hung_up {
            poller.add(Token::Terminal(number), &terminal.master, EventFlags::IN)?;
        }
        self.names.insert(number, name.to_owned());
        self.by_name.insert(name.to_owned(), (number, terminal));
        Ok(())
    }

    fn take_number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    /// Closes a terminal whose command or container is forgotten, or has failed to begin.
    pub(super) fn close(&mut self, name: &str) {
        if let Some((number, _)) = self.by_name.remove(name) {
            self.names.remove(&number);
            self.watchers.retain(|_, watcher| watcher.terminal != name);
        }
    }

    /// Adds a watcher, and returns its end of a socket.
    pub(super) fn attach(
        &mut self,
        poller: &Poller,
        name: &str,
        size: Option<TerminalSize>,
        quiet: bool,
    ) -> Result<OwnedFd, CallError> {
        let failed = |error| host_error("attach to", name)(error);
        if self.watchers.len() >= MAX_WATCHERS {
            return Err(full("watchers of terminals"));
        }
        let Some((_, terminal)) = self.by_name.get_mut(name) else {
            return Err(failed(io::Error::other("it has no terminal")));
        };
        let (ours, theirs) = seqpacket::pair().map_err(failed)?;
        rustix::io::ioctl_fionbio(&ours, true).map_err(|errno| failed(errno.into()))?;
        let mut watcher = Watcher {
            terminal: name.to_owned(),
            socket: ours,
            skipped: None,
        };
        watcher.send(&terminal.replay(0)).map_err(failed)?;
        if terminal.hung_up {
            watcher.send(&TerminalEvent::End).map_err(failed)?;
            return Ok(theirs);
        }
        if size.is_some() || !quiet {
            // Even if the size is the same, since the scrollback may lack older output.
            terminal.resize(size.unwrap_or(terminal.size), !quiet);
        }
        self.add_watcher(poller, watcher).map_err(failed)?;
        Ok(theirs)
    }

    fn add_watcher(&mut self, poller: &Poller, watcher: Watcher) -> io::Result<()> {
        let number = self.take_number();
        poller.add(Token::Watcher(number), &watcher.socket, EventFlags::IN)?;
        self.watchers.insert(number, watcher);
        self.update_watcher(poller, number);
        Ok(())
    }

    pub(super) fn resize(&mut self, name: &str, size: TerminalSize) -> Result<(), CallError> {
        let Some((_, terminal)) = self.by_name.get_mut(name) else {
            return Err(host_error("resize", name)(io::Error::other(
                "it has no terminal",
            )));
        };
        terminal.resize(size, false);
        Ok(())
    }

    /// The program writes, or reads typed input.
    pub(super) fn serve(&mut self, poller: &Poller, number: u64) {
        let Some(name) = self.names.get(&number).cloned() else {
            return;
        };
        for _ in 0..OUTPUTS_A_TURN {
            let Some((_, terminal)) = self.by_name.get_mut(&name) else {
                return;
            };
            terminal.type_in();
            let mut buffer = [0_u8; OUTPUT_BYTES];
            let event = match rustix::io::read(&terminal.master, &mut buffer) {
                Ok(read) if read > 0 => {
                    terminal.scrollback.push(&buffer[..read]);
                    TerminalEvent::Output(buffer[..read].to_vec())
                }
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => break,
                // The last slave is closed.
                Ok(_) | Err(_) => {
                    terminal.hung_up = true;
                    poller.remove(&terminal.master);
                    TerminalEvent::End
                }
            };
            self.send_to_watchers(poller, &name, &event);
            if event == TerminalEvent::End {
                self.watchers.retain(|_, watcher| watcher.terminal != name);
                return;
            }
        }
        self.update(poller, &name);
    }

    fn send_to_watchers(&mut self, poller: &Poller, name: &str, event: &TerminalEvent) {
        let takes = |watcher: &mut Watcher| watcher.terminal != name || watcher.send(event).is_ok();
        self.watchers.retain(|_, watcher| takes(watcher));
        self.update_watchers(poller, name);
    }

    /// A watcher types, or reads again.
    pub(super) fn serve_watcher(&mut self, poller: &Poller, number: u64, flags: EventFlags) {
        let Some(watcher) = self.watchers.get_mut(&number) else {
            return;
        };
        let name = watcher.terminal.clone();
        let Some((_, terminal)) = self.by_name.get_mut(&name) else {
            self.watchers.remove(&number);
            return;
        };
        if flags.contains(EventFlags::OUT)
            && let Some(skipped) = watcher.skipped.take()
            && watcher.send(&terminal.replay(skipped)).is_err()
        {
            self.watchers.remove(&number);
            return;
        }
        let mut closed = false;
        while terminal.takes_input() {
            let mut message = [0_u8; MAX_TYPED + 2];
            match seqpacket::receive(&watcher.socket, &mut message) {
                Ok(Some(received)) => match TerminalInput::decode(received.bytes) {
                    Some(TerminalInput::Typed(bytes)) => terminal.input.extend(bytes),
                    Some(TerminalInput::Resize(size)) => terminal.resize(size, false),
                    None => closed = true,
                },
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Ok(None) | Err(_) => closed = true,
            }
            if closed {
                break;
            }
        }
        terminal.type_in();
        if closed {
            self.watchers.remove(&number);
        }
        self.update(poller, &name);
    }

    /// Polls a program for writability only when there is input for it, and watchers for input only when
    /// there is room.
    fn update(&self, poller: &Poller, name: &str) {
        let Some((number, terminal)) = self.by_name.get(name) else {
            return;
        };
        let mut flags = EventFlags::IN;
        flags.set(EventFlags::OUT, !terminal.input.is_empty());
        if !terminal.hung_up {
            poller.change(Token::Terminal(*number), &terminal.master, flags);
        }
        self.update_watchers(poller, name);
    }

    fn update_watchers(&self, poller: &Poller, name: &str) {
        for (number, watcher) in &self.watchers {
            if watcher.terminal == name {
                self.update_watcher(poller, *number);
            }
        }
    }

    fn update_watcher(&self, poller: &Poller, number: u64) {
        let Some(watcher) = self.watchers.get(&number) else {
            return;
        };
        let terminal = self.by_name.get(&watcher.terminal);
        let takes_input = terminal.is_some_and(|(_, terminal)| terminal.takes_input());
        let mut flags = EventFlags::empty();
        flags.set(EventFlags::IN, takes_input);
        flags.set(EventFlags::OUT, watcher.skipped.is_some());
        poller.change(Token::Watcher(number), &watcher.socket, flags);
    }

    /// Names them in a handover; the scrollback goes to `blobs`.
    pub(super) fn hand_over(&self, handover: &mut Handover, blobs: &mut Vec<u8>) {
        for (name, (_, terminal)) in &self.by_name {
            let scrollback = terminal.scrollback.bytes();
            handover.terminals.push(KeptTerminal {
                name: name.clone(),
                fd: number(&terminal.master),
                size: terminal.size,
                at: blobs.len(),
                length: scrollback.len(),
                wrapped: terminal.scrollback.is_wrapped(),
                modes: terminal.scrollback.modes(),
                input: terminal.input.iter().copied().collect(),
                hung_up: terminal.hung_up,
            });
            blobs.extend(scrollback);
        }
        for watcher in self.watchers.values() {
            handover.watchers.push(KeptWatcher {
                terminal: watcher.terminal.clone(),
                fd: number(&watcher.socket),
                skipped: watcher.skipped,
            });
        }
    }

    /// Takes over the terminals of the program that this one replaces.
    pub(super) fn resume(
        &mut self,
        poller: &Poller,
        handover: &mut Handover,
        blobs: &[u8],
    ) -> io::Result<()> {
        for kept in handover.terminals.drain(..) {
            let master = inherited_fd(kept.fd)?;
            let end = kept.at.saturating_add(kept.length);
            let bytes = blobs.get(kept.at..end).unwrap_or_default();
            let scrollback = Scrollback::kept(bytes, kept.wrapped, &kept.modes);
            let mut terminal = Terminal::kept(master, scrollback, kept.size);
            terminal.input = kept.input.into();
            terminal.hung_up = kept.hung_up;
            self.add(poller, &kept.name, terminal)?;
            self.update(poller, &kept.name);
        }
        for kept in handover.watchers.drain(..) {
            let watcher = Watcher {
                terminal: kept.terminal,
                socket: inherited_fd(kept.fd)?,
                skipped: kept.skipped,
            };
            self.add_watcher(poller, watcher)?;
        }
        Ok(())
    }

    /// All descriptors of terminals and watchers.
    pub(super) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let masters = self.by_name.values().map(|(_, one)| one.master.as_fd());
        masters.chain(self.watchers.values().map(|one| one.socket.as_fd()))
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::time::Duration;

    use super::*;
    use crate::attachment::Attachment;

    const SIZE: TerminalSize = TerminalSize { rows: 24, cols: 80 };
    const TIMEOUT: Duration = Duration::from_secs(5);

    /// Serves what is ready, as the loop does.
    fn serve(terminals: &mut Terminals, poller: &Poller) {
        for (token, flags) in poller.wait().expect("events") {
            match token {
                Token::Terminal(number) => terminals.serve(poller, number),
                Token::Watcher(number) => terminals.serve_watcher(poller, number, flags),
                other => panic!("{other:?} is no terminal's"),
            }
        }
    }

    fn terminal() -> (Terminals, Poller, std::fs::File) {
        let poller = Poller::new().expect("an epoll");
        let mut terminals = Terminals::default();
        let slave = terminals.open(&poller, "a.1", SIZE, None).expect("a pty");
        (terminals, poller, slave.into())
    }

    #[test]
    fn a_watcher_gets_the_scrollback_then_the_output_and_the_end() {
        let (mut terminals, poller, mut program) = terminal();
        program.write_all(b"before").expect("written");
        serve(&mut terminals, &poller);
        let fd = terminals.attach(&poller, "a.1", None, true).expect("fd");
        let mut watcher = Attachment::new(fd);
        let replay = TerminalEvent::Replay {
            skipped: 0,
            scrollback: b"before".to_vec(),
        };
        assert_eq!(watcher.next(TIMEOUT).expect("an event"), Some(replay));
        program.write_all(b"after").expect("written");
        serve(&mut terminals, &poller);
        let output = TerminalEvent::Output(b"after".to_vec());
        assert_eq!(watcher.next(TIMEOUT).expect("an event"), Some(output));
        drop(program);
        serve(&mut terminals, &poller);
        let end = watcher.next(TIMEOUT).expect("an event");
        assert_eq!(end, Some(TerminalEvent::End));
        assert!(terminals.watchers.is_empty());
    }

    #[test]
    fn typed_input_reaches_the_program_and_a_closed_terminal_has_no_watcher() {
        let (mut terminals, poller, mut program) = terminal();
        let fd = terminals.attach(&poller, "a.1", None, true).expect("fd");
        let watcher = Attachment::new(fd);
        watcher.type_in(b"hello\n").expect("typed");
        serve(&mut terminals, &poller);
        let mut line = [0; 6];
        program.read_exact(&mut line).expect("a line");
        assert_eq!(&line, b"hello\n");
        terminals.close("a.1");
        assert_eq!(terminals.fds().count(), 0);
        assert!(terminals.attach(&poller, "a.1", None, true).is_err());
    }
}
