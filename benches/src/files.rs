//! Files into and out of sessions, against `docker cp` and `tar` through `docker exec`.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use conman_observer::resident_bytes;
use conman_proto::RuntimeKind;
use serde_json::json;
use tokio::process::Command;

use crate::arguments::Copying;
use crate::daemon::Daemon;
use crate::docker::{Docker, image_name};
use crate::image;
use crate::interruption::{early_end, until_interrupted};
use crate::report::{Bar, Chart, Report, Table, figure, shown};
use crate::statistics::median;

const IMAGE: &str = "conman-bench/root:1";
const SESSION: &str = "files";

/// Of each small file.
const SMALL_BYTES: usize = 1_000;
/// Small files in one directory.
const A_DIRECTORY: usize = 100;

/// Interval at which the daemon's memory is read.
const POLL: Duration = Duration::from_millis(20);

/// Fractions of the rival's speed that are promised.
const BIG_BOUND: f64 = 0.7;
const SMALL_BOUND: f64 = 0.5;

/// One kind of copy, by both ways in alternation.
struct Compared {
    name: &'static str,
    bound: f64,
    ours_s: Vec<f64>,
    theirs_s: Vec<f64>,
}

impl Compared {
    const fn new(name: &'static str, bound: f64) -> Self {
        Self {
            name,
            bound,
            ours_s: Vec::new(),
            theirs_s: Vec::new(),
        }
    }
}

struct Measured {
    compared: [Compared; 4],
    /// The daemon's memory before, and its maximum.
    before: u64,
    peak: u64,
}

impl Measured {
    const fn new() -> Self {
        Self {
            compared: [
                Compared::new("big file in", BIG_BOUND),
                Compared::new("big file out", BIG_BOUND),
                Compared::new("small files in", SMALL_BOUND),
                Compared::new("small files out", SMALL_BOUND),
            ],
            before: 0,
            peak: 0,
        }
    }

    /// Rounds in which everything was copied both ways.
    fn rounds(&self) -> usize {
        let [.., last] = &self.compared;
        last.theirs_s.len()
    }
}

/// Copies a big file and a tree of small ones both ways.
///
/// # Errors
/// When Docker or busybox is missing, or a copy fails.
pub(crate) async fn files(conman: &Path, options: &Copying) -> Result<Report> {
    let scratch = tempfile::tempdir().context("making a temporary folder")?;
    let archive = image::archive(&image::root(scratch.path())?)?;
    let docker = Docker::with_image(&archive).await?;
    let template =
        format!("[templates.idle]\nimage = \"{IMAGE}\"\ncommand = [\"sleep\", \"1000000\"]\n");
    let daemon = Daemon::with_templates(conman, RuntimeKind::Native, 8, &template).await?;
    let mut measured = Measured::new();
    let ended = until_interrupted(async {
        daemon.import(&archive, IMAGE).await?;
        daemon.open_one(SESSION.to_owned(), "idle").await?;
        let label = daemon.label();
        let ids = docker
            .run_plain(
                &label,
                (daemon.cgroup().as_str(), &["--init"][..]),
                1,
                |_| {},
            )
            .await?;
        let copies = Copies {
            conman: conman.to_owned(),
            socket: daemon.socket(),
            container: ids.first().context("no container was started")?.clone(),
            scratch: scratch.path().to_owned(),
        };
        copies.measure(options, daemon.pid()?, &mut measured).await
    })
    .await;
    let removed = async { docker.remove(&docker.ids(&daemon.label()).await?).await };
    let removed = removed.await;
    let stopped = daemon.stop_all().await;
    let early = early_end(ended, measured.rounds())?;
    removed.and(stopped)?;
    Ok(report(options, &measured).ended_early(early))
}

/// Where to copy.
struct Copies {
    conman: PathBuf,
    socket: PathBuf,
    container: String,
    scratch: PathBuf,
}

impl Copies {
    async fn measure(&self, options: &Copying, daemon: i32, measured: &mut Measured) -> Result<()> {
        let big = self.scratch.join("big");
        let made = io::copy(
            &mut File::open("/dev/urandom")?.take((options.mebibytes as u64) << 20),
            &mut File::create(&big)?,
        );
        made.context("making the big file")?;
        let small = self.scratch.join("small");
        make_tree(&small, options.files)?;
        measured.before = resident_bytes(daemon).context("reading conman's memory")?;
        measured.peak = measured.before;
        for round in 0..options.rounds {
            let inside = format!("/tmp/{round}");
            let outside = |name: &str| self.scratch.join(format!("{name}-{round}"));
            let (ours, theirs) = (outside("ours"), outside("theirs"));
            let peak = &mut measured.peak;
            let [big_in, big_out, small_in, small_out] = &mut measured.compared;
            let session = |path: &str| format!("{SESSION}:{path}");
            let (big_inside, tree_inside) = (format!("{inside}.big"), format!("{inside}.tree"));
            for (copies, from, to) in [
                (&mut big_in.ours_s, text(&big), session(&big_inside)),
                (&mut big_out.ours_s, session(&big_inside), text(&ours)),
            ] {
                copies.push(timed(self.ours(&from, &to), daemon, peak).await?);
            }
            fs::remove_file(&ours).context("removing a copy")?;
            for (copies, from, to) in [
                (&mut small_in.ours_s, text(&small), session(&tree_inside)),
                (&mut small_out.ours_s, session(&tree_inside), text(&ours)),
            ] {
                copies.push(timed(self.ours(&from, &to), daemon, peak).await?);
            }
            let id = &self.container;
            let (big, small, theirs) = (text(&big), text(&small), text(&theirs));
            let run = format!("docker exec -i {id} busybox");
            let unpack = format!("mkdir {tree_inside}; cd {tree_inside}; exec busybox tar -x");
            for (copies, script) in [
                (
                    &mut big_in.theirs_s,
                    format!("docker cp {big} {id}:{big_inside}"),
                ),
                (
                    &mut big_out.theirs_s,
                    format!("docker cp {id}:{big_inside} {theirs}"),
                ),
                (
                    &mut small_in.theirs_s,
                    format!("rm {theirs}; tar -C {small} -c . | {run} sh -c '{unpack}'"),
                ),
                (
                    &mut small_out.theirs_s,
                    format!("mkdir {theirs}; {run} tar -C {tree_inside} -c . | tar -C {theirs} -x"),
                ),
            ] {
                let mut command = Command::new("sh");
                command.args(["-ec", &script]);
                copies.push(timed(command, daemon, &mut 0).await?);
            }
            for copy in [ours, PathBuf::from(theirs)] {
                ensure!(
                    copy.join("0/0").is_file(),
                    "{} is incomplete",
                    copy.display()
                );
                fs::remove_dir_all(&copy).context("removing a copy")?;
            }
        }
        Ok(())
    }

    fn ours(&self, from: &str, to: &str) -> Command {
        let mut command = Command::new(&self.conman);
        command
            .arg("--socket")
            .arg(&self.socket)
            .args(["cp", from, to]);
        command
    }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

fn make_tree(root: &Path, files: usize) -> Result<()> {
    for number in 0..files {
        let directory = root.join((number / A_DIRECTORY).to_string());
        if number % A_DIRECTORY == 0 {
            fs::create_dir_all(&directory).context("making the small files")?;
        }
        let file = directory.join((number % A_DIRECTORY).to_string());
        fs::write(file, vec![b'x'; SMALL_BYTES]).context("making the small files")?;
    }
    Ok(())
}

/// Seconds that a command takes; raises `peak` to the daemon's memory. The disk has nothing to write at its
/// begin, so that no copy waits for what the one before it wrote.
async fn timed(mut command: Command, daemon: i32, peak: &mut u64) -> Result<f64> {
    tokio::task::spawn_blocking(rustix::fs::sync)
        .await
        .context("writing to the disk what is waiting")?;
    let begun = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .with_context(|| format!("starting {command:?}"))?;
    let status = loop {
        // Waited for again after a measurement.
        if let Ok(status) = tokio::time::timeout(POLL, child.wait()).await {
            break status.context("waiting for a copy")?;
        }
        *peak = (*peak).max(resident_bytes(daemon).unwrap_or(0));
    };
    ensure!(status.success(), "{command:?} failed: {status}");
    Ok(begun.elapsed().as_secs_f64())
}

fn report(options: &Copying, measured: &Measured) -> Report {
    let mut table = Table::new(["copy", "conman cp", "Docker", "speed", "bound"]);
    let (mut rows, mut bars, mut missed) = (Vec::new(), Vec::new(), Vec::new());
    for one in &measured.compared {
        let (Some(ours), Some(theirs)) = (median(&one.ours_s), median(&one.theirs_s)) else {
            continue;
        };
        let speed = theirs / ours;
        let rounds = one.ours_s.iter().zip(&one.theirs_s);
        let speeds: Vec<f64> = rounds.map(|(ours, theirs)| theirs / ours).collect();
        table.row([
            one.name.to_owned(),
            figure(&one.ours_s, "s"),
            figure(&one.theirs_s, "s"),
            format!("{} ×", shown(speed)),
            format!("{} ×", shown(one.bound)),
        ]);
        rows.push(json!({ "copy": one.name, "ours_s": one.ours_s, "docker_s": one.theirs_s }));
        bars.push(Bar::of(format!("conman, {}", one.name), &speeds));
        if speed < one.bound {
            missed.push(one.name);
        }
    }
    let mib = |bytes: u64| bytes >> 20;
    Report {
        title: "Files into sessions and out of them".to_owned(),
        parts: vec![
            format!(
                "{} MiB, {} small files, {} rounds; the daemon's memory: {} MiB before, {} MiB at most",
                options.mebibytes,
                options.files,
                options.rounds,
                mib(measured.before),
                mib(measured.peak)
            )
            .into(),
            Chart::bars("speed relative to Docker, round by round", "×", bars).into(),
            table.into(),
        ],
        json: json!({
            "benchmark": "files", "image": image_name(), "copies": rows,
            "resident_bytes_before": measured.before, "resident_bytes_peak": measured.peak,
        }),
        missed: (!missed.is_empty()).then(|| format!("too slow: {}", missed.join(", "))),
    }
}
