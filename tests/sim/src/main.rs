//! `conman-sim --seeds N [--start S]`: searches seeds on every core and prints the first violation.
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "a command's output")]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

fn main() -> std::process::ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let number = |name: &str, default: u64| {
        let at = arguments.iter().position(|argument| argument == name);
        at.and_then(|at| arguments.get(at + 1)?.parse().ok())
            .unwrap_or(default)
    };
    let (seeds, start) = (number("--seeds", 1_000), number("--start", 0));
    let (next, failed) = (AtomicU64::new(start), AtomicBool::new(false));
    let (takeovers, began) = (AtomicU64::new(0), Instant::now());
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while !failed.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= start.saturating_add(seeds) {
                        break;
                    }
                    let report = conman_sim::simulate(seed);
                    takeovers.fetch_add(report.takeovers, Ordering::Relaxed);
                    if let Some(violation) = report.violation
                        && !failed.swap(true, Ordering::Relaxed)
                    {
                        println!("{}", report.trace.join("\n"));
                        println!("seed {seed}: {violation}");
                    }
                }
            });
        }
    });
    let done = next
        .load(Ordering::Relaxed)
        .min(start.saturating_add(seeds))
        - start;
    let rate = done as f64 / began.elapsed().as_secs_f64();
    let takeovers = takeovers.load(Ordering::Relaxed);
    println!("{done} seeds, {takeovers} takeovers, {rate:.0} seeds a second");
    u8::from(failed.load(Ordering::Relaxed)).into()
}
