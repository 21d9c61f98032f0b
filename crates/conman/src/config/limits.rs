//! The section `[limits]`.

use std::time::Duration;

use conman_core::{HIGHEST_MAX_CPUS, HIGHEST_MAX_DISK, SpecPolicy};
use conman_node::NodeLimits;
use conman_runtime::KeptLogLimits;

use super::reader::Section;
use super::{Io, Limits};

/// Memory of a session if neither its spec nor the configuration limits it: 512 MiB.
const DEFAULT_MEMORY_BYTES: u64 = 512 << 20;

/// Reads what is not a limit of specs.
pub(super) fn limits(section: &Section<'_, '_>) -> Limits {
    let defaults = NodeLimits::default();
    let count = |field: &str, default: usize, most: u64| {
        section.integer(field, 1..=most).unwrap_or(default)
    };
    Limits {
        node: NodeLimits {
            max_sessions: count("max_sessions", defaults.max_sessions, 1_000_000),
            max_starting: count("max_starting", defaults.max_starting, 1_024),
            max_stopped_kept: count("max_stopped_kept", defaults.max_stopped_kept, 1_000_000),
            max_held_per_session: count(
                "max_held_per_session",
                defaults.max_held_per_session,
                100_000,
            ),
            max_held: count("max_held", defaults.max_held, 1_000_000),
            disk_reserve_bytes: section
                .integer("disk_reserve_bytes", 0..=HIGHEST_MAX_DISK)
                .unwrap_or(defaults.disk_reserve_bytes),
        },
        max_connections: count("max_connections", 16_384, 10_000_000),
        max_api_connections: count("max_api_connections", 1_024, 1_000_000),
        proxy_buffer_bytes: section
            .integer("proxy_buffer_bytes", 16 << 20..=1 << 40)
            .unwrap_or(256 << 20),
        total_cpus: total_cpus(section),
        io: io(section),
        max_events: section
            .integer("max_events", 100..=10_000_000)
            .unwrap_or(100_000),
        kept_logs: kept_logs(section),
        check_host_every: match section.integer("check_host_s", 0..=86_400).unwrap_or(10) {
            0 => None,
            seconds => Some(Duration::from_secs(seconds)),
        },
    }
}

/// 1 MiB a second is more than an idle session needs, and less starves its programs.
fn io(section: &Section<'_, '_>) -> Io {
    let rate = |field| section.integer(field, 1 << 20..=1 << 40);
    Io {
        read_bytes_per_s: rate("io_read_bytes_per_s"),
        write_bytes_per_s: rate("io_write_bytes_per_s"),
        weight: section.integer("io_weight", 1..=1_000),
    }
}

fn kept_logs(section: &Section<'_, '_>) -> KeptLogLimits {
    let defaults = KeptLogLimits::default();
    let bytes = section.integer("kept_log_bytes", 0..=1 << 30);
    let total = section.integer("kept_log_total_bytes", 0..=1 << 50);
    let age = section.integer("kept_log_s", 0..=366 * 86_400);
    KeptLogLimits {
        bytes: bytes.unwrap_or(defaults.bytes),
        total_bytes: total.unwrap_or(defaults.total_bytes),
        age: age.map_or(defaults.age, Duration::from_secs),
    }
}

/// A twentieth of the host's processors, and at least a tenth of one, is left to the host.
#[expect(clippy::cast_precision_loss, reason = "no host has 2^52 processors")]
fn total_cpus(section: &Section<'_, '_>) -> f64 {
    let field = "total_cpus";
    let cpus = std::thread::available_parallelism().map_or(1.0, |cpus| cpus.get() as f64);
    let default = cpus - (cpus / 20.0).max(0.1);
    let total = section.number(field).unwrap_or(default);
    if (0.1..=HIGHEST_MAX_CPUS).contains(&total) {
        return total;
    }
    section.mistake(
        field,
        format_args!("is {total}; must be 0.1 to {HIGHEST_MAX_CPUS}"),
    );
    default
}

/// Reads the limits of specs, which are in the same section, into the policy.
pub(super) fn spec_limits(section: &Section<'_, '_>, policy: &mut SpecPolicy) {
    let bytes = |field| section.integer(field, 1..=u64::from(u32::MAX) << 20);
    policy.max_memory_bytes = bytes("max_memory_bytes");
    policy.max_disk_bytes = section.integer("max_disk_bytes", 1..=HIGHEST_MAX_DISK);
    policy.default_disk_bytes = match section.integer("default_disk_bytes", 0..=HIGHEST_MAX_DISK) {
        Some(0) => None,
        None => policy
            .default_disk_bytes
            .min(policy.max_disk_bytes.or(policy.default_disk_bytes)),
        given => given,
    };
    policy.default_memory_bytes = bytes("default_memory_bytes")
        .or(policy.max_memory_bytes)
        .or(Some(DEFAULT_MEMORY_BYTES));
    policy.default_cpus = section.number("default_cpus");
    policy.max_cpus = section.number("max_cpus");
    let number = |field, default| {
        section
            .integer(field, 0..=u64::from(u32::MAX))
            .unwrap_or(default)
    };
    policy.default_pids = number("default_pids", policy.default_pids);
    policy.max_pids = number("max_pids", policy.max_pids);
    policy.default_ready_timeout_s =
        number("default_ready_timeout_s", policy.default_ready_timeout_s);
    policy.default_idle_timeout_s = number("default_idle_timeout_s", policy.default_idle_timeout_s);
    policy.default_max_lifetime_s = number("default_max_lifetime_s", policy.default_max_lifetime_s);
}
