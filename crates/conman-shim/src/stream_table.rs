//! The streams of all containers and commands: terminals and pipes that are kept, their output, their watchers.
//! They have an epoll of their own, which the fence's loop polls as one descriptor. However many of them are
//! ready, one call of `serve` serves a few, so that the loop (conman-fence) gets its turn.
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

use conman_fence::{
    ContainerStreams, HandedOverStreams, KeptStreams, KeptWatcher, PollToken, Poller, StreamsUser,
    WatcherPlace, number,
};
use conman_linux::inherited_fd;
use conman_shim_protocol::{
    CallError, KEPT_OUTPUT_BYTES, KeptStreamsSpec, MAX_INPUT_BYTES, OutputStream, StreamInput,
    TerminalSize, seqpacket,
};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

use crate::output_ring::OutputRing;
use crate::streams::{Streams, Watcher};

/// Containers and commands with streams at a time; the kept output is the largest part of the shim's memory.
const MAX_STREAMS: usize = 3_072;

/// Of these, only containers' terminals may be the last ones: commands do not keep containers from starting.
const MAX_WITH_COMMANDS: usize = 2_048;

/// Watchers at a time, of all streams together.
const MAX_WATCHERS: usize = 1_024;

/// Streams and watchers that are served in one turn.
const STREAMS_A_TURN: usize = 16;

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

/// The owner of a polled descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Token {
    /// One of the streams of a container or command.
    Stream(u64),
    Watcher(u64),
}

impl PollToken for Token {
    fn parts(self) -> (u8, u64) {
        match self {
            Self::Stream(number) => (0, number),
            Self::Watcher(number) => (1, number),
        }
    }

    fn of(kind: u8, number: u64) -> Option<Self> {
        match kind {
            0 => Some(Self::Stream(number)),
            1 => Some(Self::Watcher(number)),
            _ => None,
        }
    }
}

/// The streams of containers and commands.
#[derive(Debug)]
pub(crate) struct StreamTable {
    poller: Poller<Token>,
    by_name: BTreeMap<String, (u64, Streams)>,
    names: BTreeMap<u64, String>,
    watchers: BTreeMap<u64, Watcher>,
    /// The next number of streams or of a watcher.
    next_number: u64,
}

impl StreamTable {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            poller: Poller::new()?,
            by_name: BTreeMap::new(),
            names: BTreeMap::new(),
            watchers: BTreeMap::new(),
            next_number: 0,
        })
    }

    fn add(&mut self, name: &str, streams: Streams) -> io::Result<()> {
        let number = self.take_number();
        for (stream, fd) in &streams.outputs {
            let token = Token::Stream(number * ENDS + end_of(*stream));
            self.poller.add(token, fd, EventFlags::IN)?;
        }
        self.names.insert(number, name.to_owned());
        self.by_name.insert(name.to_owned(), (number, streams));
        self.update(name);
        Ok(())
    }

    fn take_number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    fn add_watcher(&mut self, watcher: Watcher) -> io::Result<()> {
        let number = self.take_number();
        let token = Token::Watcher(number);
        self.poller.add(token, &watcher.socket, EventFlags::IN)?;
        self.watchers.insert(number, watcher);
        self.update_watcher(number);
        Ok(())
    }

    /// Reads what the program has written, so that a watcher of one that is dead gets its last output: the daemon may
    /// know the death before the loop gets here. At most as much as is kept, as the program may go on.
    fn catch_up(&mut self, name: &str) {
        let Some((_, streams)) = self.by_name.get_mut(name) else {
            return;
        };
        for stream in [OutputStream::Stdout, OutputStream::Stderr] {
            for _ in 0..KEPT_OUTPUT_BYTES / (OUTPUTS_A_TURN * OUTPUT_BYTES) {
                read_output(streams, &self.poller, stream);
            }
        }
        self.update(name);
    }

    /// The program writes, or reads its input.
    fn serve_streams(&mut self, number: u64) {
        let (number, end) = (number / ENDS, number % ENDS);
        let Some(name) = self.names.get(&number).cloned() else {
            return;
        };
        let Some((_, streams)) = self.by_name.get_mut(&name) else {
            return;
        };
        let outputs = [OutputStream::Stdout, OutputStream::Stderr];
        if let Some(stream) = outputs.into_iter().find(|one| end_of(*one) == end) {
            read_output(streams, &self.poller, stream);
        }
        self.update(&name);
    }

    /// A watcher sends input, or reads again.
    fn serve_watcher(&mut self, number: u64, flags: EventFlags) {
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
        self.update(&name);
    }

    /// Passes on what there is, polls a program for writability only when there is input for it, and watchers
    /// for input only when there is room.
    fn update(&mut self, name: &str) {
        let Some((number, streams)) = self.by_name.get_mut(name) else {
            return;
        };
        if let Some(input) = &streams.input
            && !streams.waiting.is_empty()
        {
            // It is polled only while it is full, since its end would be reported for ever.
            self.poller.remove(input);
        }
        streams.pass_input();
        let token = Token::Stream(*number * ENDS + INPUT);
        if let Some(input) = &streams.input
            && !streams.waiting.is_empty()
            && let Err(error) = self.poller.add(token, input, EventFlags::OUT)
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
            self.update_watcher(number);
        }
    }

    fn update_watcher(&self, number: u64) {
        let Some(watcher) = self.watchers.get(&number) else {
            return;
        };
        let streams = self.by_name.get(&watcher.name);
        let takes_input = streams.is_some_and(|(_, streams)| streams.takes_input());
        let mut flags = EventFlags::empty();
        flags.set(EventFlags::IN, takes_input);
        flags.set(EventFlags::OUT, watcher.is_behind);
        self.poller
            .change(Token::Watcher(number), &watcher.socket, flags);
    }
}

impl AsFd for StreamTable {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.poller.as_fd()
    }
}

impl ContainerStreams for StreamTable {
    fn serve(&mut self) -> io::Result<()> {
        for (token, flags) in self.poller.ready(STREAMS_A_TURN)? {
            match token {
                Token::Stream(number) => self.serve_streams(number),
                Token::Watcher(number) => self.serve_watcher(number, flags),
            }
        }
        Ok(())
    }

    fn open(
        &mut self,
        name: &str,
        spec: KeptStreamsSpec,
        owner: Option<(u32, u32)>,
        user: StreamsUser,
    ) -> Result<[OwnedFd; 3], CallError> {
        let failed = |error| CallError::host("open streams for", name)(error);
        let most = match user {
            StreamsUser::Container => MAX_STREAMS,
            StreamsUser::Command => MAX_WITH_COMMANDS,
        };
        if self.by_name.len() >= most {
            return Err(CallError::full("terminals and kept commands"));
        }
        let (streams, far) = match spec {
            KeptStreamsSpec::Terminal(size) => Streams::terminal(size, owner)
                .and_then(|(streams, slave)| {
                    Ok((streams, [slave.try_clone()?, slave.try_clone()?, slave]))
                })
                .map_err(failed)?,
            KeptStreamsSpec::Pipes { stdin } => Streams::pipes(stdin).map_err(failed)?,
        };
        self.add(name, streams).map_err(failed)?;
        Ok(far)
    }

    fn close(&mut self, name: &str) {
        if let Some((number, _)) = self.by_name.remove(name) {
            self.names.remove(&number);
            self.watchers.retain(|_, watcher| watcher.name != name);
        }
    }

    fn output_end(&self, name: &str) -> Option<u64> {
        let (_, streams) = self.by_name.get(name)?;
        Some(streams.ring.end())
    }

    fn attach(
        &mut self,
        name: &str,
        size: Option<TerminalSize>,
        after: Option<u64>,
        quiet: bool,
    ) -> Result<OwnedFd, CallError> {
        let failed = |error| CallError::host("attach to", name)(error);
        if self.watchers.len() >= MAX_WATCHERS {
            return Err(CallError::full("watchers of terminals and kept commands"));
        }
        self.catch_up(name);
        let Some((_, streams)) = self.by_name.get_mut(name) else {
            return Err(failed(io::Error::other("it has no kept streams")));
        };
        let (ours, theirs) = seqpacket::pair().map_err(failed)?;
        rustix::io::ioctl_fionbio(&ours, true).map_err(|errno| failed(errno.into()))?;
        let mut watcher = Watcher {
            name: name.to_owned(),
            socket: ours,
            place: WatcherPlace::New { after },
            is_behind: false,
        };
        let fed = watcher.feed(streams);
        if size.is_some() || !quiet {
            // Even if the size is the same, since the kept output may lack a part of the screen.
            streams.resize(size);
        }
        if fed.is_ok() {
            self.add_watcher(watcher).map_err(failed)?;
        }
        Ok(theirs)
    }

    fn hand_over(&self) -> HandedOverStreams {
        let mut handed_over = HandedOverStreams::default();
        for (name, (_, streams)) in &self.by_name {
            let bytes = streams.ring.bytes();
            let outputs = streams.outputs.iter();
            handed_over.streams.push(KeptStreams {
                name: name.clone(),
                outputs: outputs.map(|(stream, fd)| (*stream, number(fd))).collect(),
                input: streams.input.as_ref().map(number),
                input_ends: streams.input_ends,
                waiting: streams.waiting.iter().copied().collect(),
                size: streams.size,
                at: handed_over.blobs.len(),
                length: bytes.len(),
                start: streams.ring.start(),
                runs: streams.ring.runs(),
                modes: streams.ring.modes(),
            });
            handed_over.blobs.extend(bytes);
        }
        for watcher in self.watchers.values() {
            handed_over.watchers.push(KeptWatcher {
                name: watcher.name.clone(),
                fd: number(&watcher.socket),
                place: watcher.place,
            });
        }
        handed_over
    }

    fn resume(&mut self, handed_over: HandedOverStreams) -> io::Result<()> {
        for kept in handed_over.streams {
            let end = kept.at.saturating_add(kept.length);
            let bytes = handed_over.blobs.get(kept.at..end).unwrap_or_default();
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
            self.add(&kept.name, streams)?;
        }
        for kept in handed_over.watchers {
            let watcher = Watcher {
                name: kept.name.clone(),
                socket: inherited_fd(kept.fd)?,
                place: kept.place,
                is_behind: false,
            };
            self.add_watcher(watcher)?;
            self.update(&kept.name);
        }
        Ok(())
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        let streams = self.by_name.values().flat_map(|(_, streams)| {
            let outputs = streams.outputs.iter().map(|(_, fd)| fd);
            outputs.chain(&streams.input).map(AsFd::as_fd)
        });
        let watchers = self.watchers.values().map(|one| one.socket.as_fd());
        streams.chain(watchers).collect()
    }
}

fn read_output(streams: &mut Streams, poller: &Poller<Token>, stream: OutputStream) {
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
mod tests;
