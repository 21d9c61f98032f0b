//! Limits of what links carry.
//!
//! What an interface sends waits in a queue that empties at a rate (the kernel's `tbf`). So a session's sending is
//! limited at its own end of a link, and its receiving at the host's end, if the host has one. What arrives through
//! a link on an interface of the host has no such queue: rules inside drop what is beyond the rate.

use std::io;
use std::os::fd::BorrowedFd;
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

/// The attributes of `tbf` in linux/pkt_sched.h.
const PARAMETERS: u16 = 1;
const RATE: u16 = 4;
const BURST: u16 = 6;
/// `TC_LINKLAYER_ETHERNET`: packets count with their length.
const BY_LENGTH: u8 = 1;

/// A queue holds what may pass in this part of a second; further packets are dropped.
const QUEUE_PARTS: u64 = 20;
const MIN_QUEUE_BYTES: u64 = 64 << 10;

/// `nft_limit` multiplies the sum of rate and burst by the nanoseconds of a second, in 64 bits.
const MAX_ARRIVING_BYTES: u64 = u64::MAX / 1_000_000_000;

/// Why what arrives through a link is not limited.
#[derive(Debug, thiserror::Error)]
pub enum LimitError {
    #[error(
        "`bandwidth.in` is {0}, and the kernel limits what arrives through such a link to 147gbit or less; \
         give a lower rate, or none"
    )]
    TooFast(Rate),
    #[error("cannot run `nft`; install the package nftables")]
    NoProgram(#[source] io::Error),
    #[error("nft refuses the limit: {reason}; Linux must have nf_tables with nft_limit")]
    Refused { reason: String },
    #[error("cannot enter the session's network namespace")]
    Namespace(#[source] io::Error),
}

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
/// counts no shorter time. The rules stay when the interface is deleted ([`lift_arriving`]). Blocks.
pub(crate) fn limit_arriving(
    namespace: BorrowedFd<'_>,
    index: u32,
    mtu: u32,
    rate: Rate,
) -> Result<(), LimitError> {
    // Packets that the kernel has joined are dropped as one, even if they are larger than a second's amount.
    let burst = MIN_QUEUE_BYTES.max(2 * u64::from(mtu));
    let bytes = rate.bytes_per_s();
    if bytes + burst > MAX_ARRIVING_BYTES {
        return Err(LimitError::TooFast(rate));
    }
    let table = arriving_table(index);
    let script = format!(
        "table {table} {{
           chain input {{
             type filter hook input priority raw; policy accept;
             iif {index} limit rate over {bytes} bytes/second burst {burst} bytes drop
           }}
         }}"
    );
    run_inside(namespace, &script)
}

/// Deletes the rules of [`limit_arriving`], if there are any. Blocks.
pub(crate) fn lift_arriving(namespace: BorrowedFd<'_>, index: u32) -> Result<(), LimitError> {
    let table = arriving_table(index);
    // Deleting what is not there would be an error.
    run_inside(namespace, &format!("table {table}\ndelete table {table}\n"))
}

fn arriving_table(index: u32) -> String {
    format!("inet conman_in_{index}")
}

/// Runs a script of `nft` in a namespace.
fn run_inside(namespace: BorrowedFd<'_>, script: &str) -> Result<(), LimitError> {
    // The thread stays in the namespace, and so does the program that it starts.
    let inside = || {
        enter(namespace).map_err(LimitError::Namespace)?;
        run(script).map_err(LimitError::NoProgram)
    };
    let ended = thread::scope(|scope| scope.spawn(inside).join());
    let panicked = |_| LimitError::Namespace(io::Error::other("the thread inside has panicked"));
    let output = ended.map_err(panicked)??;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let reason = text.lines().next().unwrap_or_default().to_owned();
    Err(LimitError::Refused { reason })
}
