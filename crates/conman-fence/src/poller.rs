//! An epoll instance, and the owner of each descriptor in it.

use std::fmt::Debug;
use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;

/// Most events taken from the kernel in one call.
const BATCH: usize = 64;

/// The owner's number is in the lower bits of an event's data, its kind in the upper ones.
const NUMBER_BITS: u32 = 56;

/// The owner of a polled descriptor.
pub trait PollToken: Copy + Debug {
    /// Its kind, and its number among those of the kind, below 2^56.
    fn parts(self) -> (u8, u64);

    /// The owner with these parts, if there can be one.
    fn of(kind: u8, number: u64) -> Option<Self>;
}

/// An epoll instance. A descriptor leaves it when it is closed. It can be polled itself.
#[derive(Debug)]
pub struct Poller<Token> {
    epoll: OwnedFd,
    owners: PhantomData<Token>,
}

impl<Token: PollToken> Poller<Token> {
    /// # Errors
    /// When the kernel cannot create one.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            epoll: epoll::create(CreateFlags::CLOEXEC)?,
            owners: PhantomData,
        })
    }

    /// Waits for events; returns none after a signal.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn wait(&self) -> io::Result<Vec<(Token, EventFlags)>> {
        self.events(BATCH, None)
    }

    /// Returns events that are there, at most so many, without waiting.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn ready(&self, most: usize) -> io::Result<Vec<(Token, EventFlags)>> {
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        self.events(most, Some(&now))
    }

    fn events(
        &self,
        most: usize,
        timeout: Option<&Timespec>,
    ) -> io::Result<Vec<(Token, EventFlags)>> {
        let mut space = [MaybeUninit::uninit(); BATCH];
        let events = match epoll::wait(&self.epoll, &mut space[..most.min(BATCH)], timeout) {
            Ok((events, _)) => events,
            Err(Errno::INTR) => return Ok(Vec::new()),
            Err(errno) => return Err(errno.into()),
        };
        let known = |event: &Event| Some((owner(event.data)?, event.flags));
        Ok(events.iter().filter_map(known).collect())
    }

    /// # Errors
    /// When the kernel cannot poll the descriptor.
    pub fn add(&self, token: Token, fd: impl AsFd, flags: EventFlags) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, data(token), flags)?)
    }

    /// Changes which events of a polled descriptor are reported.
    pub fn change(&self, token: Token, fd: impl AsFd, flags: EventFlags) {
        if let Err(error) = epoll::modify(&self.epoll, fd, data(token), flags) {
            tracing::error!(?token, %error, "cannot change the events that are polled");
        }
    }

    /// Stops polling a descriptor that stays open.
    pub fn remove(&self, fd: impl AsFd) {
        // It fails only where the descriptor is not polled.
        let _ = epoll::delete(&self.epoll, &fd);
    }
}

impl<Token> AsFd for Poller<Token> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

fn data(token: impl PollToken) -> EventData {
    let (kind, number) = token.parts();
    EventData::new_u64(u64::from(kind) << NUMBER_BITS | number)
}

fn owner<Token: PollToken>(data: EventData) -> Option<Token> {
    let number = data.u64() & ((1 << NUMBER_BITS) - 1);
    let kind = u8::try_from(data.u64() >> NUMBER_BITS).ok()?;
    Token::of(kind, number)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    struct Any(u8, u64);

    impl PollToken for Any {
        fn parts(self) -> (u8, u64) {
            (self.0, self.1)
        }

        fn of(kind: u8, number: u64) -> Option<Self> {
            Some(Self(kind, number))
        }
    }

    proptest! {
        #[test]
        fn a_token_survives_the_kernel(kind in any::<u8>(), number in 0_u64..1 << NUMBER_BITS) {
            let token = Any(kind, number);
            prop_assert_eq!(owner(data(token)), Some(token));
        }
    }
}
