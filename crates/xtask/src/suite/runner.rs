//! Runs test programs concurrently.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::Pid;

use super::programs::TestProgram;
use super::standstill;
use crate::process::{output, target_dir};

/// The slowest programs. They start first, so that none is left to run alone at the end.
const FIRST: [&str; 4] = [
    "cluster/suite",
    "e2e/suite",
    "conman-shim/suite",
    "conman-etcd/suite",
];

/// Starts last: its emulated machines keep all processors busy on which others measure times.
const LAST: &str = "vm/suite";

/// Programs whose tests mostly wait, and how many of them run at a time.
const WAITING: [(&str, &str); 4] = [
    ("cluster/suite", "4"),
    ("e2e/suite", "4"),
    ("conman-etcd/suite", "6"),
    ("conman-shim/suite", "4"),
];

/// Tests that are never repeated: a violation that they find once has happened.
const NEVER_AGAIN: &str = "overlap::";

/// How a program ended.
struct Outcome {
    name: String,
    program: TestProgram,
    status: ExitStatus,
    /// Its output, both streams.
    text: String,
    duration: Duration,
    /// Of the program and of all processes that it and its children have waited for.
    processor: Duration,
    counts: Counts,
    /// Tests that did not pass.
    failed: Vec<String>,
    /// Tests that had not begun when the program was killed because it stood still.
    not_begun: Vec<String>,
}

/// Tests by result.
#[derive(Clone, Copy, Default)]
struct Counts {
    passed: u64,
    failed: u64,
    ignored: u64,
}

/// What did not pass at once.
pub(super) struct Failures {
    /// The programs that failed.
    pub(super) failed: Vec<String>,
    /// How many tests failed and passed when they ran alone.
    pub(super) flaky: usize,
}

/// Runs the programs, `jobs` at a time, and prints their output.
///
/// Failed tests are repeated once, one at a time when nothing else runs, since some depend on time and the
/// machine may have been loaded. Those that pass then are printed as `flaky:`.
pub(super) fn run(
    mut programs: Vec<TestProgram>,
    jobs: usize,
    filter: Option<&str>,
) -> Result<Failures> {
    let position = |name: &str| FIRST.iter().position(|first| *first == name);
    programs.sort_by_key(|program| {
        let name = program.name.as_str();
        (name == LAST, position(name).unwrap_or(FIRST.len()))
    });
    let logs = target_dir().join("test-logs");
    fs::create_dir_all(&logs).with_context(|| format!("making {}", logs.display()))?;

    let started = Instant::now();
    let filters: Vec<&str> = filter.into_iter().collect();
    let queue = Mutex::new(VecDeque::from(programs));
    let next = || {
        queue
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop_front()
    };
    let work = || -> Result<Vec<Outcome>> {
        let mut outcomes = Vec::new();
        while let Some(program) = next() {
            let outcome = run_one(program, &logs, &filters)?;
            outcome.print(filter.is_some());
            outcomes.push(outcome);
        }
        Ok(outcomes)
    };
    let outcomes = thread::scope(|scope| {
        let workers: Vec<_> = (0..jobs).map(|_| scope.spawn(work)).collect();
        let mut outcomes = Vec::new();
        for worker in workers {
            let done = worker
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            outcomes.extend(done?);
        }
        anyhow::Ok(outcomes)
    })?;
    write_times(&outcomes, &logs)?;

    let total =
        |count: fn(&Counts) -> u64| outcomes.iter().map(|one| count(&one.counts)).sum::<u64>();
    println!(
        "total: {} passed, {} failed, {} ignored; {} programs, {} s",
        total(|counts| counts.passed),
        total(|counts| counts.failed),
        total(|counts| counts.ignored),
        outcomes.len(),
        started.elapsed().as_secs(),
    );
    let (mut failed, mut flaky) = (Vec::new(), 0);
    for outcome in outcomes.iter().filter(|one| !one.status.success()) {
        if outcome.passes_again(&logs)? {
            flaky += outcome.failed.len();
        } else {
            failed.push(outcome.name.clone());
        }
    }
    Ok(Failures { failed, flaky })
}

fn run_one(program: TestProgram, logs: &Path, arguments: &[&str]) -> Result<Outcome> {
    let name = program.name.clone();
    // A file: a pipe would stay open as long as any process that a test leaves behind.
    let log = logs.join(format!("{}.log", name.replace('/', "-")));
    let file = File::create(&log).with_context(|| format!("creating {}", log.display()))?;
    println!("     Running {name}");
    let started = Instant::now();
    let mut command = Command::new(&program.path);
    command.args(arguments);
    // How long each test takes: the harness tells it only by an option that is not stable.
    command.args(["-Z", "unstable-options", "--report-time"]);
    command.env("RUSTC_BOOTSTRAP", "1");
    if let Some((_, threads)) = WAITING.iter().find(|(waiting, _)| *waiting == name) {
        command.env("RUST_TEST_THREADS", threads);
    }
    command.current_dir(&program.directory);
    command.env("CARGO_MANIFEST_DIR", &program.directory);
    command.env("CARGO_MANIFEST_PATH", program.directory.join("Cargo.toml"));
    command.stdin(std::process::Stdio::null());
    command.stderr(file.try_clone().context("sharing a file")?);
    command.stdout(file);
    let mut child = command
        .spawn()
        .with_context(|| format!("starting {}", program.path.display()))?;
    let stood_still = standstill::wait(Pid::from_child(&child), &log)?;
    let processor = processor_time(child.id())?;
    let status = child.wait().context("waiting for a test program")?;
    let text = fs::read(&log).with_context(|| format!("reading {}", log.display()))?;
    let mut text = String::from_utf8_lossy(&text).into_owned();
    let (mut failed, mut not_begun) = (owned(failed_tests(&text)), Vec::new());
    if let Some(seen) = stood_still {
        let all = listed_tests(&program, arguments)?;
        let unfinished = standstill::unfinished(&all, &text);
        (failed, not_begun) = (owned(unfinished.0), owned(unfinished.1));
        text.push_str(&seen);
        text.push_str(&format!("it stood still in {}\n", failed.join(", ")));
        fs::write(&log, &text).with_context(|| format!("writing {}", log.display()))?;
    }
    Ok(Outcome {
        name,
        program,
        status,
        counts: counts(&text),
        text,
        duration: started.elapsed(),
        processor,
        failed,
        not_begun,
    })
}

fn owned(names: Vec<&str>) -> Vec<String> {
    names.into_iter().map(str::to_owned).collect()
}

/// The tests that the program runs with these arguments.
fn listed_tests(program: &TestProgram, arguments: &[&str]) -> Result<Vec<String>> {
    let mut command = Command::new(&program.path);
    command.args(arguments).args(["--list", "--format=terse"]);
    let listed = output(&mut command)?;
    let listed = String::from_utf8(listed.stdout).context("reading the names of tests")?;
    let names = listed
        .lines()
        .filter_map(|line| line.strip_suffix(": test"));
    Ok(owned(names.collect()))
}

/// The processor time of a child that has ended, and of the processes that it has waited for. It is not reaped.
fn processor_time(child: u32) -> Result<Duration> {
    let stat = fs::read_to_string(format!("/proc/{child}/stat")).context("reading its times")?;
    Ok(times_of(&stat))
}

/// utime, stime, cutime and cstime of proc_pid_stat(5), in ticks of 10 ms.
fn times_of(stat: &str) -> Duration {
    let (_, fields) = stat.rsplit_once(") ").unwrap_or_default();
    let ticks = fields.split(' ').skip(11).take(4);
    let ticks: u64 = ticks.filter_map(|field| field.parse::<u64>().ok()).sum();
    Duration::from_millis(10 * ticks)
}

impl Outcome {
    /// Runs the failed tests once more, alone, and returns whether all of them pass.
    fn passes_again(&self, logs: &Path) -> Result<bool> {
        let is_final = |test: &String| test.starts_with(NEVER_AGAIN);
        if self.failed.is_empty() || self.failed.iter().any(is_final) {
            return Ok(false);
        }
        let mut arguments = vec!["--exact", "--test-threads=1"];
        let tests = self.failed.iter().chain(&self.not_begun);
        arguments.extend(tests.map(String::as_str));
        let program = TestProgram {
            name: format!("{}.again", self.name),
            ..self.program.clone()
        };
        let again = run_one(program, logs, &arguments)?;
        if again.status.success() {
            for test in &self.failed {
                println!(
                    "flaky: {} {test}: failed, and passed when it ran alone",
                    self.name
                );
            }
            return Ok(true);
        }
        again.print(false);
        Ok(false)
    }

    /// Prints all output of a failed program; of others, what they skipped and their result.
    fn print(&self, is_filtered: bool) {
        let Counts { passed, failed, .. } = self.counts;
        if is_filtered && self.status.success() && passed + failed == 0 {
            return;
        }
        let seconds = self.duration.as_secs_f64();
        let processor = self.processor.as_secs_f64();
        let mut lines = vec![format!(
            "\n     Finished {} in {seconds:.1} s, {processor:.1} s of processor time",
            self.name
        )];
        if self.status.success() {
            let told = |line: &&str| line.contains("skipped: ") || is_result(line);
            lines.extend(self.text.lines().filter(told).map(str::to_owned));
        } else {
            lines.push(self.text.clone());
            lines.push(format!("{} failed: {}", self.name, self.status));
        }
        println!("{}\n", lines.join("\n"));
    }
}

/// Writes the processor time of each program and how long each test took, the longest first, to `times` beside
/// the logs.
fn write_times(outcomes: &[Outcome], logs: &Path) -> Result<()> {
    let mut times: Vec<(f64, &str, &str)> = outcomes
        .iter()
        .flat_map(|one| one.text.lines().map(|line| (one.name.as_str(), line)))
        .filter_map(|(program, line)| time(line).map(|(test, seconds)| (seconds, program, test)))
        .collect();
    times.sort_by(|one, other| other.0.total_cmp(&one.0));
    let mut programs: Vec<&Outcome> = outcomes.iter().collect();
    programs.sort_by_key(|one| std::cmp::Reverse(one.processor));
    let programs = programs.iter().map(|one| {
        let (processor, seconds) = (one.processor.as_secs_f64(), one.duration.as_secs_f64());
        format!(
            "{processor:8.1} of processor time in {seconds:.1} {}\n",
            one.name
        )
    });
    let tests = times
        .iter()
        .map(|(seconds, program, test)| format!("{seconds:8.1} {program} {test}\n"));
    let text: String = programs.chain(tests).collect();
    fs::write(logs.join("times"), text).context("writing how long tests took")
}

/// The name and the seconds of `test NAME ... ok <1.234s>`.
fn time(line: &str) -> Option<(&str, f64)> {
    let (name, result) = line.strip_prefix("test ")?.split_once(" ... ")?;
    let (_, time) = result.strip_suffix("s>")?.split_once('<')?;
    Some((name, time.parse().ok()?))
}

/// The names in the last list of failures.
fn failed_tests(text: &str) -> Vec<&str> {
    let Some((_, list)) = text.rsplit_once("\nfailures:\n") else {
        return Vec::new();
    };
    let names = list.lines().map_while(|line| line.strip_prefix("    "));
    names.collect()
}

fn is_result(line: &str) -> bool {
    line.starts_with("test result: ")
}

/// The numbers of `test result: ok. 3 passed; 0 failed; 1 ignored; …`.
fn counts(text: &str) -> Counts {
    let mut counts = Counts::default();
    for line in text.lines().filter(|line| is_result(line)) {
        let words: Vec<&str> = line
            .split([' ', ';'])
            .filter(|word| !word.is_empty())
            .collect();
        for pair in words.windows(2) {
            let number = pair[0].parse().unwrap_or(0);
            match pair[1] {
                "passed" => counts.passed += number,
                "failed" => counts.failed += number,
                "ignored" => counts.ignored += number,
                _ => {}
            }
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_tests_are_those_of_the_last_list() {
        let text = "\nfailures:\n\n---- a::b stdout ----\nfailures:\n    not this\n\n\nfailures:\n    \
                    a::b\n    a::c\n\ntest result: FAILED. 1 passed; 2 failed;\n";
        assert_eq!(failed_tests(text), ["a::b", "a::c"]);
        assert!(failed_tests("test result: ok. 1 passed;\n").is_empty());
    }

    #[test]
    fn the_time_of_a_test_is_read() {
        assert_eq!(time("test a::b ... ok <12.345s>"), Some(("a::b", 12.345)));
        assert_eq!(time("test a::b ... ignored"), None);
    }

    #[test]
    fn the_processor_time_of_a_process_and_its_children_is_read() {
        let stat =
            "42 (a) b) S 1 42 42 0 -1 4194560 3162 194 0 0 100 50 25 5 20 0 1 0 56 17 4 18 0";
        assert_eq!(times_of(stat), Duration::from_millis(1_800));
    }

    #[test]
    fn results_of_a_program_are_counted() {
        let text = "test a ... ok\n\ntest result: FAILED. 12 passed; 3 failed; 2 ignored; 0 measured; \
                    7 filtered out; finished in 1.02s\n";
        let Counts {
            passed,
            failed,
            ignored,
        } = counts(text);
        assert_eq!((passed, failed, ignored), (12, 3, 2));
    }
}
