//! Writes the emergency thread's log lines on another thread: standard output may be a pipe without a
//! reader.
//!
//! [`Log`] ──lines, bounded, dropped when full──> the thread, which ends with the last [`Log`].

use std::io;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;

use conman_proto::PreemptReport;

/// Lines that wait to be written; there are a handful a day.
const LINES: usize = 64;

#[derive(Debug, Clone)]
pub(super) struct Log {
    lines: SyncSender<Line>,
}

#[derive(Debug)]
enum Line {
    Info(String),
    Warn(String),
    Report(Box<PreemptReport>),
}

impl Log {
    pub(super) fn start() -> io::Result<Self> {
        let (lines, queue) = sync_channel(LINES);
        thread::Builder::new()
            .name("conman-emergency-log".to_owned())
            .spawn(move || {
                while let Ok(line) = queue.recv() {
                    match line {
                        Line::Info(text) => tracing::info!("{text}"),
                        Line::Warn(text) => tracing::warn!("{text}"),
                        Line::Report(report) => measure(&report),
                    }
                }
            })?;
        Ok(Self { lines })
    }

    pub(super) fn info(&self, text: String) {
        self.say(Line::Info(text));
    }

    pub(super) fn warn(&self, text: String) {
        self.say(Line::Warn(text));
    }

    pub(super) fn report(&self, report: PreemptReport) {
        self.say(Line::Report(Box::new(report)));
    }

    fn say(&self, line: Line) {
        // A line is dropped when the queue is full: the emergency thread must not wait.
        let _ = self.lines.try_send(line);
    }
}

/// Metrics and the log line of a finished preemption.
fn measure(report: &PreemptReport) {
    metrics::counter!("conman_preemptions_total").increment(1);
    metrics::gauge!("conman_preempt_unreleased_sessions").set(report.unreleased.len() as f64);
    if let Some(ms) = report.last_release_ms {
        metrics::histogram!("conman_preempt_last_release_seconds").record(ms / 1_000.0);
    }
    tracing::warn!(
        source = report.source,
        sessions = report.sessions,
        killed = report.killed,
        certified = report.certified,
        released = report.released,
        unreleased = report.unreleased.len(),
        last_kill_ms = report.last_kill_ms,
        last_certificate_ms = report.last_certificate_ms,
        last_release_ms = report.last_release_ms,
        "preempted"
    );
}
