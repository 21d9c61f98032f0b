//! What the shim has besides the fence: the loop starts it, calls it, and knows nothing else of it.
//!
//! ```text
//! conman-fence: Control ──▶ launcher, log sweeper    processes that it forks, and functions that they run
//!                       ──▶ ContainerStreams         terminals and pipes, in the loop's own thread
//! ```
//! None of these decides whether a container may run, and none of them may wait on the loop's thread.

use std::fmt::Debug;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};

use conman_shim_protocol::{CallError, KeptStreamsSpec, OutputStream, TerminalSize};
use serde::{Deserialize, Serialize};

use crate::options::ShimOptions;

/// The parts besides the fence.
#[derive(Debug)]
pub struct ShimParts {
    /// What the launcher's process does: it carries out each [`crate::Order`] on this socket and answers with
    /// [`crate::Report`]s, until the socket closes.
    pub launcher: fn(&OwnedFd, &ShimOptions) -> io::Result<()>,
    /// What the log sweeper's process does: it carries out each [`crate::LogOrder`] on this socket, until the
    /// socket closes.
    pub log_sweeper: fn(&OwnedFd) -> io::Result<()>,
    pub streams: Box<dyn ContainerStreams>,
}

/// What streams are opened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamsUser {
    Container,
    Command,
}

/// The terminals and pipes that the shim keeps, their output, and the clients that watch them. Nothing in it
/// waits. Its descriptor is readable while [`ContainerStreams::serve`] has something to do.
pub trait ContainerStreams: AsFd + Debug {
    /// Serves some that are ready, and returns soon, however many there are.
    ///
    /// # Errors
    /// When they cannot be polled any more.
    fn serve(&mut self) -> io::Result<()>;

    /// Opens the streams of a container or command, and returns the far ends of input, output and error; of a
    /// terminal all are the same. `owner` is the user and group on the host.
    ///
    /// # Errors
    /// When there are too many, or the kernel refuses.
    fn open(
        &mut self,
        name: &str,
        spec: KeptStreamsSpec,
        owner: Option<(u32, u32)>,
        user: StreamsUser,
    ) -> Result<[OwnedFd; 3], CallError>;

    /// Closes those of a container or command that is forgotten, or has failed to begin.
    fn close(&mut self, name: &str);

    /// The offset of the next byte of its output.
    fn output_end(&self, name: &str) -> Option<u64>;

    /// Adds a watcher, and returns its end of a socket.
    ///
    /// # Errors
    /// When it has no streams, or there are too many watchers.
    fn attach(
        &mut self,
        name: &str,
        size: Option<TerminalSize>,
        after: Option<u64>,
        quiet: bool,
    ) -> Result<OwnedFd, CallError>;

    /// All of it, for the program that replaces this one.
    fn hand_over(&self) -> HandedOverStreams;

    /// Takes over the streams of the program that this one replaces.
    ///
    /// # Errors
    /// When a descriptor is missing or cannot be polled.
    fn resume(&mut self, handed_over: HandedOverStreams) -> io::Result<()>;

    /// Every descriptor that a handover names.
    fn fds(&self) -> Vec<BorrowedFd<'_>>;
}

/// The streams of a program that is replaced.
#[derive(Debug, Default)]
pub struct HandedOverStreams {
    pub streams: Vec<KeptStreams>,
    pub watchers: Vec<KeptWatcher>,
    /// The kept output of all.
    pub blobs: Vec<u8>,
}

/// The streams of a container or command; the kept output is in the blobs.
#[derive(Debug, Serialize, Deserialize)]
pub struct KeptStreams {
    pub name: String,
    pub outputs: Vec<(OutputStream, RawFd)>,
    pub input: Option<RawFd>,
    pub input_ends: bool,
    pub waiting: Vec<u8>,
    pub size: Option<TerminalSize>,
    pub at: usize,
    pub length: usize,
    pub start: u64,
    pub runs: Vec<(OutputStream, usize)>,
    pub modes: Option<Vec<u8>>,
}

/// A watcher of streams.
#[derive(Debug, Serialize, Deserialize)]
pub struct KeptWatcher {
    pub name: String,
    pub fd: RawFd,
    pub place: WatcherPlace,
}

/// Which message a watcher gets next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum WatcherPlace {
    /// Its first: it wants the output from this offset on, or as much as there is.
    New { after: Option<u64> },
    /// The output from this offset on.
    At(u64),
    /// None.
    Ended,
}
