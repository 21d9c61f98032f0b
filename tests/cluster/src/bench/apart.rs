//! What the node that goes does not share with the others, as machines share nothing.
//!
//! On one machine the deaths of a node's sessions take the processors from the nodes that start them
//! anew, and what Docker does after each death takes locks of the one kernel, that of all mounts above
//! all. Apart from each other, what each does by itself is measured. Processors: the node that goes
//! has half of them, everybody else the other half; the kernel's own threads stay free. Engine: the
//! Docker daemon of the node that goes is stopped from the notice on, and so does not clean up after
//! its containers, whose deaths conman brings about, proves and releases without it.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context as _, Result, bail, ensure};
use rustix::io::Errno;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::Serialize;

use crate::cluster::Cluster;
use crate::process::residents;

/// Looks at what began meanwhile: what has no place yet is begun by what has one.
const LOOKS: usize = 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Apart {
    /// Half of the processors are its own.
    Processors,
    /// Its Docker Engine stands still from the notice on.
    Engine,
}

/// Gives every process of the cluster, and this one, its half. What they begin later has the half of
/// whoever begins it.
pub(super) fn settle(cluster: &Cluster) -> Result<()> {
    let (going, others) = halves()?;
    let layout = cluster.layout();
    let own = cluster.nodes()[0].name();
    let hosts = layout.hosts();
    place(&others, || vec![std::process::id().cast_signed()])?;
    for host in &hosts {
        let half = if host.name == own { &going } else { &others };
        let namespace = layout.namespace_path(&host.name);
        place(half, || {
            let there = residents(&namespace).into_iter();
            there.map(|one| one.pid).collect()
        })?;
    }
    Ok(())
}

fn halves() -> Result<(CpuSet, CpuSet)> {
    let allowed = sched_getaffinity(None).context("cannot ask which processors there are")?;
    let all: Vec<usize> = (0..CpuSet::MAX_CPU)
        .filter(|number| allowed.is_set(*number))
        .collect();
    ensure!(
        all.len() >= 2,
        "there is one processor, and apart each needs one: leave `--apart processors` out, or run this on a \
         machine with more"
    );
    let (one, other) = all.split_at(all.len() / 2);
    let set = |numbers: &[usize]| {
        let mut set = CpuSet::new();
        numbers.iter().for_each(|number| set.set(*number));
        set
    };
    Ok((set(one), set(other)))
}

/// Until a look finds no thread that has none.
fn place(half: &CpuSet, pids: impl Fn() -> Vec<i32>) -> Result<()> {
    let mut placed = BTreeSet::new();
    for _ in 0..LOOKS {
        let before = placed.len();
        for thread in pids().into_iter().flat_map(threads) {
            match sched_setaffinity(Some(thread), half) {
                Ok(()) => {
                    placed.insert(thread.as_raw_nonzero());
                }
                // It has ended.
                Err(Errno::SRCH) => {}
                Err(errno) => {
                    let thread = thread.as_raw_nonzero();
                    return Err(errno)
                        .with_context(|| format!("cannot choose the processors of {thread}"));
                }
            }
        }
        if placed.len() == before {
            return Ok(());
        }
    }
    bail!("threads begin faster than they are given processors: try again on a quiet machine")
}

fn threads(pid: i32) -> Vec<Pid> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"));
    let names = tasks.into_iter().flatten().flatten();
    names
        .filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?))
        .collect()
}
