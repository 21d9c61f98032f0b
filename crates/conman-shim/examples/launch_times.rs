//! How long starts take, by phase, and what containers cost, while there are more and more:
//! `cargo run --release -p conman-shim --example launch_times -- [N] [--at-once K] [--without NAME]`.
//!
//! Starts N hardened containers of busybox's web server, with limits and logs, K orders under way
//! at a time; for every thousand prints the median of each phase, its 99th percentile and its 10th, to
//! which a busy machine adds the least, then the
//! kernel's memory for each container, the shim's and the launcher's. Kills all and leaves nothing
//! behind. `--without` leaves out `memory`, `pids`, `cpu` (limits), `seccomp`, `masks`, `ptys`, `sys`,
//! `init` or `prepare`, to see what each costs or saves. The shim is this same program once more.
#![expect(clippy::print_stdout, reason = "a program for people")]

use std::error::Error;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use conman_linux::{CgroupLimits, CgroupPart, Cgroups, PidFd, raise_nofile};
use conman_observer::resident_bytes;
use conman_shim::{
    Ahead, Client, Hardening, LaunchSpec, NetworkSpec, Phases, ProgramSpec, Reply, Request,
    RootKind, RootSpec, ShimOptions, run,
};

const BUSYBOX: &str = "/usr/bin/busybox";

/// Bound on every call and on every death.
const PATIENCE: Duration = Duration::from_secs(60);

/// Starts that one row is taken over.
const WINDOW: usize = 1_000;

/// Starts at the beginning and at the end that are compared.
const EDGE: usize = 500;

type Failure = Box<dyn Error + Send + Sync>;

/// What to measure.
#[derive(Debug, Clone)]
struct Plan {
    count: usize,
    at_once: usize,
    without: Vec<String>,
}

impl Plan {
    fn parse(arguments: &[String]) -> Result<Self, Failure> {
        let mut plan = Self {
            count: 200,
            at_once: 1,
            without: Vec::new(),
        };
        let mut words = arguments.iter();
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or(format!("{word} wants a value"));
            match word.as_str() {
                "--at-once" => plan.at_once = value()?.parse()?,
                "--without" => plan.without.push(value()?.clone()),
                number => plan.count = number.parse()?,
            }
        }
        Ok(plan)
    }

    fn has(&self, part: &str) -> bool {
        !self.without.iter().any(|word| word == part)
    }
}

/// One start.
#[derive(Debug)]
struct Start {
    number: usize,
    phases: Phases,
    call: Duration,
    process: PidFd,
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["shim", directory, cgroup, prepare_for] => {
            let ended = run(ShimOptions {
                socket: Path::new(directory).join("shim.sock"),
                roots: vec![PathBuf::from(directory)],
                state_file: Path::new(directory).join("shim.state"),
                ids: conman_shim::IdPool::default(),
                total_cpu_millis: None,
                do_without: Vec::new(),
                cgroups: CgroupPart::All,
                prepare_for: prepare_for.parse()?,
                prepared_file: Path::new(directory).join("shim.prepared"),
                ids_file: Path::new(directory).join("shim.ids"),
                fence_cgroup: cgroup.to_owned(),
                fence_slice: format!("{cgroup}.slice"),
                standby: false,
                freeze_patience: Duration::from_secs(1),
                frozen_max: Duration::from_mins(15),
            })?;
            drop(ended);
            Ok(())
        }
        _ => measure(&Plan::parse(&arguments)?),
    }
}

fn measure(plan: &Plan) -> Result<(), Failure> {
    let (descriptors, _) = raise_nofile()?;
    if descriptors < plan.count as u64 + 100 {
        return Err(format!("{descriptors} descriptors are not enough (ulimit -n)").into());
    }
    let directory = tempfile::tempdir()?;
    make_root(&directory.path().join("store/base"))?;
    for name in ["scratch", "logs"] {
        fs::create_dir(directory.path().join(name))?;
    }
    conman_linux::spread_directories(&directory.path().join("scratch"));
    let cgroup = format!("/conman-launch-times-{}", std::process::id());
    let prepare_for = if plan.has("prepare") { plan.count } else { 0 };
    let mut shim = Command::new(std::env::current_exe()?)
        .args(["shim", &directory.path().to_string_lossy(), &cgroup])
        .arg(prepare_for.to_string())
        .spawn()?;
    let before = memory_cgroups();
    let outcome = measure_with(directory.path(), &cgroup, plan, &shim);
    end(&mut shim, &cgroup);
    drop(directory);
    println!("memory cgroups before {before}, after {}", memory_cgroups());
    outcome
}

fn measure_with(directory: &Path, cgroup: &str, plan: &Plan, shim: &Child) -> Result<(), Failure> {
    let socket = directory.join("shim.sock");
    drop(connect(&socket)?);
    let before = Memory::now()?;
    let begin = Instant::now();
    let starts = start_all(&socket, plan, |number| {
        spec(directory, cgroup, number, plan)
    })?;
    let seconds = begin.elapsed().as_secs_f64();
    let used = Memory::now()?.since(&before);
    println!(
        "{} started in {seconds:.2} s, {:.0} a second",
        plan.count,
        plan.count as f64 / seconds
    );
    tell_edges(&starts);
    used.tell(plan.count);
    for pid in own_processes(i32::try_from(shim.id())?) {
        let resident = resident_bytes(pid)? / 1_024;
        let open = fs::read_dir(format!("/proc/{pid}/fd"))?.count();
        println!("process {pid} of the shim's: {resident} KiB resident, {open} descriptors");
    }

    let begin = Instant::now();
    for start in &starts {
        start.process.kill()?;
    }
    for start in &starts {
        if !start.process.wait_dead(PATIENCE)? {
            return Err(format!("process {} does not die", start.process.pid()).into());
        }
    }
    println!(
        "all dead after {:.0} ms",
        begin.elapsed().as_secs_f64() * 1_000.0
    );
    Ok(())
}

/// All starts in their order; prints a row as soon as it is complete.
fn start_all(
    socket: &Path,
    plan: &Plan,
    spec: impl Fn(usize) -> LaunchSpec + Sync,
) -> Result<Vec<Start>, Failure> {
    print_row("", &HEADINGS.map(str::to_owned));
    let next = AtomicUsize::new(0);
    let shim = connect(socket)?.shim_pid();
    let busy = Mutex::new(own_time_us(shim));
    let done = Mutex::new(Vec::with_capacity(plan.count));
    let work = || -> Result<(), Failure> {
        let mut client = connect(socket)?;
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= plan.count {
                return Ok(());
            }
            let asked = Instant::now();
            let launch = Request::Launch(Box::new(spec(number)));
            let Reply::Launched { pid, phases } = client.ask(launch)? else {
                return Err("unexpected answer to a launch".into());
            };
            let start = Start {
                number,
                phases,
                call: asked.elapsed(),
                process: PidFd::open(pid)?,
            };
            let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
            done.push(start);
            if done.len() % WINDOW == 0 || done.len() == plan.count {
                let from = (done.len() - 1) / WINDOW * WINDOW;
                tell_window(done.len(), &done[from..]);
                let mut busy = busy.lock().unwrap_or_else(PoisonError::into_inner);
                let now = own_time_us(shim);
                tell_time(&done[from..], now.saturating_sub(*busy));
                *busy = now;
            }
        }
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..plan.at_once).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| {
            let ended = worker.join();
            ended.unwrap_or_else(|_| Err("a worker panicked".into()))
        })
    })?;
    let mut starts = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    starts.sort_by_key(|start: &Start| start.number);
    Ok(starts)
}

const HEADINGS: [&str; 6] = ["cgroup", "files", "clone", "root", "setup", "call"];

/// The value below which `share` hundredths of them lie.
fn percentile(starts: &[Start], share: usize, pick: impl Fn(&Start) -> u64) -> u64 {
    let mut values: Vec<u64> = starts.iter().map(pick).collect();
    values.sort_unstable();
    let at = (values.len() * share / 100).min(values.len().saturating_sub(1));
    values.get(at).copied().unwrap_or(0)
}

fn call_us(start: &Start) -> u64 {
    u64::try_from(start.call.as_micros()).unwrap_or(u64::MAX)
}

/// Microseconds.
fn tell_window(alive: usize, starts: &[Start]) {
    let picks: [fn(&Start) -> u64; 6] = [
        |start| start.phases.cgroup_us,
        |start| start.phases.files_us,
        |start| start.phases.clone_us,
        |start| start.phases.root_us,
        |start| start.phases.setup_us,
        call_us,
    ];
    for (name, share) in [("p10", 10), ("p50", 50), ("p99", 99)] {
        let row = picks.map(|pick| percentile(starts, share, pick).to_string());
        print_row(&format!("{alive} {name}"), &row);
    }
}

/// Processor time, which a busy machine does not add to.
fn tell_time(starts: &[Start], own_us: u64) {
    let inside: u64 = starts.iter().map(|one| time_us(one.process.pid())).sum();
    let count = starts.len().max(1) as u64;
    println!(
        "processor time a start: {} us of shim and launcher, {} us of the container until now",
        own_us / count,
        inside / count
    );
}

/// What the shim and its launcher have used of the processors.
fn own_time_us(shim: i32) -> u64 {
    own_processes(shim).into_iter().map(time_us).sum()
}

/// What a process of one thread has used of the processors; 0 when it is gone.
fn time_us(pid: i32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/schedstat")).unwrap_or_default();
    let nanoseconds = text.split_ascii_whitespace().next();
    nanoseconds
        .and_then(|text| text.parse::<u64>().ok())
        .unwrap_or(0)
        / 1_000
}

fn tell_edges(starts: &[Start]) {
    let edge = EDGE.min(starts.len());
    let first = percentile(&starts[..edge], 50, call_us);
    let last = percentile(&starts[starts.len() - edge..], 50, call_us);
    println!(
        "p50 of the first {edge}: {first} us, of the last: {last} us, {:.2} times",
        last as f64 / first.max(1) as f64
    );
}

fn print_row(name: &str, columns: &[String]) {
    let columns: String = columns.iter().map(|text| format!("{text:>10}")).collect();
    println!("{name:>10}{columns}");
}

/// What the whole machine uses, in KiB; other programs' changes are in it.
#[derive(Debug)]
struct Memory {
    values: Vec<(&'static str, i64)>,
}

impl Memory {
    /// Lines of /proc/meminfo. What is available comes first, and falls.
    const LINES: [&str; 6] = [
        "MemAvailable",
        "SUnreclaim",
        "SReclaimable",
        "Percpu",
        "KernelStack",
        "AnonPages",
    ];

    fn now() -> Result<Self, Failure> {
        let text = fs::read_to_string("/proc/meminfo")?;
        let value = |name: &'static str| -> Result<(&'static str, i64), Failure> {
            let line = text.lines().find_map(|line| {
                let rest = line.strip_prefix(name)?.strip_prefix(':')?;
                rest.split_ascii_whitespace().next()
            });
            Ok((name, line.ok_or(format!("no {name}"))?.parse()?))
        };
        let values: Result<_, Failure> = Self::LINES.iter().map(|name| value(name)).collect();
        Ok(Self { values: values? })
    }

    fn since(mut self, before: &Self) -> Self {
        for ((name, value), (_, old)) in self.values.iter_mut().zip(&before.values) {
            let falls = *name == "MemAvailable";
            *value = if falls { old - *value } else { *value - old };
        }
        self
    }

    fn tell(&self, containers: usize) {
        let each = |value: i64| value as f64 / containers.max(1) as f64;
        let parts: Vec<String> = self
            .values
            .iter()
            .map(|(name, value)| format!("{name} {:.0}", each(*value)))
            .collect();
        println!("KiB a container: {}", parts.join(", "));
    }
}

/// The shim and its helpers: its children that run the same program.
fn own_processes(shim: i32) -> Vec<i32> {
    let program = |pid: &str| fs::read_link(format!("/proc/{pid}/exe")).ok();
    let own = program(&shim.to_string());
    let children = fs::read_to_string(format!("/proc/{shim}/task/{shim}/children"));
    let children = children.unwrap_or_default();
    let same = children
        .split_ascii_whitespace()
        .filter(|pid| program(pid) == own);
    let pids = same.filter_map(|pid| pid.parse().ok());
    std::iter::once(shim).chain(pids).collect()
}

/// Those of v1 hierarchies with the dying ones; 0 where there is no v1 memory controller.
fn memory_cgroups() -> u64 {
    let text = fs::read_to_string("/proc/cgroups").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("memory\t"));
    let number = line.and_then(|line| line.split('\t').nth(2)?.parse().ok());
    number.unwrap_or(0)
}

fn spec(directory: &Path, cgroup: &str, number: usize, plan: &Plan) -> LaunchSpec {
    let name = format!("c{number}.1");
    LaunchSpec {
        terminal: None,
        log_bytes: None,
        ptys: if plan.has("ptys") { 16 } else { 0 },
        ptys_when_asked: false,
        sys: plan.has("sys"),
        init: plan.has("init"),
        cgroup: format!("{cgroup}/{name}"),
        limits: CgroupLimits {
            memory_bytes: plan.has("memory").then_some(64 << 20),
            pids: plan.has("pids").then_some(64),
            cpu_millis: plan.has("cpu").then_some(500),
            ..CgroupLimits::default()
        },
        root: RootSpec {
            kind: RootKind::Overlay,
            store: directory.join("store"),
            layers: vec![PathBuf::from("base")],
            scratch: directory.join("scratch").join(&name),
            read_only: false,
            durable: false,
            shared_ids: false,
        },
        hostname: "measured".to_owned(),
        program: ProgramSpec {
            argv: ["httpd", "-f", "-p", "8080", "-h", "/www"]
                .map(str::to_owned)
                .to_vec(),
            env: vec![("PATH".to_owned(), "/bin".to_owned())],
            workdir: "/".to_owned(),
            uid: 0,
            gid: 0,
            groups: Vec::new(),
            nofile: None,
        },
        log: directory.join("logs").join(&name),
        log_stderr: None,
        files: Vec::new(),
        binds: Vec::new(),
        network: NetworkSpec::Loopback,
        hardening: Hardening {
            seccomp: plan.has("seccomp"),
            masked_proc: plan.has("masks"),
            ..Hardening::default()
        },
        ahead: Ahead::No,
        name,
    }
}

fn make_root(root: &Path) -> Result<(), Failure> {
    for name in ["bin", "tmp", "www", "proc", "dev/shm"] {
        fs::create_dir_all(root.join(name))?;
    }
    let copied = fs::copy(BUSYBOX, root.join("bin/busybox"));
    copied.map_err(|error| format!("cannot copy {BUSYBOX} (package busybox-static): {error}"))?;
    symlink("busybox", root.join("bin/httpd"))?;
    Ok(())
}

fn connect(socket: &Path) -> Result<Client, Failure> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match Client::connect(socket, PATIENCE) {
            Ok(client) => return Ok(client),
            Err(error) if Instant::now() >= deadline => return Err(error.into()),
            Err(_) => pause(),
        }
    }
}

/// Whatever happened before, nothing stays.
fn end(shim: &mut Child, cgroup: &str) {
    let Ok(cgroups) = Cgroups::detect() else {
        return;
    };
    let deadline = Instant::now() + PATIENCE;
    loop {
        for pid in cgroups.pids_below(cgroup) {
            if let Ok(process) = PidFd::open(pid)
                && cgroups.contains(cgroup, pid)
            {
                let _ = process.kill();
            }
        }
        let left = cgroups.remove_tree(cgroup);
        if left.is_empty() || Instant::now() >= deadline {
            for error in left {
                println!("left: {error}");
            }
            break;
        }
        pause();
    }
    let _ = shim.kill();
    let _ = shim.wait();
}

#[expect(clippy::disallowed_methods, reason = "no async runtime is near")]
fn pause() {
    std::thread::sleep(Duration::from_millis(10));
}
