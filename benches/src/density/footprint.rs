//! The resources that sessions use on a machine, as the kernel counts them.

use std::fs;

use anyhow::{Context, Result};
use serde::Serialize;

/// Programs whose memory is measured; measuring all would take longer than starting them.
const SAMPLED_PROGRAMS: usize = 200;

/// Memory of the whole machine, in bytes.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct MachineMemory {
    pub(super) available: u64,
    slab: u64,
    percpu: u64,
    kernel_stack: u64,
    page_tables: u64,
    anonymous: u64,
    page_cache: u64,
}

impl MachineMemory {
    pub(super) fn now() -> Result<Self> {
        let text = fs::read_to_string("/proc/meminfo").context("reading /proc/meminfo")?;
        let field = |name: &str| {
            let line = text
                .lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
            kib.map(|kib| kib << 10)
                .with_context(|| format!("/proc/meminfo has no {name}"))
        };
        Ok(Self {
            available: field("MemAvailable")?,
            slab: field("Slab")?,
            percpu: field("Percpu")?,
            kernel_stack: field("KernelStack")?,
            page_tables: field("PageTables")?,
            anonymous: field("AnonPages")?,
            page_cache: field("Cached")?,
        })
    }
}

/// The memory of `count` sessions, in bytes for each.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Footprint {
    /// By the decrease of the machine's available memory.
    pub(super) all: f64,
    /// Only their programs: proportional set size.
    pub(super) program: f64,
    slab: f64,
    percpu: f64,
    kernel_stack: f64,
    page_tables: f64,
    anonymous: f64,
    /// The kernel can reclaim it, and it counts as available.
    pub(super) page_cache: f64,
}

impl Footprint {
    pub(super) fn between(
        before: MachineMemory,
        after: MachineMemory,
        count: usize,
        program: f64,
    ) -> Self {
        let each = |from: u64, to: u64| (to as f64 - from as f64) / count as f64;
        Self {
            all: each(after.available, before.available),
            program,
            slab: each(before.slab, after.slab),
            percpu: each(before.percpu, after.percpu),
            kernel_stack: each(before.kernel_stack, after.kernel_stack),
            page_tables: each(before.page_tables, after.page_tables),
            anonymous: each(before.anonymous, after.anonymous),
            page_cache: each(before.page_cache, after.page_cache),
        }
    }

    /// Memory in addition to the programs.
    pub(super) fn overhead(&self) -> f64 {
        self.all - self.program
    }

    pub(super) fn parts(&self) -> [(&'static str, f64); 6] {
        [
            ("slab", self.slab),
            ("per-CPU", self.percpu),
            ("kernel stacks", self.kernel_stack),
            ("page tables", self.page_tables),
            ("anonymous pages, including the programs'", self.anonymous),
            ("page cache, which counts as available", self.page_cache),
        ]
    }
}

/// Mean proportional set size of programs, in bytes, from a sample.
pub(super) fn program_bytes(pids: &[i32]) -> Result<f64> {
    let step = pids.len().div_ceil(SAMPLED_PROGRAMS).max(1);
    let sizes: Vec<u64> = pids
        .iter()
        .step_by(step)
        .filter_map(|pid| {
            let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
            let line = text.lines().find_map(|line| line.strip_prefix("Pss:"))?;
            line.split_whitespace().next()?.parse::<u64>().ok()
        })
        .collect();
    anyhow::ensure!(!sizes.is_empty(), "no program's memory could be read");
    Ok(sizes.iter().sum::<u64>() as f64 * 1_024.0 / sizes.len() as f64)
}

/// Processor time of a process and its threads, in seconds, to a hundredth.
pub(super) fn cpu_s(pid: i32) -> Result<f64> {
    let path = format!("/proc/{pid}/stat");
    let text = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    // After the name in parentheses: utime and stime are fields 14 and 15 of the line.
    let fields = text
        .rsplit(')')
        .next()
        .unwrap_or_default()
        .split_whitespace();
    let ticks: Vec<u64> = fields
        .skip(11)
        .take(2)
        .filter_map(|it| it.parse().ok())
        .collect();
    anyhow::ensure!(ticks.len() == 2, "{path} is not understood");
    // USER_HZ, the same on all architectures that conman is built for.
    Ok((ticks[0] + ticks[1]) as f64 / 100.0)
}

/// One of conman's processes.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Own {
    pub(super) resident_bytes: u64,
    pub(super) descriptors: usize,
}

impl Own {
    pub(super) fn of(pid: i32) -> Result<Self> {
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd"))
            .with_context(|| format!("listing the descriptors of process {pid}"))?
            .count();
        Ok(Self {
            resident_bytes: conman_observer::resident_bytes(pid)
                .with_context(|| format!("reading the memory of process {pid}"))?,
            descriptors,
        })
    }
}
