//! The heads of the answers on a connection.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// Most interim answers (1xx) to one request; hyper accepts any number.
const MAX_INTERIM: u32 = 64;

/// Length of a status line up to the first digit of the status.
const STATUS_AT: usize = "HTTP/1.1 ".len();
/// Likewise, up to its last digit.
const STATUS_LINE: usize = STATUS_AT + 3;

/// Tracks the heads by which a session answers one request: the interim ones and the final one.
///
/// A session may take any time before it answers, between two heads, and within the body. A head
/// that has begun must be complete in time, and interim answers are counted.
#[derive(Debug)]
pub(crate) struct AnswerHeads {
    awaited: Awaited,
    timeout: Duration,
    interim: u32,
    /// Deadline for the head that has begun.
    until: Option<Instant>,
    status_line: [u8; STATUS_LINE],
    /// Bytes of the head so far that belong into `status_line`.
    known: usize,
    line_is_empty: bool,
}

/// Whether an answer's final head is awaited. Set when a request is sent on the connection.
#[derive(Debug, Clone, Default)]
pub(crate) struct Awaited(Arc<AtomicBool>);

/// Why an answer is given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HeadFault {
    #[error("a head that was not complete in time")]
    Slow,
    #[error("too many interim answers (1xx)")]
    Endless,
}

impl Awaited {
    pub(crate) fn begin(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn end(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    fn is(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl HeadFault {
    /// The fault that caused an error of hyper.
    #[must_use]
    pub fn of(error: &hyper::Error) -> Option<Self> {
        let source = std::error::Error::source(error)?;
        let inner = source.downcast_ref::<io::Error>()?.get_ref()?;
        inner.downcast_ref::<Self>().copied()
    }
}

impl AnswerHeads {
    pub(crate) fn new(awaited: Awaited, timeout: Duration) -> Self {
        Self {
            awaited,
            timeout,
            interim: 0,
            until: None,
            status_line: [0; STATUS_LINE],
            known: 0,
            line_is_empty: false,
        }
    }

    /// The deadline for more bytes.
    pub(crate) fn until(&self) -> Option<Instant> {
        self.until
    }

    /// Processes the next bytes of the connection.
    pub(crate) fn observe(&mut self, bytes: &[u8]) -> Result<(), HeadFault> {
        if !self.awaited.is() {
            return Ok(());
        }
        for &byte in bytes {
            if self.known == 0 && matches!(byte, b'\r' | b'\n') {
                // Empty lines before a head are ignored.
                continue;
            }
            if self.known == 0 {
                self.until = Some(Instant::now() + self.timeout);
            }
            if let Some(place) = self.status_line.get_mut(self.known) {
                *place = byte;
                self.known += 1;
            }
            match byte {
                b'\n' if self.line_is_empty => {
                    if self.ends_answer() {
                        return Ok(());
                    }
                    if self.interim > MAX_INTERIM {
                        return Err(HeadFault::Endless);
                    }
                }
                b'\n' => self.line_is_empty = true,
                b'\r' => {}
                _ => self.line_is_empty = false,
            }
        }
        Ok(())
    }

    /// A head is complete. Returns whether it is the last one.
    fn ends_answer(&mut self) -> bool {
        let status = &self.status_line[STATUS_AT..];
        let is_interim = self.known == STATUS_LINE && status[0] == b'1' && status != b"101";
        (self.until, self.known, self.line_is_empty) = (None, 0, false);
        if is_interim {
            self.interim += 1;
        } else {
            self.interim = 0;
            self.awaited.end();
        }
        !is_interim
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(15);

    fn heads() -> (AnswerHeads, Awaited) {
        let awaited = Awaited::default();
        awaited.begin();
        (AnswerHeads::new(awaited.clone(), TIMEOUT), awaited)
    }

    #[tokio::test]
    async fn the_final_head_ends_the_wait_however_its_bytes_arrive() {
        let answers = [
            "HTTP/1.1 200 OK\r\nA: b\r\n\r\n",
            "\r\nHTTP/1.1 103 E\r\nA: b\r\n\r\nHTTP/1.1 204 N\r\n\r\n",
            "HTTP/1.0 200 OK\nA: b\n\n",
            "HTTP/1.1 101 S\r\n\r\n",
        ];
        for answer in answers {
            for size in [1, 7, 1_000] {
                let (mut heads, awaited) = heads();
                let (head, last) = answer.as_bytes().split_at(answer.len() - 1);
                for piece in head.chunks(size) {
                    assert_eq!(heads.observe(piece), Ok(()));
                }
                assert!(awaited.is() && heads.until().is_some(), "{answer:?}");
                assert_eq!(heads.observe(last), Ok(()));
                assert!(!awaited.is() && heads.until().is_none(), "{answer:?}");
                // It ignores the body.
                assert_eq!(heads.observe(b"HTTP/1.1 103"), Ok(()));
                assert!(heads.until().is_none());
            }
        }
    }

    #[tokio::test]
    async fn interim_answers_are_counted_and_time_between_them_is_free() {
        let (mut heads, awaited) = heads();
        for _ in 0..MAX_INTERIM {
            assert_eq!(heads.observe(b"HTTP/1.1 102 P\r\n\r\n"), Ok(()));
            assert!(awaited.is() && heads.until().is_none());
        }
        let one_more = heads.observe(b"HTTP/1.1 102 P\r\n\r\n");
        assert_eq!(one_more, Err(HeadFault::Endless));
    }
}
