//! The epoll instances, and the owner of each descriptor in them.
//!
//! Streams have one of their own, which is polled in the other one. However many of them are ready, a turn
//! serves a few, and then the timer, the launcher and the clients again.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;

/// Events taken from the kernel in one call.
const BATCH: usize = 64;

/// Streams and watchers that are served in one turn.
const STREAMS_A_TURN: usize = 16;

/// The owner's number is in the lower bits of an event's data, its kind in the upper ones.
const NUMBER_BITS: u32 = 56;

/// The owner of a polled descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Token {
    Listener,
    Signals,
    Timer,
    Launcher,
    Sweeper,
    /// The program that is checked before it takes over.
    Candidate,
    Client(u64),
    /// The pidfd of a container that is no child.
    Adopted(u64),
    /// One of the streams of a container or command.
    Stream(u64),
    Watcher(u64),
    /// Some of the two before are ready.
    Streams,
}

impl Token {
    fn data(self) -> EventData {
        let (kind, number) = match self {
            Self::Listener => (0, 0),
            Self::Signals => (1, 0),
            Self::Timer => (2, 0),
            Self::Launcher => (3, 0),
            Self::Sweeper => (4, 0),
            Self::Candidate => (5, 0),
            Self::Client(number) => (6, number),
            Self::Adopted(number) => (7, number),
            Self::Stream(number) => (8, number),
            Self::Watcher(number) => (9, number),
            Self::Streams => (10, 0),
        };
        EventData::new_u64(kind << NUMBER_BITS | number)
    }

    fn of(data: EventData) -> Option<Self> {
        let number = data.u64() & ((1 << NUMBER_BITS) - 1);
        match data.u64() >> NUMBER_BITS {
            0 => Some(Self::Listener),
            1 => Some(Self::Signals),
            2 => Some(Self::Timer),
            3 => Some(Self::Launcher),
            4 => Some(Self::Sweeper),
            5 => Some(Self::Candidate),
            6 => Some(Self::Client(number)),
            7 => Some(Self::Adopted(number)),
            8 => Some(Self::Stream(number)),
            9 => Some(Self::Watcher(number)),
            10 => Some(Self::Streams),
            _ => None,
        }
    }
}

/// The epoll instances. A descriptor leaves them when it is closed.
#[derive(Debug)]
pub(super) struct Poller {
    all: OwnedFd,
    streams: OwnedFd,
}

impl Poller {
    pub(super) fn new() -> io::Result<Self> {
        let all = epoll::create(CreateFlags::CLOEXEC)?;
        let streams = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&all, &streams, Token::Streams.data(), EventFlags::IN)?;
        Ok(Self { all, streams })
    }

    /// Waits for events; returns none after a signal.
    pub(super) fn wait(&self) -> io::Result<Vec<(Token, EventFlags)>> {
        events(&self.all, &mut [MaybeUninit::uninit(); BATCH], None)
    }

    /// Returns the events of some streams and watchers, without waiting.
    pub(super) fn ready_streams(&self) -> io::Result<Vec<(Token, EventFlags)>> {
        let mut space = [MaybeUninit::uninit(); STREAMS_A_TURN];
        events(
            &self.streams,
            &mut space,
            Some(&Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            }),
        )
    }

    fn of(&self, token: Token) -> &OwnedFd {
        match token {
            Token::Stream(_) | Token::Watcher(_) => &self.streams,
            _ => &self.all,
        }
    }

    pub(super) fn add(&self, token: Token, fd: impl AsFd, flags: EventFlags) -> io::Result<()> {
        Ok(epoll::add(self.of(token), fd, token.data(), flags)?)
    }

    pub(super) fn change(&self, token: Token, fd: impl AsFd, flags: EventFlags) {
        if let Err(error) = epoll::modify(self.of(token), fd, token.data(), flags) {
            tracing::error!(?token, %error, "cannot change the events that are polled");
        }
    }

    /// Stops polling a descriptor that stays open.
    pub(super) fn remove(&self, fd: impl AsFd) {
        // It fails only where the descriptor is not polled.
        let _ = epoll::delete(&self.streams, &fd);
        let _ = epoll::delete(&self.all, &fd);
    }
}

fn events(
    epoll: &OwnedFd,
    space: &mut [MaybeUninit<Event>],
    timeout: Option<&Timespec>,
) -> io::Result<Vec<(Token, EventFlags)>> {
    let events = match epoll::wait(epoll, space, timeout) {
        Ok((events, _)) => events,
        Err(Errno::INTR) => return Ok(Vec::new()),
        Err(errno) => return Err(errno.into()),
    };
    let known = |event: &Event| Some((Token::of(event.data)?, event.flags));
    Ok(events.iter().filter_map(known).collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_token_survives_the_kernel_and_no_data_panics(
            number in 0_u64..1 << NUMBER_BITS,
            any in any::<u64>(),
        ) {
            for token in [
                Token::Listener,
                Token::Signals,
                Token::Timer,
                Token::Launcher,
                Token::Sweeper,
                Token::Candidate,
                Token::Client(number),
                Token::Adopted(number),
                Token::Stream(number),
                Token::Watcher(number),
                Token::Streams,
            ] {
                prop_assert_eq!(Token::of(token.data()), Some(token));
            }
            let _ = Token::of(EventData::new_u64(any));
        }
    }
}
