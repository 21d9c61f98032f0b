//! Progress of long steps: a spinner with the latest line on a terminal; elsewhere a line at the begin, at
//! the end and every ten seconds between, printed by a thread that ends with the step.

use std::io::{BufRead, BufReader, IsTerminal};
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};

/// Interval of the spinner.
const TICK: Duration = Duration::from_millis(120);
/// Interval of lines without a terminal.
const HEARTBEAT: Duration = Duration::from_secs(10);
/// Lines of output shown when a step fails.
const LINES_ON_FAILURE: usize = 40;

/// A step that takes a while.
pub(crate) struct Step {
    name: String,
    started: Instant,
    bar: Option<ProgressBar>,
    /// The command's latest line.
    latest: Arc<Mutex<String>>,
    /// Ends the thread when it is dropped.
    _heartbeat: Option<SyncSender<()>>,
}

impl Step {
    pub(crate) fn start(name: impl Into<String>) -> Self {
        let name = name.into();
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new_spinner();
            if let Ok(style) =
                ProgressStyle::with_template("{spinner} {prefix} {elapsed} {msg:.dim}")
            {
                bar.set_style(style);
            }
            bar.set_prefix(name.clone());
            bar.enable_steady_tick(TICK);
            bar
        });
        let latest = Arc::default();
        let heartbeat = bar.is_none().then(|| {
            eprintln!("  … {name}");
            heartbeat(name.clone(), Arc::clone(&latest))
        });
        Self {
            name,
            started: Instant::now(),
            bar,
            latest,
            _heartbeat: heartbeat,
        }
    }

    pub(crate) fn note(&self, line: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(line.chars().take(60).collect::<String>());
        }
        line.trim()
            .clone_into(&mut self.latest.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub(crate) fn done(self) {
        let took = self.started.elapsed().as_secs_f64();
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        eprintln!("  ✓ {} ({took:.1} s)", self.name);
    }

    /// Runs a command to its end with its latest line as the note; its output is shown only if it
    /// fails.
    pub(crate) fn run(&self, command: &mut Command) -> Result<()> {
        let shown = shown(command);
        let (reader, writer) = std::io::pipe().context("making a pipe")?;
        command
            .stdin(Stdio::null())
            .stdout(writer.try_clone().context("sharing a pipe")?)
            .stderr(writer);
        let mut child = command
            .spawn()
            .with_context(|| format!("starting `{shown}`; is it installed?"))?;
        // Our copies of the command's pipe ends must be closed here, or reading never ends.
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let mut last = std::collections::VecDeque::with_capacity(LINES_ON_FAILURE);
        for line in BufReader::new(reader).split(b'\n') {
            let line = String::from_utf8_lossy(&line.context("reading a command's output")?)
                .trim_end()
                .to_owned();
            self.note(&line);
            if last.len() == LINES_ON_FAILURE {
                last.pop_front();
            }
            last.push_back(line);
        }
        let status = child
            .wait()
            .with_context(|| format!("waiting for `{shown}`"))?;
        if !status.success() {
            for line in last {
                eprintln!("    {line}");
            }
            bail!("`{shown}` failed ({status}) while: {}", self.name);
        }
        Ok(())
    }
}

/// Prints a step's latest line from time to time, until the sender is dropped.
fn heartbeat(name: String, latest: Arc<Mutex<String>>) -> SyncSender<()> {
    let (sender, receiver) = sync_channel(0);
    std::thread::spawn(move || {
        let started = Instant::now();
        while receiver.recv_timeout(HEARTBEAT) == Err(RecvTimeoutError::Timeout) {
            let latest = latest
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clone();
            eprintln!("  … {name} ({} s) {latest}", started.elapsed().as_secs());
        }
    });
    sender
}

/// A command as a user would type it.
pub(crate) fn shown(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.to_string_lossy().into_owned())
        .collect::<Vec<_>>()
        .join(" ")
}
