//! The state that a shim passes to the program that replaces it, in sealed memory.
//!
//! ```text
//! old: seal a first handover ─▶ child: exec the new program to *check* it ─▶ reports whether it can
//! old: wait for starts under way, stop the launcher, seal, exec the new program to *take* it
//! ```
//! Descriptors are passed by number. Containers stay children, since the process stays the same.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

use conman_linux::inherited_fd;
use conman_shim_protocol::{VERSION, decode, encode, seqpacket};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create};
use serde::{Deserialize, Serialize};

use crate::launching::{Pending, StartRemains};
use crate::ledger::Line;
use crate::shim_parts::{KeptStreams, KeptWatcher};

/// Names the descriptors of a handover for the program that is executed.
pub(crate) const VARIABLE: &str = "CONMAN_SHIM_HANDOVER";

/// First bytes, to recognize a handover.
const MAGIC: &[u8; 8] = b"conshim\n";

/// Magic, version, length of the text.
const HEADER: usize = 8 + 4 + 8;

/// Largest handover: 16,384 containers with long names, every start that may wait, and the kept output of
/// three thousand terminals and commands.
const MAX_BYTES: u64 = 512 << 20;

/// No process can change it any more, including the writer.
const SEALS: SealFlags = SealFlags::SEAL
    .union(SealFlags::SHRINK)
    .union(SealFlags::GROW)
    .union(SealFlags::WRITE);

/// Everything but the bytes of [`Sealed::blobs`].
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Handover {
    /// The same as the ledger's.
    pub(crate) lines: Vec<Line>,
    pub(crate) listener: RawFd,
    pub(crate) lock: RawFd,
    pub(crate) clients: Vec<KeptClient>,
    pub(crate) next_client: u64,
    /// Pidfds of containers that are no children.
    pub(crate) adopted: Vec<(String, RawFd)>,
    /// Children that are only reaped.
    pub(crate) doomed: Vec<i32>,
    /// Starts that were not sent to a launcher.
    pub(crate) starts: Vec<KeptStart>,
    /// What starts may have left, by ticket.
    pub(crate) left: Vec<(u64, StartRemains)>,
    pub(crate) next_ticket: u64,
    pub(crate) streams: Vec<KeptStreams>,
    pub(crate) watchers: Vec<KeptWatcher>,
    /// Forbidden before their start was ordered, the oldest first.
    pub(crate) condemned: Vec<String>,
    /// The client that asked for the replacement, and its call.
    pub(crate) asked_by: Option<(u64, u64)>,
    /// How long the fence waits for proof that everything is frozen; it overrides the arguments.
    pub(crate) freeze_ms: Option<u64>,
}

/// A client's connection.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct KeptClient {
    pub(crate) token: u64,
    pub(crate) fd: RawFd,
    pub(crate) greeted: bool,
    pub(crate) subscribed: bool,
}

/// An order that waits.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct KeptStart {
    pub(crate) ticket: u64,
    pub(crate) pending: Pending,
    pub(crate) order: String,
    pub(crate) fds: Vec<RawFd>,
}

/// What the executing shim asks of this program.
#[derive(Debug)]
pub(crate) enum HandoverOrder {
    Nothing,
    /// Answer on this socket whether it could take this.
    Check(OwnedFd, OwnedFd),
    Take(OwnedFd),
}

/// Parses the variable: `check MEMORY SOCKET` or `take MEMORY`.
pub(crate) fn asked() -> io::Result<HandoverOrder> {
    let Some(text) = std::env::var_os(VARIABLE) else {
        return Ok(HandoverOrder::Nothing);
    };
    let malformed = || io::Error::new(io::ErrorKind::InvalidInput, format!("{VARIABLE}: {text:?}"));
    let words = text.to_str().ok_or_else(malformed)?;
    let words: Vec<&str> = words.split(' ').collect();
    let fd = |word: &str| inherited_fd(word.parse().map_err(|_| malformed())?);
    match words[..] {
        ["check", memory, socket] => Ok(HandoverOrder::Check(fd(memory)?, fd(socket)?)),
        ["take", memory] => Ok(HandoverOrder::Take(fd(memory)?)),
        _ => Err(malformed()),
    }
}

/// Answers a check, with the reason if this program cannot take over.
pub(crate) fn check(memory: OwnedFd, socket: &OwnedFd) -> io::Result<()> {
    let verdict = Sealed::open(memory).map(drop);
    let verdict = verdict.map_err(|error| error.to_string());
    let bytes = encode(&verdict).map_err(io::Error::other)?;
    seqpacket::send(socket, &bytes, &[])
}

/// Whether a check's answer is of a program that can take over.
pub(crate) fn judge(bytes: &[u8]) -> Result<(), String> {
    let verdict: Result<Result<(), String>, _> = decode(bytes);
    verdict.unwrap_or_else(|_| Err("its answer is not a shim's".to_owned()))
}

/// A handover with its blobs.
#[derive(Debug, Default)]
pub(crate) struct Sealed {
    pub(crate) handover: Handover,
    /// Raw bytes; the handover's fields say where each part is.
    pub(crate) blobs: Vec<u8>,
}

impl Sealed {
    /// Writes it into sealed memory, close-on-exec.
    pub(crate) fn write(&self) -> io::Result<OwnedFd> {
        let text = serde_json::to_vec(&self.handover).map_err(io::Error::other)?;
        let length = HEADER as u64 + text.len() as u64 + self.blobs.len() as u64;
        if length > MAX_BYTES {
            return Err(io::Error::other(format!(
                "a handover of {length} bytes; at most {MAX_BYTES} are allowed"
            )));
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let mut file = File::from(memfd_create("conman-shim-handover", flags)?);
        file.write_all(MAGIC)?;
        file.write_all(&VERSION.to_le_bytes())?;
        file.write_all(&(text.len() as u64).to_le_bytes())?;
        file.write_all(&text)?;
        file.write_all(&self.blobs)?;
        fcntl_add_seals(&file, SEALS)?;
        Ok(file.into())
    }

    /// Reads it from another program's memory, which is not trusted.
    pub(crate) fn open(memory: OwnedFd) -> io::Result<Self> {
        let seals = fcntl_get_seals(&memory)?;
        if !seals.contains(SEALS) {
            return Err(bad("the handover is not sealed"));
        }
        let mut file = File::from(memory);
        let length = file.metadata()?.len();
        if length > MAX_BYTES {
            return Err(bad("the handover is too long"));
        }
        let mut bytes = Vec::with_capacity(usize::try_from(length).unwrap_or(0));
        file.rewind()?;
        file.take(MAX_BYTES).read_to_end(&mut bytes)?;
        Self::parse(&bytes)
    }

    pub(crate) fn parse(bytes: &[u8]) -> io::Result<Self> {
        let (magic, rest) = split(bytes, MAGIC.len())?;
        if magic != MAGIC {
            return Err(bad("it is not a handover"));
        }
        let (version, rest) = split(rest, 4)?;
        let version = u32::from_le_bytes(version.try_into().unwrap_or_default());
        if version != VERSION {
            return Err(bad(&format!(
                "a handover of version {version}, not {VERSION}"
            )));
        }
        let (length, rest) = split(rest, 8)?;
        let length = u64::from_le_bytes(length.try_into().unwrap_or_default());
        let length = usize::try_from(length).map_err(|_| bad("the handover is cut"))?;
        let (text, blobs) = split(rest, length)?;
        let handover: Handover = serde_json::from_slice(text)
            .map_err(|error| bad(&format!("the handover is malformed: {error}")))?;
        handover.check()?;
        Ok(Self {
            handover,
            blobs: blobs.to_vec(),
        })
    }
}

impl Handover {
    /// Checks that no descriptor has two owners.
    fn check(&self) -> io::Result<()> {
        let mut seen = BTreeSet::new();
        if self.fds().all(|fd| seen.insert(fd)) {
            return Ok(());
        }
        Err(bad("the handover names a descriptor twice"))
    }

    /// All descriptors that it names.
    pub(crate) fn fds(&self) -> impl Iterator<Item = RawFd> {
        let starts = self.starts.iter().flat_map(|start| start.fds.iter());
        let streams = self.streams.iter().flat_map(|streams| {
            let outputs = streams.outputs.iter().map(|(_, fd)| *fd);
            outputs.chain(streams.input)
        });
        [self.listener, self.lock]
            .into_iter()
            .chain(self.clients.iter().map(|client| client.fd))
            .chain(self.adopted.iter().map(|(_, fd)| *fd))
            .chain(streams)
            .chain(self.watchers.iter().map(|watcher| watcher.fd))
            .chain(starts.copied())
    }
}

/// The number of a descriptor, for a handover.
pub fn number(fd: impl AsFd) -> RawFd {
    fd.as_fd().as_raw_fd()
}

fn split(bytes: &[u8], at: usize) -> io::Result<(&[u8], &[u8])> {
    bytes
        .split_at_checked(at)
        .ok_or_else(|| bad("the handover is cut"))
}

fn bad(reason: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sealed() -> Sealed {
        let handover = Handover {
            listener: 3,
            lock: 4,
            clients: vec![KeptClient {
                token: 16,
                fd: 5,
                greeted: true,
                subscribed: false,
            }],
            doomed: vec![77],
            ..Handover::default()
        };
        Sealed {
            handover,
            blobs: b"screen".to_vec(),
        }
    }

    fn bytes() -> Vec<u8> {
        let mut file = File::from(sealed().write().expect("written"));
        let mut bytes = Vec::new();
        file.rewind().expect("rewound");
        file.read_to_end(&mut bytes).expect("read");
        bytes
    }

    #[test]
    fn what_was_sealed_is_opened_and_cannot_be_changed() {
        let memory = sealed().write().expect("written");
        assert!(rustix::io::write(&memory, b"x").is_err());
        let opened = Sealed::open(memory).expect("opened");
        assert_eq!(opened.handover.doomed, [77]);
        assert_eq!(opened.blobs, b"screen");
    }

    #[test]
    fn memory_that_is_not_sealed_is_refused() {
        let memory = memfd_create("x", MemfdFlags::ALLOW_SEALING).expect("made");
        rustix::io::write(&memory, &bytes()).expect("written");
        let error = Sealed::open(memory).expect_err("open to changes");
        assert!(error.to_string().contains("not sealed"), "{error}");
    }

    #[test]
    fn another_version_and_a_descriptor_with_two_owners_are_refused() {
        let mut other = bytes();
        other[8] = 99;
        let error = Sealed::parse(&other).expect_err("another version");
        assert!(error.to_string().contains("version 99"), "{error}");
        let mut twice = sealed();
        twice.handover.clients[0].fd = 4;
        let memory = twice.write().expect("written");
        let error = Sealed::open(memory).expect_err("twice");
        assert!(error.to_string().contains("twice"), "{error}");
    }

    #[test]
    fn an_answer_that_no_shim_gives_is_no_consent() {
        assert!(judge(b"").is_err());
        assert!(judge(b"{}").is_err() && judge(b"null").is_err());
        assert!(judge(br#"{"version":1,"containers":0,"refused":null}"#).is_err());
        assert_eq!(judge(br#"{"Err":"no"}"#), Err("no".to_owned()));
        assert_eq!(judge(br#"{"Ok":null}"#), Ok(()));
    }

    proptest! {
        #[test]
        fn no_change_of_a_handover_panics(
            at in any::<prop::sample::Index>(),
            byte in any::<u8>(),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut bytes = bytes();
            let index = at.index(bytes.len());
            bytes[index] = byte;
            bytes.truncate(cut.index(bytes.len()) + 1);
            let _ = Sealed::parse(&bytes);
        }
    }
}
