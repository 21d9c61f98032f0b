//! Behind `cargo xtask sim --scale`: measures an etcd, and takes simulated fleets on one as fast through a mass
//! preemption.
#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "a command's output")]
#![expect(clippy::print_stderr, reason = "a command's errors and progress")]

use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Context as _, Result};
use clap::Parser;
use conman_core::ownership::Timing;
use conman_scale::etcd::{self, EtcdReport};
use conman_scale::{EtcdCosts, ScaleOptions, ScaleReport, simulate_scale};
use serde_json::json;

/// Measured with etcd 3.4 on a machine with two processors: for machines without etcd.
const USUAL: EtcdCosts = EtcdCosts {
    transaction_us: 120.0,
    read_us: 60.0,
    record_us: 2.5,
    state_us: 0.8,
    delivery_us: 6.0,
};

/// A fleet in which etcd is busier than this in quiet times has nothing left for trouble.
const MOST_BUSY_PERCENT: f64 = 50.0;

#[derive(Debug, Parser)]
#[command(name = "cargo xtask sim --scale", bin_name = "cargo xtask sim --scale")]
struct Arguments {
    /// Nodes of the simulated fleets
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "30,100,200,400,700,1000,3000,10000"
    )]
    nodes: Vec<usize>,
    /// Factors of the daemon's intervals
    #[arg(long, value_delimiter = ',', default_value = "1,10")]
    intervals: Vec<u64>,
    /// Observers of a node
    #[arg(long, value_delimiter = ',', default_value = "3")]
    observers: Vec<usize>,
    /// Records in the real etcd
    #[arg(long, value_delimiter = ',', default_value = "10000,100000,1000000")]
    records: Vec<usize>,
    /// Simulate with the usual costs instead of measuring an etcd
    #[arg(long)]
    without_etcd: bool,
    /// Processors of etcd in the simulation
    #[arg(long, default_value_t = 4)]
    processors: usize,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    let measured = match arguments.without_etcd {
        true => None,
        false => Some(measure(&arguments.records)?),
    };
    let costs = measured.as_ref().map_or(USUAL, |etcd| etcd.costs);
    let begun = Instant::now();
    let reports = simulate(arguments, costs)?;
    let seconds = begun.elapsed().as_secs_f64();
    if arguments.json {
        let value = json!({
            "costs": costs, "etcd": measured, "fleets": reports, "simulated_in_s": seconds,
            "largest": arguments.intervals.iter().map(|intervals| json!({
                "intervals": intervals, "nodes": largest(&reports, *intervals),
            })).collect::<Vec<_>>(),
        });
        println!("{value}");
        return Ok(());
    }
    if let Some(etcd) = &measured {
        show_etcd(etcd);
    }
    show_fleets(&reports);
    println!("simulated in {seconds:.0} s");
    for intervals in &arguments.intervals {
        let nodes = largest(&reports, *intervals);
        let nodes = nodes.map_or_else(|| "none".to_owned(), |nodes| nodes.to_string());
        println!("the largest fleet with {intervals} × the intervals: {nodes} nodes");
    }
    Ok(())
}

fn measure(records: &[usize]) -> Result<EtcdReport> {
    let runtime = tokio::runtime::Runtime::new().context("starting a runtime")?;
    runtime.block_on(etcd::measure(records, &|what| eprintln!("  … {what}")))
}

/// All fleets, on all processors.
fn simulate(arguments: &Arguments, costs: EtcdCosts) -> Result<Vec<ScaleReport>> {
    let mut all = Vec::new();
    for nodes in &arguments.nodes {
        for intervals in &arguments.intervals {
            for observers in &arguments.observers {
                all.push(ScaleOptions {
                    nodes: *nodes,
                    sessions_each: 100,
                    lost_percent: 30,
                    within_ms: 30_000,
                    intervals: *intervals,
                    observers: *observers,
                    timing: Timing::default(),
                    costs,
                    processors: arguments.processors.max(1),
                    seed: arguments.seed,
                });
            }
        }
    }
    // The largest first: they take longest.
    all.reverse();
    let (next, reports) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(options) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let begun = Instant::now();
                    let report = simulate_scale(options);
                    let (nodes, took) = (options.nodes, begun.elapsed().as_secs());
                    eprintln!(
                        "  … {nodes} nodes, {} × intervals: {took} s",
                        options.intervals
                    );
                    if let Ok(mut reports) = reports.lock() {
                        reports.push(report);
                    }
                }
            });
        }
    });
    let mut reports = reports.into_inner().ok().context("a simulation failed")?;
    reports.sort_by_key(|one: &ScaleReport| (one.intervals, one.nodes, one.observers));
    Ok(reports)
}

/// The largest fleet in which nothing freezes, all is served again, and etcd has room in quiet times; every smaller
/// one must be such, too.
fn largest(reports: &[ScaleReport], intervals: u64) -> Option<usize> {
    let bears = |one: &&ScaleReport| {
        let has_room = one.quiet.busy_percent <= MOST_BUSY_PERCENT;
        one.frozen_nodes == 0 && one.served_after_ms.is_some() && has_room
    };
    let of_these = reports.iter().filter(|one| one.intervals == intervals);
    of_these.take_while(bears).map(|one| one.nodes).last()
}

fn show_etcd(etcd: &EtcdReport) {
    let EtcdCosts {
        transaction_us,
        read_us,
        record_us,
        state_us,
        delivery_us,
    } = etcd.costs;
    println!(
        "{}: processor time: a transaction {transaction_us:.0} µs, a read {read_us:.0} µs, each record \
         of one {record_us:.2} µs, of a node {state_us:.2} µs, each delivery to a watch {delivery_us:.1} µs\n\n\
         | records | first read of a node | transactions a second | memory | file | compaction |\n\
         |---|---|---|---|---|---|",
        etcd.version
    );
    let mib = |bytes: u64| bytes >> 20;
    for one in &etcd.stored {
        println!(
            "| {} | {:.2} s | {:.0} | {} MiB | {} MiB | {:.2} s |",
            one.records,
            one.first_read.as_secs_f64(),
            one.transactions_per_s,
            mib(one.memory_bytes),
            mib(one.file_bytes),
            one.compaction.as_secs_f64()
        );
    }
    println!();
}

fn show_fleets(reports: &[ScaleReport]) {
    println!(
        "| nodes | intervals | observers | quiet: transactions, records read, deliveries a second, etcd busy \
         | storm: the same | slowest renewal | frozen nodes | served again after | one placement |\n\
         |---|---|---|---|---|---|---|---|---|"
    );
    for one in reports {
        let load = |load: &conman_scale::Load| {
            format!(
                "{:.0}, {:.0}, {:.0}, {:.0} %",
                load.transactions_per_s,
                load.records_read_per_s,
                load.deliveries_per_s,
                load.busy_percent
            )
        };
        let served = match one.served_after_ms {
            Some(ms) => format!("{:.1} s", ms as f64 / 1e3),
            None => format!("{} of {} in time", one.served_sessions, one.lost_sessions),
        };
        println!(
            "| {} | × {} | {} | {} | {} | {} ms | {} | {served} | {:.0} µs |",
            one.nodes,
            one.intervals,
            one.observers,
            load(&one.quiet),
            load(&one.storm),
            one.slowest_renewal_ms,
            one.frozen_nodes,
            one.placement_us
        );
    }
}
