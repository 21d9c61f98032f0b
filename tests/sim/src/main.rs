//! Searches seeds on every core and prints the first violation, with how to repeat it.
#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "a command's output")]
#![expect(clippy::print_stderr, reason = "a command's errors and progress")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use conman_sim::{Pauses, Report, sabotage, simulate};

const USAGE: &str = "\
usage: conman-sim [--seeds N] [--start S] [--all] [--beyond] [--sabotage NAME]
  --seeds N        so many seeds (default 1000)
  --start S        from this one on (default 0); from 1000000 on, with times that nodes
                   derive; from 2000000 on, with notices of preemption;
                   from 3000000 on, with a registry that is slow and refuses;
                   from 4000000 on, nodes that probe each other;
                   from 5000000 on, with parts of a pool of addresses
  --all            go on after a violation and count them by rule
  --beyond         machines pause, unnoticed, for longer than the takeover time has room for
  --sabotage NAME  over a core broken by tests/sim/sabotages/NAME.patch";

/// Between two progress lines.
const PROGRESS: Duration = Duration::from_secs(5);

struct Search {
    seeds: u64,
    start: u64,
    all: bool,
    pauses: Pauses,
    sabotage: Option<String>,
}

fn parse() -> Option<Search> {
    let mut search = Search {
        seeds: 1_000,
        start: 0,
        all: false,
        pauses: Pauses::Assumed,
        sabotage: None,
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--seeds" => search.seeds = arguments.next()?.parse().ok()?,
            "--start" => search.start = arguments.next()?.parse().ok()?,
            "--all" => search.all = true,
            "--beyond" => search.pauses = Pauses::Beyond,
            "--sabotage" => search.sabotage = Some(arguments.next()?),
            _ => return None,
        }
    }
    Some(search)
}

fn main() -> ExitCode {
    let Some(search) = parse() else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    if let Some(name) = &search.sabotage {
        return match run_sabotaged(name) {
            Ok(code) => code,
            Err(error) => {
                eprintln!("error: {error}");
                ExitCode::from(2)
            }
        };
    }
    run(&search)
}

#[derive(Default)]
struct Tally {
    done: AtomicU64,
    takeovers: AtomicU64,
    starts: AtomicU64,
    over: AtomicBool,
    first: Mutex<Option<Report>>,
    rules: Mutex<BTreeMap<String, Vec<u64>>>,
}

impl Tally {
    fn count(&self, report: Report, all: bool) {
        self.done.fetch_add(1, Ordering::Relaxed);
        self.takeovers
            .fetch_add(report.takeovers, Ordering::Relaxed);
        self.starts.fetch_add(report.starts, Ordering::Relaxed);
        let Some(violation) = &report.violation else {
            return;
        };
        self.over.fetch_or(!all, Ordering::Relaxed);
        if let Ok(mut rules) = self.rules.lock() {
            let rule = violation.rule.to_string();
            rules.entry(rule).or_default().push(report.seed);
        }
        if let Ok(mut first) = self.first.lock()
            && first.as_ref().is_none_or(|first| report.seed < first.seed)
        {
            *first = Some(report);
        }
    }
}

fn run(search: &Search) -> ExitCode {
    let (next, tally, began) = (AtomicU64::new(0), Tally::default(), Instant::now());
    let shown = Mutex::new(began);
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while !tally.over.load(Ordering::Relaxed) {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= search.seeds {
                        break;
                    }
                    let seed = search.start.wrapping_add(index);
                    tally.count(simulate(seed, search.pauses), search.all);
                    if let Ok(mut shown) = shown.try_lock()
                        && shown.elapsed() >= PROGRESS
                    {
                        *shown = Instant::now();
                        eprintln!("{} of {} seeds", index + 1, search.seeds);
                    }
                }
            });
        }
    });
    conclude(search, &tally, began.elapsed())
}

fn conclude(search: &Search, tally: &Tally, took: Duration) -> ExitCode {
    let done = tally.done.load(Ordering::Relaxed);
    let first = tally.first.lock().ok().and_then(|mut first| first.take());
    if let (Ok(rules), true) = (tally.rules.lock(), search.all) {
        for (rule, seeds) in rules.iter() {
            let some: Vec<_> = seeds.iter().take(8).map(u64::to_string).collect();
            println!("{rule}: {} seeds, {}", seeds.len(), some.join(" "));
        }
    }
    if let Some(report) = &first
        && let Some(violation) = &report.violation
    {
        if !search.all {
            println!("{}", report.trace.join("\n"));
        }
        println!("seed {}: {violation}", report.seed);
        let beyond = match search.pauses {
            Pauses::Assumed => "",
            Pauses::Beyond => " --beyond",
        };
        println!(
            "again with: cargo xtask sim --seeds 1 --start {}{beyond}",
            report.seed
        );
    }
    println!(
        "{done} seeds in {:.1} s, {:.0} a second: {} containers ran, {} nodes were fenced, {}",
        took.as_secs_f64(),
        done as f64 / took.as_secs_f64(),
        tally.starts.load(Ordering::Relaxed),
        tally.takeovers.load(Ordering::Relaxed),
        if first.is_some() {
            "something was violated"
        } else {
            "nothing was violated"
        }
    );
    ExitCode::from(u8::from(first.is_some()))
}

/// Hands the other arguments on to a build over the patched core.
fn run_sabotaged(name: &str) -> std::io::Result<ExitCode> {
    let patch = sabotage::patches().join(format!("{name}.patch"));
    if !patch.exists() {
        let names = sabotage::names()?.join("\n  ");
        let why = format!("there is no sabotage `{name}`; there are:\n  {names}");
        return Err(std::io::Error::other(why));
    }
    let work = below_target().join("sabotaged");
    std::fs::create_dir_all(&work)?;
    let binaries = sabotage::build(&work, &[patch], true)?;
    let mut rest = Vec::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        if argument == "--sabotage" {
            arguments.next();
        } else {
            rest.push(argument);
        }
    }
    let status = std::process::Command::new(&binaries[0])
        .args(rest)
        .status()?;
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(ExitCode::from(code.unwrap_or(2)))
}

/// The build folder that this binary lies in.
fn below_target() -> PathBuf {
    let me = std::env::current_exe().unwrap_or_default();
    me.ancestors()
        .nth(2)
        .map_or_else(std::env::temp_dir, Path::to_path_buf)
}
