//! Limits of a session's memory, processor time, disk, processes and terminals.

use conman_proto::{Bandwidth, Network, Rate, RuntimeKind, SessionRequest};

use super::mistakes::Mistakes;
use crate::runtime_traits::runtime_traits;
use crate::size::bytes_and_size;
use crate::spec_policy::{
    DISK_BYTES_PER_INODE, HIGHEST_MAX_CPUS, HIGHEST_MAX_DISK, MIN_CPUS, MIN_DISK_BYTES,
    MIN_DISK_INODES, MIN_MEMORY_BYTES, SpecPolicy,
};

/// Terminals of a native session whose spec sets no limit: few, because threads of the kernel, which no
/// session is charged for, carry the bytes between the two ends of a terminal.
const DEFAULT_PTYS: u32 = 4;
/// Maximum `ptys`: the kernel's default for the whole host.
const MAX_PTYS: u32 = 4_096;

pub(super) fn within(
    field: &str,
    given: Option<u32>,
    default: u32,
    (least, most): (u32, u32),
    mistakes: &mut Mistakes,
) -> u32 {
    let value = given.unwrap_or(default);
    if !(least..=most).contains(&value) {
        mistakes.add(field, format!("is {value}; must be {least} to {most}"));
    }
    value
}

pub(super) fn memory(
    policy: &SpecPolicy,
    base: &SessionRequest,
    request: &SessionRequest,
    mistakes: &mut Mistakes,
) -> Option<u64> {
    // Docker stores sizes as signed 64-bit numbers.
    const HIGHEST: u64 = i64::MAX as u64;
    let most = policy.max_memory_bytes.unwrap_or(HIGHEST);
    let memory = request
        .memory_bytes
        .or(base.memory_bytes)
        .or(policy.default_memory_bytes)
        .or(policy.max_memory_bytes)?;
    if !(MIN_MEMORY_BYTES..=most).contains(&memory) {
        mistakes.add(
            "memory_bytes",
            out_of_bounds(memory, MIN_MEMORY_BYTES, (most < HIGHEST).then_some(most)),
        );
    }
    Some(memory)
}

fn out_of_bounds(given: u64, least: u64, most: Option<u64>) -> String {
    let least = bytes_and_size(least);
    match most.map(bytes_and_size) {
        Some(most) => format!("is {given}; must be {least} to {most}"),
        None => format!("is {given}; must be at least {least}"),
    }
}

/// Limits of disk space and inodes.
pub(super) fn disk(
    policy: &SpecPolicy,
    base: &SessionRequest,
    request: &SessionRequest,
    runtime: RuntimeKind,
    mistakes: &mut Mistakes,
) -> (Option<u64>, Option<u64>) {
    let mut bytes = request.disk_bytes.or(base.disk_bytes);
    let mut inodes = request.disk_inodes.or(base.disk_inodes);
    if !runtime_traits(runtime).limits_disk {
        for (field, given) in [("disk_bytes", bytes), ("disk_inodes", inodes)] {
            if given.is_some() {
                mistakes.add(
                    field,
                    format!("the {runtime} runtime has no limits of disk space; leave it out"),
                );
            }
        }
        return (None, None);
    }
    bytes = bytes
        .or(policy.default_disk_bytes)
        .or(policy.max_disk_bytes);
    let most = policy.max_disk_bytes.unwrap_or(HIGHEST_MAX_DISK);
    if let Some(bytes) = bytes.filter(|bytes| !(MIN_DISK_BYTES..=most).contains(bytes)) {
        mistakes.add(
            "disk_bytes",
            out_of_bounds(bytes, MIN_DISK_BYTES, policy.max_disk_bytes),
        );
    }
    inodes = inodes.or(bytes.map(|bytes| (bytes / DISK_BYTES_PER_INODE).max(MIN_DISK_INODES)));
    let range = MIN_DISK_INODES..=HIGHEST_MAX_DISK;
    if let Some(inodes) = inodes.filter(|inodes| !range.contains(inodes)) {
        mistakes.add(
            "disk_inodes",
            format!("is {inodes}; must be at least {MIN_DISK_INODES}"),
        );
    }
    (bytes, inodes)
}

pub(super) fn pids(
    policy: &SpecPolicy,
    base: &SessionRequest,
    request: &SessionRequest,
    mistakes: &mut Mistakes,
) -> u32 {
    within(
        "pids",
        request.pids.or(base.pids),
        policy.default_pids.min(policy.max_pids),
        (1, policy.max_pids),
        mistakes,
    )
}

/// The terminals of its programs, and whether they come only with the first command that has one: few sessions open
/// any, and all sessions of the host pay for those that may. Docker's containers have a devpts without such a limit.
pub(super) fn ptys(
    base: &SessionRequest,
    request: &SessionRequest,
    (runtime, tty): (RuntimeKind, bool),
    mistakes: &mut Mistakes,
) -> (u32, bool) {
    let given = request.ptys.or(base.ptys);
    if runtime_traits(runtime).limits_terminals {
        let most = within("ptys", given, DEFAULT_PTYS, (0, MAX_PTYS), mistakes);
        return (most, given.is_none() && !tty);
    }
    if given.is_some() {
        mistakes.add(
            "ptys",
            format!("the {runtime} runtime does not limit terminals; leave it out"),
        );
    }
    (0, false)
}

pub(super) fn cpus(
    policy: &SpecPolicy,
    base: &SessionRequest,
    request: &SessionRequest,
    mistakes: &mut Mistakes,
) -> Option<f64> {
    let most = policy.max_cpus.unwrap_or(HIGHEST_MAX_CPUS);
    let cpus = request
        .cpus
        .or(base.cpus)
        .or(policy.default_cpus)
        .or(policy.max_cpus)?;
    // NaN is in no range.
    if !(MIN_CPUS..=most).contains(&cpus) {
        mistakes.add("cpus", format!("is {cpus}; must be {MIN_CPUS} to {most}"));
    }
    Some(cpus)
}

/// A request can lower its template's limits. They hold for the links that conman makes, so that no session with
/// another one has any.
pub(super) fn bandwidth(
    base: &SessionRequest,
    request: &SessionRequest,
    network: &Network,
    mistakes: &mut Mistakes,
) -> Bandwidth {
    let (base, request) = (base.bandwidth, request.bandwidth);
    let (base, request) = (base.unwrap_or_default(), request.unwrap_or_default());
    let mut lower = |field, most: Option<Rate>, given: Option<Rate>| {
        if let (Some(most), Some(given)) = (most, given)
            && given > most
        {
            let message = format!("is {given}; its template allows {most}");
            mistakes.add(field, message);
        }
        given.or(most)
    };
    let bandwidth = Bandwidth {
        inward: lower("bandwidth.in", base.inward, request.inward),
        outward: lower("bandwidth.out", base.outward, request.outward),
    };
    let traits = network.traits();
    if !bandwidth.is_unlimited() && (traits.shares_host || traits.by_docker) {
        let message = format!("the network `{network}` has no limits of bandwidth; leave it out");
        mistakes.add("bandwidth", message);
    }
    bandwidth
}
