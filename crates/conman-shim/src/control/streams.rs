//! The streams part: terminals and pipes that are kept, their output, their watchers. It needs nothing of the
//! other parts.
//!
//! ```text
//! streams: open ──▶ open ── no process has an output open ──▶ ended ── container forgotten ──▶ closed
//!
//! watcher: attach ──▶ has everything ◀── its socket takes more ──┐
//!            │          └────────── its socket is full ───────▶ behind
//!            └─ the streams have ended: what is kept, the end, and no watcher is left
//! ```
//! Input is read from watchers only while there is room for it.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use conman_linux::inherited_fd;
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

use super::poller::{Poller, Token};
use super::{full, host_error};
use crate::handover::{Handover, KeptStreams, KeptWatcher, number};
use crate::output_ring::OutputRing;
use crate::protocol::CallError;
use crate::seqpacket;
use crate::spec::{KeptStreamsSpec, TerminalSize};
use crate::stream_messages::{MAX_INPUT_BYTES, OutputStream, StreamInput};
use crate::streams::{Place, Streams, Watcher};

/// Containers and commands with streams at a time; the kept output is the largest part of the shim's memory.
pub(super) const MAX_STREAMS: usize = 3_072;

/// Of these, only containers' terminals may be the last ones: commands do not keep containers from starting.
pub(super) const MAX_WITH_COMMANDS: usize = 2_048;

/// Watchers at a time, of all streams together.
const MAX_WATCHERS: usize = 1_024;

/// Bytes that are read at once, and reads before the turn of the next.
const OUTPUT_BYTES: usize = 4_096;
const OUTPUTS_A_TURN: usize = 4;

/// Messages of a watcher before the turn of the next.
const MESSAGES_A_TURN: usize = 8;

/// The streams of a container or command are polled under its number and one of these.
const ENDS: u64 = 4;
const INPUT: u64 = 3;

fn end_of(stream: OutputStream) -> u64 {
    match stream {
        OutputStream::Stdout => 1,
        OutputStream::Stderr => 2,
    }
}

/// The streams of containers and commands.
#[derive(Debug, Default)]
pub(super) struct StreamTable {
    by_name: BTreeMap<String, (u64, Streams)>,
    names: BTreeMap<u64, String>,
    watchers: BTreeMap<u64, Watcher>,
    /// The next number of streams or of a watcher.
    next_number: u64,
}

impl StreamTable {
    /// Opens the streams of a container or command, unless there are as many as `most`, and returns the far
    /// ends; of a terminal all are the same.
    pub(super) fn open(
        &mut self,
        poller: &Poller,
        name: &str,
        spec: KeptStreamsSpec,
        owner: Option<(u32, u32)>,
        most: usize,
    ) -> Result<[OwnedFd; 3], CallError> {
        let failed = |error| host_error("open streams for", name)(error);
        if self.by_name.len() >= most {
            return Err(full("terminals and kept commands"));
        }
        let (streams, far) = match spec {
            KeptStreamsSpec::Terminal(size) => Streams::terminal(size, owner)
                .and_then(|(streams, slave)| {
                    Ok((streams, [slave.try_clone()?, slave.try_clone()?, slave]))
                })
                .map_err(failed)?,
            KeptStreamsSpec::Pipes { stdin } => Streams::pipes(stdin).map_err(failed)?,
        };
        self.add(poller, name, streams).map_err(failed)?;
        Ok(far)
    }

    fn add(&mut self, poller: &Poller, name: &str, streams: Streams) -> io::Result<()> {
        let number = self.take_number();
        for (stream, fd) in &streams.outputs {
            let token = Token::Stream(number * ENDS + end_of(*stream));
            poller.add(token, fd, EventFlags::IN)?;
        }
        self.names.insert(number, name.to_owned());
        self.by_name.insert(name.to_owned(), (number, streams));
        self.update(poller, name);
        Ok(())
    }

    fn take_number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    /// Closes the streams of a command or container that is forgotten, or has failed to begin.
    pub(super) fn close(&mut self, name: &str) {
        if let Some((number, _)) = self.by_name.remove(name) {
            self.names.remove(&number);
            self.watchers.retain(|_, watcher| watcher.name != name);
        }
    }

    /// The offset of the next byte of its output.
    pub(super) fn output_end(&self, name: &str) -> Option<u64> {
        let (_, streams) = self.by_name.get(name)?;
        Some(streams.ring.end())
    }

    /// Adds a watcher, and returns its end of a socket.
    pub(super) fn attach(
        &mut self,
        poller: &Poller,
        name: &str,
        size: Option<TerminalSize>,
        after: Option<u64>,
        quiet: bool,
    ) -> Result<OwnedFd, CallError> {
        let failed = |error| host_error("attach to", name)(error);
        if self.watchers.len() >= MAX_WATCHERS {
            return Err(full("watchers of terminals and kept commands"));
        }
        let Some((_, streams)) = self.by_name.get_mut(name) else {
            return Err(failed(io::Error::other("it has no kept streams")));
        };
        let (ours, theirs) = seqpacket::pair().map_err(failed)?;
        rustix::io::ioctl_fionbio(&ours, true).map_err(|errno| failed(errno.into()))?;
        let mut watcher = Watcher {
            name: name.to_owned(),
            socket: ours,
            place: Place::New { after },
            is_behind: false,
        };
        let fed = watcher.feed(streams);
        if size.is_some() || !quiet {
            // Even if the size is the same, since the kept output may lack a part of the screen.
            streams.resize(size);
        }
        if fed.is_ok() {
            self.add_watcher(poller, watcher).map_err(failed)?;
        }
        Ok(theirs)
    }

    fn add_watcher(&mut self, poller: &Poller, watcher: Watcher) -> io::Result<()> {
        let number = self.take_number();
        poller.add(Token::Watcher(number), &watcher.socket, EventFlags::IN)?;
        self.watchers.insert(number, watcher);
        self.update_watcher(poller, number);
        Ok(())
    }

    /// The program writes, or reads its input.
    pub(super) fn serve(&mut self, poller: &Poller, number: u64) {
        let (number, end) = (number / ENDS, number % ENDS);
        let Some(name) = self.names.get(&number).cloned() else {
            return;
        };
        let Some((_, streams)) = self.by_name.get_mut(&name) else {
            return;
        };
        let outputs = [OutputStream::Stdout, OutputStream::Stderr];
        if let Some(stream) = outputs.into_iter().find(|one| end_of(*one) == end) {
            read_output(streams, poller, stream);
        }
        self.update(poller, &name);
    }

    /// A watcher sends input, or reads again.
    pub(super) fn serve_watcher(&mut self, poller: &Poller, number: u64, flags: EventFlags) {
        let Some(watcher) = self.watchers.get_mut(&number) else {
            return;
        };
        let name = watcher.name.clone();
        let Some((_, streams)) = self.by_name.get_mut(&name) else {
            self.watchers.remove(&number);
            return;
        };
        let mut closed = flags.contains(EventFlags::OUT) && watcher.feed(streams).is_err();
        for _ in 0..MESSAGES_A_TURN {
            if closed || !streams.takes_input() {
                break;
            }
            let mut message = [0_u8; MAX_INPUT_BYTES + 2];
            match seqpacket::receive(&watcher.socket, &mut message) {
                Ok(Some(received)) => match StreamInput::decode(received.bytes) {
                    Some(input) => streams.take(input),
                    None => closed = true,
                },
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Ok(None) | Err(_) => closed = true,
            }
        }
        if closed {
            self.watchers.remove(&number);
        }
        self.update(poller, &name);
    }

    /// Passes on what there is, polls a program for writability only when there is input for it, and watchers
    /// for input only when there is room.
    fn update(&mut self, poller: &Poller, name: &str) {
        let Some((number, streams)) = self.by_name.get_mut(name) else {
            return;
        };
        if let Some(input) = &streams.input
            && !streams.waiting.is_empty()
        {
            // It is polled only while it is full, since its end would be reported for ever.
            poller.remove(input);
        }
        streams.pass_input();
        let token = Token::Stream(*number * ENDS + INPUT);
        if let Some(input) = &streams.input
            && !streams.waiting.is_empty()
            && let Err(error) = poller.add(token, input, EventFlags::OUT)
        {
            tracing::error!(name, %error, "cannot poll a program's input");
            streams.close_input();
        }
        let streams = &*streams;
        self.watchers
            .retain(|_, one| one.name != name || one.is_behind || one.feed(streams).is_ok());
        let numbers = self.watchers.iter();
        let numbers: Vec<u64> = numbers
            .filter(|(_, watcher)| watcher.name == name)
            .map(|(number, _)| *number)
            .collect();
        for number in numbers {
            self.update_watcher(poller, number);
        }
    }

    fn update_watcher(&self, poller: &Poller, number: u64) {
        let Some(watcher) = self.watchers.get(&number) else {
            return;
        };
        let streams = self.by_name.get(&watcher.name);
        let takes_input = streams.is_some_and(|(_, streams)| streams.takes_input());
        let mut flags = EventFlags::empty();
        flags.set(EventFlags::IN, takes_input);
        flags.set(EventFlags::OUT, watcher.is_behind);
        poller.change(Token::Watcher(number), &watcher.socket, flags);
    }

    /// Names them in a handover; the kept output goes to `blobs`.
    pub(super) fn hand_over(&self, handover: &mut Handover, blobs: &mut Vec<u8>) {
        for (name, (_, streams)) in &self.by_name {
            let bytes = streams.ring.bytes();
            let outputs = streams.outputs.iter();
            handover.streams.push(KeptStreams {
                name: name.clone(),
                outputs: outputs.map(|(stream, fd)| (*stream, number(fd))).collect(),
                input: streams.input.as_ref().map(number),
                input_ends: streams.input_ends,
                waiting: streams.waiting.iter().copied().collect(),
                size: streams.size,
                at: blobs.len(),
                length: bytes.len(),
                start: streams.ring.start(),
                runs: streams.ring.runs(),
                modes: streams.ring.modes(),
            });
            blobs.extend(bytes);
        }
        for watcher in self.watchers.values() {
            handover.watchers.push(KeptWatcher {
                name: watcher.name.clone(),
                fd: number(&watcher.socket),
                place: watcher.place,
            });
        }
    }

    /// Takes over the streams of the program that this one replaces.
    pub(super) fn resume(
        &mut self,
        poller: &Poller,
        handover: &mut Handover,
        blobs: &[u8],
    ) -> io::Result<()> {
        for kept in handover.streams.drain(..) {
            let end = kept.at.saturating_add(kept.length);
            let bytes = blobs.get(kept.at..end).unwrap_or_default();
            let modes = kept.modes.as_deref();
            let outputs = kept.outputs.into_iter();
            let outputs: io::Result<_> = outputs
                .map(|(stream, fd)| Ok((stream, inherited_fd(fd)?)))
                .collect();
            let streams = Streams {
                outputs: outputs?,
                input: kept.input.map(inherited_fd).transpose()?,
                waiting: kept.waiting.into(),
                input_ends: kept.input_ends,
                ring: OutputRing::handed_over(kept.start, bytes, &kept.runs, modes),
                size: kept.size,
            };
            self.add(poller, &kept.name, streams)?;
        }
        for kept in handover.watchers.drain(..) {
            let watcher = Watcher {
                name: kept.name.clone(),
                socket: inherited_fd(kept.fd)?,
                place: kept.place,
                is_behind: false,
            };
            self.add_watcher(poller, watcher)?;
            self.update(poller, &kept.name);
        }
        Ok(())
    }

    /// All descriptors of streams and watchers.
    pub(super) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let streams = self.by_name.values().flat_map(|(_, streams)| {
            let outputs = streams.outputs.iter().map(|(_, fd)| fd);
            outputs.chain(&streams.input).map(AsFd::as_fd)
        });
        streams.chain(self.watchers.values().map(|one| one.socket.as_fd()))
    }
}

fn read_output(streams: &mut Streams, poller: &Poller, stream: OutputStream) {
    for _ in 0..OUTPUTS_A_TURN {
        let Some(output) = streams.output(stream) else {
            return;
        };
        let mut buffer = [0_u8; OUTPUT_BYTES];
        match rustix::io::read(output, &mut buffer) {
            Ok(read) if read > 0 => streams.ring.push(stream, &buffer[..read]),
            Err(Errno::AGAIN | Errno::INTR) => return,
            // No process has it open any more.
            Ok(_) | Err(_) => {
                poller.remove(output);
                streams.outputs.retain(|(one, _)| *one != stream);
                if streams.size.is_some() {
                    // A terminal's input is a copy of its output.
                    streams.close_input();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::time::Duration;

    use rustix::net::sockopt::{Timeout, set_socket_timeout};

    use super::*;
    use crate::socket::{receive_event, send_input};
    use crate::stream_messages::{Position, StreamEvent};

    /// Serves what is ready, as the loop does.
    fn serve(table: &mut StreamTable, poller: &Poller) {
        assert!(
            poller
                .wait()
                .expect("events")
                .contains(&(Token::Streams, EventFlags::IN))
        );
        for (token, flags) in poller.ready_streams().expect("events") {
            match token {
                Token::Stream(number) => table.serve(poller, number),
                Token::Watcher(number) => table.serve_watcher(poller, number, flags),
                other => panic!("{other:?} is no stream's"),
            }
        }
    }

    fn pipes() -> (StreamTable, Poller, [std::fs::File; 3]) {
        let poller = Poller::new().expect("an epoll");
        let mut table = StreamTable::default();
        let spec = KeptStreamsSpec::Pipes { stdin: true };
        let far = table.open(&poller, "a.1_1", spec, None, 1).expect("pipes");
        (table, poller, far.map(std::fs::File::from))
    }

    fn attach(table: &mut StreamTable, poller: &Poller) -> OwnedFd {
        let fd = table.attach(poller, "a.1_1", None, None, true);
        let fd = fd.expect("attached");
        set_socket_timeout(&fd, Timeout::Recv, Some(Duration::from_secs(5))).expect("set");
        fd
    }

    #[test]
    fn a_watcher_gets_what_is_kept_then_the_output_and_the_end() {
        let (mut table, poller, [_stdin, mut stdout, mut stderr]) = pipes();
        stdout.write_all(b"before").expect("written");
        serve(&mut table, &poller);
        let watcher = attach(&mut table, &poller);
        let next = |wanted| {
            let event = receive_event(&watcher, &mut Vec::new());
            assert_eq!(event.expect("an event"), Some(wanted));
        };
        let (offset, dropped) = (0, 0);
        next(StreamEvent::Position(Position { offset, dropped }));
        next(StreamEvent::Output(
            OutputStream::Stdout,
            b"before".to_vec(),
        ));
        stderr.write_all(b"after").expect("written");
        serve(&mut table, &poller);
        next(StreamEvent::Output(OutputStream::Stderr, b"after".to_vec()));
        drop(stdout);
        serve(&mut table, &poller);
        drop(stderr);
        serve(&mut table, &poller);
        next(StreamEvent::End);
        assert!(table.watchers.is_empty());
        assert_eq!(table.fds().count(), 1, "the input");
    }

    #[test]
    fn input_reaches_the_program_up_to_its_end_and_closed_streams_have_no_watcher() {
        let (mut table, poller, [mut stdin, _stdout, _stderr]) = pipes();
        let watcher = attach(&mut table, &poller);
        send_input(&watcher, &StreamInput::Bytes(b"hello".to_vec())).expect("sent");
        send_input(&watcher, &StreamInput::End).expect("sent");
        serve(&mut table, &poller);
        let mut text = String::new();
        stdin.read_to_string(&mut text).expect("its end");
        assert_eq!(text, "hello");
        table.close("a.1_1");
        assert_eq!(table.fds().count(), 0);
        assert!(table.attach(&poller, "a.1_1", None, None, true).is_err());
    }

    #[test]
    fn more_input_than_the_program_reads_waits_for_it() {
        let (mut table, poller, [mut stdin, _stdout, _stderr]) = pipes();
        let watcher = attach(&mut table, &poller);
        rustix::io::ioctl_fionbio(&watcher, true).expect("not blocking");
        let (streams, watchers) = (1, 2);
        let waiting = |table: &StreamTable| table.by_name["a.1_1"].1.waiting.len();
        let mut sent = 0;
        let input = StreamInput::Bytes(vec![b'x'; MAX_INPUT_BYTES]);
        // The pipe, what waits here, and the socket.
        while send_input(&watcher, &input).is_ok() {
            sent += MAX_INPUT_BYTES;
            table.serve_watcher(&poller, watchers, EventFlags::IN);
            assert!(sent < 8 << 20, "it takes everything");
        }
        assert!((1..=MAX_INPUT_BYTES * 4).contains(&waiting(&table)));
        let mut read = 0;
        let mut buffer = vec![0; 64 * 1_024];
        while read < sent {
            read += stdin.read(&mut buffer).expect("read");
            table.serve(&poller, streams * ENDS + INPUT);
            table.serve_watcher(&poller, watchers, EventFlags::IN);
        }
        assert_eq!(waiting(&table), 0);
    }
}
