//! Terminals: their owners, their output, their watchers.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use conman_linux::inherited_fd;
use rustix::event::epoll::{self, EventData, EventFlags};

use super::{Control, FIRST_TERMINAL, FIRST_WATCHER, full, host_error};
use crate::handover::{Handover, KeptTerminal, KeptWatcher, number};
use crate::protocol::{CallError, Reply};
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

impl Control {
    /// Opens a terminal for a start, and returns its slave.
    pub(super) fn open_terminal(
        &mut self,
        name: &str,
        size: TerminalSize,
        owner: Option<(u32, u32)>,
    ) -> Result<OwnedFd, CallError> {
        if self.terminals.len() >= MAX_TERMINALS {
            return Err(full("terminals"));
        }
        let (terminal, slave) =
            Terminal::open(size, owner).map_err(host_error("open a terminal for", name))?;
        let watched = self.add_terminal(name, terminal);
        watched.map_err(host_error("watch the terminal of", name))?;
        Ok(slave)
    }

    fn add_terminal(&mut self, name: &str, terminal: Terminal) -> io::Result<()> {
        let token = self.next_terminal;
        self.next_terminal += 1;
        if !terminal.hung_up {
            let data = EventData::new_u64(token);
            epoll::add(&self.epoll, &terminal.master, data, EventFlags::IN)?;
        }
        self.terminal_names.insert(token, name.to_owned());
        self.terminals.insert(name.to_owned(), (token, terminal));
        Ok(())
    }

    /// Closes a terminal whose command or container is forgotten, or has failed to begin.
    pub(super) fn close_terminal(&mut self, name: &str) {
        if let Some((token, _)) = self.terminals.remove(name) {
            self.terminal_names.remove(&token);
            self.watchers.retain(|_, watcher| watcher.terminal != name);
        }
    }

    /// Adds a watcher, and returns its end of a socket.
    pub(super) fn attach(
        &mut self,
        name: &str,
        size: Option<TerminalSize>,
        quiet: bool,
    ) -> Result<OwnedFd, CallError> {
        let failed = |error| host_error("attach to", name)(error);
        if self.watchers.len() >= MAX_WATCHERS {
            return Err(full("watchers of terminals"));
        }
        let Some((_, terminal)) = self.terminals.get_mut(name) else {
            return Err(failed(io::Error::other("it has no terminal")));
        };
        let (ours, theirs) = seqpacket::pair().map_err(failed)?;
        rustix::io::ioctl_fionbio(&ours, true).map_err(|errno| failed(errno.into()))?;
        let mut watcher = Watcher {
            terminal: name.to_owned(),
            socket: ours,
            skipped: None,
        };
        watcher.tell(&terminal.replay(0)).map_err(failed)?;
        if terminal.hung_up {
            watcher.tell(&TerminalEvent::End).map_err(failed)?;
            return Ok(theirs);
        }
        if size.is_some() || !quiet {
            // Even if the size is the same, since the scrollback may lack older output.
            terminal.resize(size.unwrap_or(terminal.size), !quiet);
        }
        self.add_watcher(watcher).map_err(failed)?;
        Ok(theirs)
    }

    fn add_watcher(&mut self, watcher: Watcher) -> io::Result<()> {
        let token = self.next_watcher;
        self.next_watcher += 1;
        let data = EventData::new_u64(token);
        epoll::add(&self.epoll, &watcher.socket, data, EventFlags::IN)?;
        self.watchers.insert(token, watcher);
        self.update_watcher(token);
        Ok(())
    }

    pub(super) fn resize(&mut self, name: &str, size: TerminalSize) -> Result<Reply, CallError> {
        let Some((_, terminal)) = self.terminals.get_mut(name) else {
            return Err(host_error("resize", name)(io::Error::other(
                "it has no terminal",
            )));
        };
        terminal.resize(size, false);
        Ok(Reply::Done)
    }

    /// The program writes, or reads typed input.
    pub(super) fn serve_terminal(&mut self, token: u64) {
        let Some(name) = self.terminal_names.get(&token).cloned() else {
            return;
        };
        for _ in 0..OUTPUTS_A_TURN {
            let Some((_, terminal)) = self.terminals.get_mut(&name) else {
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
                    let _ = epoll::delete(&self.epoll, &terminal.master);
                    TerminalEvent::End
                }
            };
            self.tell_watchers(&name, &event);
            if event == TerminalEvent::End {
                self.watchers.retain(|_, watcher| watcher.terminal != name);
                return;
            }
        }
        self.update_terminal(&name);
    }

    fn tell_watchers(&mut self, name: &str, event: &TerminalEvent) {
        let of = |(token, watcher): (&u64, &Watcher)| (watcher.terminal == name).then_some(*token);
        let tokens: Vec<u64> = self.watchers.iter().filter_map(of).collect();
        for token in tokens {
            if let Some(watcher) = self.watchers.get_mut(&token)
                && watcher.tell(event).is_err()
            {
                self.watchers.remove(&token);
            }
            self.update_watcher(token);
        }
    }

    /// A watcher types, or reads again.
    pub(super) fn serve_watcher(&mut self, token: u64, flags: EventFlags) {
        let Some(watcher) = self.watchers.get_mut(&token) else {
            return;
        };
        let name = watcher.terminal.clone();
        let Some((_, terminal)) = self.terminals.get_mut(&name) else {
            self.watchers.remove(&token);
            return;
        };
        if flags.contains(EventFlags::OUT)
            && let Some(skipped) = watcher.skipped.take()
            && watcher.tell(&terminal.replay(skipped)).is_err()
        {
            self.watchers.remove(&token);
            return;
        }
        let mut gone = false;
        while terminal.takes_input() {
            let mut message = [0_u8; MAX_TYPED + 2];
            match seqpacket::receive(&watcher.socket, &mut message) {
                Ok(Some(received)) => match TerminalInput::decode(received.bytes) {
                    Some(TerminalInput::Typed(bytes)) => terminal.input.extend(bytes),
                    Some(TerminalInput::Resize(size)) => terminal.resize(size, false),
                    None => gone = true,
                },
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Ok(None) | Err(_) => gone = true,
            }
            if gone {
                break;
            }
        }
        terminal.type_in();
        if gone {
            self.watchers.remove(&token);
        }
        self.update_terminal(&name);
    }

    /// Polls a program for writability only when there is input for it, and watchers for input only when
    /// there is room.
    fn update_terminal(&mut self, name: &str) {
        let Some((token, terminal)) = self.terminals.get(name) else {
            return;
        };
        let mut flags = EventFlags::IN;
        if !terminal.input.is_empty() {
            flags |= EventFlags::OUT;
        }
        if !terminal.hung_up {
            let _ = epoll::modify(
                &self.epoll,
                &terminal.master,
                EventData::new_u64(*token),
                flags,
            );
        }
        let of = |(token, watcher): (&u64, &Watcher)| (watcher.terminal == name).then_some(*token);
        let tokens: Vec<u64> = self.watchers.iter().filter_map(of).collect();
        for token in tokens {
            self.update_watcher(token);
        }
    }

    fn update_watcher(&self, token: u64) {
        let Some(watcher) = self.watchers.get(&token) else {
            return;
        };
        let terminal = self.terminals.get(&watcher.terminal);
        let mut flags = EventFlags::empty();
        if terminal.is_some_and(|(_, terminal)| terminal.takes_input()) {
            flags |= EventFlags::IN;
        }
        if watcher.skipped.is_some() {
            flags |= EventFlags::OUT;
        }
        let data = EventData::new_u64(token);
        if let Err(error) = epoll::modify(&self.epoll, &watcher.socket, data, flags) {
            tracing::error!(%error, "cannot poll a terminal watcher's socket");
        }
    }

    /// Names them in a handover; the scrollback goes to `blobs`.
    pub(super) fn hand_over_terminals(&self, handover: &mut Handover, blobs: &mut Vec<u8>) {
        for (name, (_, terminal)) in &self.terminals {
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

    pub(super) fn resume_terminals(
        &mut self,
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
            self.add_terminal(&kept.name, terminal)?;
            self.update_terminal(&kept.name);
        }
        for kept in handover.watchers.drain(..) {
            self.add_watcher(Watcher {
                terminal: kept.terminal,
                socket: inherited_fd(kept.fd)?,
                skipped: kept.skipped,
            })?;
        }
        Ok(())
    }

    /// All descriptors of terminals and watchers.
    pub(super) fn terminal_fds(&self) -> impl Iterator<Item = std::os::fd::BorrowedFd<'_>> {
        let masters = self.terminals.values().map(|(_, one)| one.master.as_fd());
        masters.chain(self.watchers.values().map(|one| one.socket.as_fd()))
    }

    pub(super) fn is_terminal(token: u64) -> bool {
        (FIRST_TERMINAL..FIRST_WATCHER).contains(&token)
    }
}
