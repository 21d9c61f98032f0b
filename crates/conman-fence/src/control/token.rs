//! The owner of each descriptor that the loop polls.

use crate::poller::PollToken;

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
    /// Some streams are ready.
    Streams,
}

impl PollToken for Token {
    fn parts(self) -> (u8, u64) {
        match self {
            Self::Listener => (0, 0),
            Self::Signals => (1, 0),
            Self::Timer => (2, 0),
            Self::Launcher => (3, 0),
            Self::Sweeper => (4, 0),
            Self::Candidate => (5, 0),
            Self::Client(number) => (6, number),
            Self::Adopted(number) => (7, number),
            Self::Streams => (8, 0),
        }
    }

    fn of(kind: u8, number: u64) -> Option<Self> {
        match kind {
            0 => Some(Self::Listener),
            1 => Some(Self::Signals),
            2 => Some(Self::Timer),
            3 => Some(Self::Launcher),
            4 => Some(Self::Sweeper),
            5 => Some(Self::Candidate),
            6 => Some(Self::Client(number)),
            7 => Some(Self::Adopted(number)),
            8 => Some(Self::Streams),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_is_found_by_its_parts() {
        for token in [
            Token::Listener,
            Token::Signals,
            Token::Timer,
            Token::Launcher,
            Token::Sweeper,
            Token::Candidate,
            Token::Client(7),
            Token::Adopted(7),
            Token::Streams,
        ] {
            let (kind, number) = token.parts();
            assert_eq!(Token::of(kind, number), Some(token));
        }
    }
}
