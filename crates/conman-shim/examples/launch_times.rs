//! How long starts take, by phase, at the beginning and with many alive:
//! `cargo run -p conman-shim --example launch_times -- N`.
//!
//! Starts N containers of busybox one after the other, prints the median of each phase over the
//! first and the last hundred and the least of all, kills all, and leaves nothing behind. The shim is this same program
//! once more.
#![expect(clippy::print_stdout, reason = "a program for people")]

use std::error::Error;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use conman_linux::{CgroupLimits, Cgroups, PidFd, resident_bytes};
use conman_shim::{
    Client, Hardening, LaunchSpec, Phases, ProgramSpec, Request, RootSpec, ShimOptions, run,
};

const BUSYBOX: &str = "/usr/bin/busybox";

/// Bound on every call and on every death.
const PATIENCE: Duration = Duration::from_secs(60);

/// Starts that one median is taken over.
const WINDOW: usize = 100;

type Failure = Box<dyn Error>;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["shim", directory, cgroup] => Ok(run(ShimOptions {
            socket: Path::new(directory).join("shim.sock"),
            roots: vec![PathBuf::from(directory)],
            state_file: Path::new(directory).join("shim.state"),
            layers_by_path: false,
            fence_cgroup: cgroup.to_owned(),
            freeze_patience: Duration::from_secs(1),
        })?),
        [] => measure(200),
        [count] => measure(count.parse()?),
        _ => Err("usage: launch_times [N]".into()),
    }
}

fn measure(count: usize) -> Result<(), Failure> {
    let directory = tempfile::tempdir()?;
    make_root(&directory.path().join("store/base"))?;
    for name in ["scratch", "logs"] {
        fs::create_dir(directory.path().join(name))?;
    }
    let cgroup = format!("/conman-launch-times-{}", std::process::id());
    let mut shim = Command::new(std::env::current_exe()?)
        .args(["shim", &directory.path().to_string_lossy(), &cgroup])
        .spawn()?;
    let outcome = measure_with(directory.path(), &cgroup, count, &shim);
    end(&mut shim, &cgroup);
    outcome
}

fn measure_with(directory: &Path, cgroup: &str, count: usize, shim: &Child) -> Result<(), Failure> {
    let mut client = connect(&directory.join("shim.sock"))?;
    let before = available_bytes()?;
    let mut times = Vec::with_capacity(count);
    let mut held = Vec::with_capacity(count);
    let begin = Instant::now();
    for number in 0..count {
        let asked = Instant::now();
        let launched = client.launch(spec(directory, cgroup, number))?;
        times.push((launched.phases, asked.elapsed()));
        held.push(launched.process.ok_or("a container ended at once")?);
    }
    let seconds = begin.elapsed().as_secs_f64();
    println!(
        "{count} started in {seconds:.2} s, {:.0} a second",
        count as f64 / seconds
    );
    let window = WINDOW.min(count);
    print_row("", &HEADINGS.map(str::to_owned));
    print_window("first", &times[..window], middle);
    print_window("last", &times[count - window..], middle);
    // What a busy machine adds to the others.
    print_window("least", &times, |values| values.first().copied());
    let used = before.saturating_sub(available_bytes()?);
    println!(
        "memory a container: {} KiB",
        used / 1_024 / count.max(1) as u64
    );
    let shim_bytes = resident_bytes(i32::try_from(shim.id())?)?;
    println!("memory of the shim: {} KiB", shim_bytes / 1_024);

    let begin = Instant::now();
    client.ask(Request::KillAll)?;
    for process in &held {
        if !process.wait_dead(PATIENCE)? {
            return Err(format!("process {} does not die", process.pid()).into());
        }
    }
    println!(
        "all dead after {:.0} ms",
        begin.elapsed().as_secs_f64() * 1_000.0
    );
    Ok(())
}

const HEADINGS: [&str; 9] = [
    "cgroup", "files", "clone", "root", "setup", "(mounts)", "(harden)", "total", "call",
];

fn middle(sorted: &[u64]) -> Option<u64> {
    sorted.get(sorted.len() / 2).copied()
}

fn print_window(name: &str, times: &[(Phases, Duration)], choose: impl Fn(&[u64]) -> Option<u64>) {
    let column = |pick: &dyn Fn(&(Phases, Duration)) -> u64| {
        let mut values: Vec<u64> = times.iter().map(pick).collect();
        values.sort_unstable();
        choose(&values).unwrap_or(0).to_string()
    };
    let row = [
        column(&|(phases, _)| phases.cgroup_us),
        column(&|(phases, _)| phases.files_us),
        column(&|(phases, _)| phases.clone_us),
        column(&|(phases, _)| phases.root_us),
        column(&|(phases, _)| phases.setup_us),
        column(&|(phases, _)| phases.mounts_us),
        column(&|(phases, _)| phases.harden_us),
        column(&|(phases, _)| phases.total_us),
        column(&|(_, call)| u64::try_from(call.as_micros()).unwrap_or(u64::MAX)),
    ];
    print_row(name, &row);
}

/// Medians in microseconds.
fn print_row(name: &str, columns: &[String]) {
    let columns: String = columns.iter().map(|text| format!("{text:>10}")).collect();
    println!("{name:>6}{columns}");
}

fn spec(directory: &Path, cgroup: &str, number: usize) -> LaunchSpec {
    let name = format!("c{number}.1");
    LaunchSpec {
        cgroup: format!("{cgroup}/{name}"),
        limits: CgroupLimits {
            memory_bytes: Some(64 << 20),
            pids: Some(64),
            cpu_millis: None,
        },
        root: RootSpec {
            store: directory.join("store"),
            layers: vec![PathBuf::from("base")],
            scratch: directory.join("scratch").join(&name),
            read_only: false,
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
        files: Vec::new(),
        binds: Vec::new(),
        hardening: Hardening::default(),
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

/// What the whole machine has left; other programs' changes are in it.
fn available_bytes() -> Result<u64, Failure> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find(|line| line.starts_with("MemAvailable:"));
    let kibibytes = line.and_then(|line| line.split_ascii_whitespace().nth(1));
    Ok(kibibytes.ok_or("no MemAvailable")?.parse::<u64>()? * 1_024)
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
