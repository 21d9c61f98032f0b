//! Compiles rules for `nft` into the netlink messages that create them, to be sent to many namespaces.
//!
//! `nft` applies the rules in a namespace that exists only for this. The kernel lists them there in the
//! form in which it accepts them.

use std::io::{self, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::process::{Command, Output, Stdio};

use conman_linux::{Namespaces, unshare_namespaces};
use netlink_packet_core::{
    NLM_F_ACK, NLM_F_APPEND, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REQUEST, NetlinkBuffer,
    NlasIterator,
};
use rustix::io::Errno;
use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendFlags, recv, sendto};

use crate::namespace_thread::enter;
use crate::netlink::{ANSWER_TIMEOUT, DATAGRAM_BYTES, open_netlink};
use crate::rules_keeper::{RulesError, succeeded};

/// The table in a session's namespace, in the family `inet`.
pub(crate) const TABLE: &str = "conman";

/// From linux/netfilter/nfnetlink.h and nf_tables.h.
const SUBSYSTEM: u16 = 10;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
const FAMILY_INET: u8 = 1;
const ERROR: u16 = 2;
const DONE: u16 = 3;

/// Length of `struct nlmsghdr`, and of `struct nfgenmsg` behind it.
const HEADER: usize = 16;
const GENERIC_HEADER: usize = 4;

/// Length of `struct nlattr`.
const ATTRIBUTE_HEADER: usize = 4;

/// Bits of an attribute's kind that are no flags.
const KIND: u16 = 0x3fff;

/// The name that a set's messages have, the number that a new set must have, and the set whose elements are
/// listed.
const SET_NAME: u16 = 2;
const SET_ID: u16 = 10;
const ELEMENTS_TABLE: u16 = 1;
const ELEMENTS_SET: u16 = 2;

/// A kind of object: how it is created and listed, and which of its attributes a creation takes.
struct Kind {
    create: u16,
    list: u16,
    flags: u16,
    attributes: &'static [u16],
}

const TABLES: Kind = Kind {
    create: 0,
    list: 1,
    flags: NLM_F_EXCL,
    attributes: &[1],
};
/// Table, name, flags, type and length of keys, description with the size, time-out, interval of collections.
const SETS: Kind = Kind {
    create: 9,
    list: 10,
    flags: 0,
    attributes: &[1, SET_NAME, 3, 4, 5, 9, 11, 12],
};
/// Table, set, elements.
const SET_ELEMENTS: Kind = Kind {
    create: 12,
    list: 13,
    flags: 0,
    attributes: &[ELEMENTS_TABLE, ELEMENTS_SET, 3],
};
/// Table, name, hook, policy, type.
const CHAINS: Kind = Kind {
    create: 3,
    list: 4,
    flags: 0,
    attributes: &[1, 3, 4, 5, 7],
};
/// Table, chain, expressions.
const RULES: Kind = Kind {
    create: 6,
    list: 7,
    flags: NLM_F_APPEND,
    attributes: &[1, 2, 4],
};

/// Messages that create a table and everything in it, as one transaction.
#[derive(Debug)]
pub(crate) struct NftBatch(Vec<u8>);

impl NftBatch {
    /// Creates the table in a network namespace, unless it has one of this name. For a thread that ends
    /// afterwards: it stays there.
    pub(crate) fn apply(&self, namespace: BorrowedFd<'_>) -> io::Result<()> {
        enter(namespace)?;
        self.send()
    }

    fn send(&self) -> io::Result<()> {
        let socket = open()?;
        send(&socket, &self.0)?;
        // One message asks for an answer. The first error, if there is one, comes before that.
        let mut buffer = vec![0; DATAGRAM_BYTES];
        let mut outcome = Err(io::Error::other("the kernel does not answer"));
        each_message(&socket, &mut buffer, |kind, payload| {
            if kind == ERROR && outcome.is_err() {
                outcome = match code(payload) {
                    Err(error) if is_existing_table(&error, payload) => Ok(()),
                    outcome => outcome,
                };
            }
        })?;
        outcome
    }
}

/// Compiles a script that creates [`TABLE`]. For a thread that ends afterwards, too.
pub(crate) fn compile(script: &str) -> Result<NftBatch, RulesError> {
    unshare_namespaces(Namespaces::NEWNET).map_err(RulesError::Namespace)?;
    succeeded(&run(script).map_err(RulesError::NoProgram)?)?;
    read_back().map_err(RulesError::Namespace)
}

/// Runs a script in the network namespace of the calling thread.
pub(crate) fn run(script: &str) -> io::Result<Output> {
    let mut child = Command::new("nft")
        .args(["-f", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        // If it has ended already, its status says why.
        let _ = stdin.write_all(script.as_bytes());
    }
    child.wait_with_output()
}

/// Lists the namespace's only table as a batch of creations.
fn read_back() -> io::Result<NftBatch> {
    let socket = open()?;
    let mut batch = Vec::new();
    push(&mut batch, BATCH_BEGIN, 0, &[]);
    let mut last = 0;
    let mut create = |kind: &Kind, found: &[u8], id: Option<u32>| {
        let mut attributes = chosen(found, kind.attributes);
        if let Some(id) = id {
            push_attribute(&mut attributes, SET_ID, &id.to_be_bytes());
        }
        last = batch.len();
        push(
            &mut batch,
            message(kind.create),
            NLM_F_CREATE | kind.flags,
            &attributes,
        );
    };
    for table in list(&socket, &TABLES, &[])? {
        create(&TABLES, &table, None);
    }
    for (set, id) in list(&socket, &SETS, &[])?.iter().zip(1..) {
        create(&SETS, set, Some(id));
        let mut name = Vec::new();
        push_attribute(&mut name, ELEMENTS_TABLE, format!("{TABLE}\0").as_bytes());
        push_attribute(&mut name, ELEMENTS_SET, attribute(set, SET_NAME));
        for elements in list(&socket, &SET_ELEMENTS, &name)? {
            create(&SET_ELEMENTS, &elements, None);
        }
    }
    for kind in [&CHAINS, &RULES] {
        for found in list(&socket, kind, &[])? {
            create(kind, &found, None);
        }
    }
    // The answer to the last one comes after the errors of all others. Its flags are behind length and type.
    let flags = &mut batch[last + 6..last + 8];
    let with_answer = u16::from_ne_bytes([flags[0], flags[1]]) | NLM_F_ACK;
    flags.copy_from_slice(&with_answer.to_ne_bytes());
    push(&mut batch, BATCH_END, 0, &[]);
    Ok(NftBatch(batch))
}

/// Lists the attributes of all objects of a kind.
fn list(socket: &OwnedFd, kind: &Kind, attributes: &[u8]) -> io::Result<Vec<Vec<u8>>> {
    let mut request = Vec::new();
    push(&mut request, message(kind.list), NLM_F_DUMP, attributes);
    send(socket, &request)?;
    let mut buffer = vec![0; DATAGRAM_BYTES];
    let (mut found, mut outcome) = (Vec::new(), None);
    while outcome.is_none() {
        each_message(socket, &mut buffer, |kind, payload| match kind {
            DONE => outcome = Some(Ok(())),
            ERROR => outcome = Some(code(payload)),
            _ => found.push(payload.get(GENERIC_HEADER..).unwrap_or_default().to_vec()),
        })?;
    }
    outcome.unwrap_or(Ok(())).map(|()| found)
}

fn open() -> io::Result<OwnedFd> {
    let socket = open_netlink(Some(netlink::NETFILTER), 0)?;
    set_socket_timeout(&socket, Timeout::Recv, Some(ANSWER_TIMEOUT))?;
    Ok(socket)
}

fn send(socket: &OwnedFd, bytes: &[u8]) -> io::Result<()> {
    sendto(
        socket,
        bytes,
        SendFlags::empty(),
        &SocketAddrNetlink::new(0, 0),
    )?;
    Ok(())
}

/// Receives one datagram, and calls `take` with the type and the payload of each message.
fn each_message(
    socket: &OwnedFd,
    buffer: &mut [u8],
    mut take: impl FnMut(u16, &[u8]),
) -> io::Result<()> {
    let (length, _) = rustix::io::retry_on_intr(|| recv(socket, &mut *buffer, RecvFlags::empty()))?;
    let mut rest = &buffer[..length];
    while let Ok(message) = NetlinkBuffer::new_checked(rest) {
        take(message.message_type(), message.payload());
        let length = aligned(message.length() as usize);
        rest = rest.get(length..).unwrap_or_default();
    }
    Ok(())
}

/// The outcome in an error message: a negative number of an error, or 0.
fn code(payload: &[u8]) -> io::Result<()> {
    let code = payload
        .first_chunk()
        .map_or(0, |code| i32::from_ne_bytes(*code));
    match code {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(-code)),
    }
}

/// Whether the table could not be created because it is there. Of anything else in it, this would mean that the
/// rules are not there.
fn is_existing_table(error: &io::Error, payload: &[u8]) -> bool {
    // Behind the code comes the refused message: its length, then its type.
    let refused = payload.get(8..10);
    Errno::from_io_error(error) == Some(Errno::EXIST)
        && refused == Some(&message(TABLES.create).to_ne_bytes()[..])
}

fn message(number: u16) -> u16 {
    SUBSYSTEM << 8 | number
}

/// Appends a message. All have the same number: their answers are not told apart.
fn push(bytes: &mut Vec<u8>, kind: u16, flags: u16, attributes: &[u8]) {
    let is_batch = kind == BATCH_BEGIN || kind == BATCH_END;
    let (family, resource) = match is_batch {
        true => (0, SUBSYSTEM),
        false => (FAMILY_INET, 0),
    };
    let length = HEADER + GENERIC_HEADER + attributes.len();
    bytes.extend(u32::try_from(length).unwrap_or(u32::MAX).to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend((NLM_F_REQUEST | flags).to_ne_bytes());
    bytes.extend(1_u32.to_ne_bytes());
    bytes.extend(0_u32.to_ne_bytes());
    bytes.extend([family, 0]);
    bytes.extend(resource.to_be_bytes());
    bytes.extend(attributes);
}

/// Appends an attribute.
fn push_attribute(bytes: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let length = ATTRIBUTE_HEADER + value.len();
    bytes.extend(u16::try_from(length).unwrap_or(u16::MAX).to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(aligned(bytes.len()), 0);
}

/// Those of the attributes that have one of these kinds.
fn chosen(bytes: &[u8], kinds: &[u16]) -> Vec<u8> {
    let mut kept = Vec::new();
    for (kind, value) in attributes(bytes) {
        if kinds.contains(&(kind & KIND)) {
            push_attribute(&mut kept, kind, value);
        }
    }
    kept
}

/// The value of one attribute; empty if there is none.
fn attribute(bytes: &[u8], kind: u16) -> &[u8] {
    let found = attributes(bytes).find(|found| found.0 == kind);
    found.map_or(&[], |found| found.1)
}

/// Kind, with its flags, and value of each attribute.
fn attributes(bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    let all = NlasIterator::new(bytes).map_while(Result::ok);
    all.map(|found| {
        let length = usize::from(found.length());
        let whole = found.into_inner();
        (
            u16::from_ne_bytes([whole[2], whole[3]]),
            &whole[ATTRIBUTE_HEADER..length],
        )
    })
}

fn aligned(length: usize) -> usize {
    length.next_multiple_of(4)
}
