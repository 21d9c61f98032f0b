//! Limits of what links carry.
//!
//! What an interface sends waits in a queue that empties at a rate (the kernel's `tbf`). So a session's sending is
//! limited at its own end of a link, and its receiving at the host's end, if the host has one. What arrives through
//! a link on an interface of the host has no such queue: rules inside drop what is beyond the rate.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::thread;

use conman_proto::Rate;
use conman_traffic::burst_bytes;
use netlink_packet_core::DefaultNla;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::tc::{TcAttribute, TcHandle, TcMessage, TcOption};
use rustix::io::Errno;

use crate::namespace_thread::enter;
use crate::netlink::Change;
use crate::nft_batch::run;
use crate::rules_keeper::{RulesError, succeeded};

/// The attributes of `tbf` in linux/pkt_sched.h.
const PARAMETERS: u16 = 1;
const RATE: u16 = 4;
const BURST: u16 = 6;
/// `TC_LINKLAYER_ETHERNET`: packets count with their length.
const BY_LENGTH: u8 = 1;

/// A queue holds what may pass in this part of a second; further packets are dropped.
const QUEUE_PARTS: u64 = 20;
const MIN_QUEUE_BYTES: u64 = 64 << 10;

/// Lets an interface send no faster than a rate. Fails with ENOENT if the kernel has no `sch_tbf`.
pub(crate) fn limit_sending(index: u32, mtu: u32, rate: Rate) -> Change {
    // A packet that is larger than the burst would be dropped.
    let burst = burst_bytes(rate).max(2 * u64::from(mtu));
    let queue = burst + (rate.bytes_per_s() / QUEUE_PARTS).max(MIN_QUEUE_BYTES);
    let narrow = |value: u64| u32::try_from(value).unwrap_or(u32::MAX).to_ne_bytes();
    let none = [0; 4];
    // `struct tc_tbf_qopt`: the rate as `struct tc_ratespec`, the peak's, the queue, the burst as time, the MTU.
    let rate_spec = [[0, BY_LENGTH, 0, 0], none, narrow(rate.bytes_per_s())];
    let peak = [none; 3];
    let parameters = [&rate_spec[..], &peak, &[narrow(queue), none, none]].concat();
    let option = |kind, value: Vec<u8>| TcOption::Other(DefaultNla::new(kind, value));
    let mut message = TcMessage::with_index(index.cast_signed());
    message.header.parent = TcHandle::ROOT;
    message.attributes = vec![
        TcAttribute::Kind("tbf".to_owned()),
        TcAttribute::Options(vec![
            option(PARAMETERS, parameters.concat()),
            option(RATE, rate.bytes_per_s().to_ne_bytes().to_vec()),
            option(BURST, narrow(burst).to_vec()),
        ]),
    ];
    Change::Create(RouteNetlinkMessage::NewQueueDiscipline(message))
}

/// Adds what is missing to the error of changes that limit sending.
pub(crate) fn explained(error: io::Error) -> io::Error {
    match Errno::from_io_error(&error) {
        Some(Errno::NOENT) => io::Error::other(
            "this kernel has no queues with a rate, which `bandwidth` needs; load the module sch_tbf",
        ),
        _ => error,
    }
}

/// Drops what arrives on an interface of a namespace faster than a rate, once a second's amount has arrived: the kernel
/// counts no shorter time. Blocks.
pub(crate) fn limit_arriving(
    namespace: OwnedFd,
    index: u32,
    mtu: u32,
    rate: Rate,
) -> Result<(), RulesError> {
    // Packets that the kernel has joined are dropped as one, even if they are larger than a second's amount.
    let burst = MIN_QUEUE_BYTES.max(2 * u64::from(mtu));
    let bytes = rate.bytes_per_s();
    let script = format!(
        "table inet conman_in_{index} {{
           chain input {{
             type filter hook input priority raw; policy accept;
             iif {index} limit rate over {bytes} bytes/second burst {burst} bytes drop
           }}
         }}"
    );
    // It stays in the namespace, and so does the program that it starts.
    let inside = thread::spawn(move || {
        enter(namespace.as_fd()).map_err(RulesError::Namespace)?;
        succeeded(&run(&script).map_err(RulesError::NoProgram)?)
    });
    let panicked = |_| RulesError::Namespace(io::Error::other("the thread inside has panicked"));
    inside.join().map_err(panicked)?
}
