//! The shim's side of the process that bounds logs: which logs it bounds.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use conman_linux::SoleThread;
use conman_shim_protocol::{encode, seqpacket};
use serde::{Deserialize, Serialize};

use crate::helper::Helper;

/// A log and its bound.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BoundedLog {
    pub path: PathBuf,
    pub bytes: u64,
}

/// The shim's orders.
#[derive(Debug, Serialize, Deserialize)]
pub enum LogOrder {
    Watch(BoundedLog),
    /// After a last check.
    Forget(PathBuf),
}

/// The shim's side.
#[derive(Debug)]
pub(crate) struct Sweeper {
    /// What the process does.
    serve: fn(&OwnedFd) -> io::Result<()>,
    process: Option<Helper>,
    /// At most two for each log, since a new process gets all of them again.
    waiting: VecDeque<Vec<u8>>,
}

impl Sweeper {
    pub(crate) fn new(serve: fn(&OwnedFd) -> io::Result<()>) -> Self {
        Self {
            serve,
            process: None,
            waiting: VecDeque::new(),
        }
    }

    /// Forks a sweeper when there is none. `true` when its socket is a new one.
    pub(crate) fn ensure(&mut self, sole: &SoleThread) -> io::Result<bool> {
        if self.process.is_some() {
            return Ok(false);
        }
        self.process = Some(Helper::start(sole, c"shim-sweeper", self.serve)?);
        self.waiting.clear();
        Ok(true)
    }

    pub(crate) fn pid(&self) -> Option<i32> {
        self.process.as_ref().map(Helper::pid)
    }

    pub(crate) fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.process.as_ref().map(AsFd::as_fd)
    }

    pub(crate) fn watch(&mut self, log: &BoundedLog) {
        self.push(&LogOrder::Watch(log.clone()));
    }

    pub(crate) fn forget(&mut self, log: &BoundedLog) {
        self.push(&LogOrder::Forget(log.path.clone()));
    }

    fn push(&mut self, order: &LogOrder) {
        match encode(order) {
            Ok(bytes) => self.waiting.push_back(bytes),
            Err(error) => tracing::error!(?order, %error, "cannot send a log to the log sweeper"),
        }
        self.flush();
    }

    /// Sends as much as the socket takes. A sweeper's death is noticed by its signal, not here.
    pub(crate) fn flush(&mut self) {
        let Some(sweeper) = &self.process else {
            return;
        };
        while let Some(bytes) = self.waiting.front() {
            if seqpacket::send(sweeper, bytes, &[]).is_err() {
                return;
            }
            self.waiting.pop_front();
        }
    }

    pub(crate) fn is_waiting(&self) -> bool {
        self.process.is_some() && !self.waiting.is_empty()
    }

    pub(crate) fn died(&mut self) {
        self.process = None;
    }

    /// Kills and reaps it, because the shim or its program ends.
    pub(crate) fn stop(&mut self) {
        if let Some(sweeper) = self.process.take() {
            sweeper.stop();
        }
    }
}
