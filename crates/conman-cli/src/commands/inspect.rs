//! `conman inspect`: everything about a session.

use std::fmt::Write as _;

use conman_proto::{OnNodeLoss, ResolvedSpec, Session};
use http::Method;
use jiff::Timestamp;

use super::Context;
use crate::args::InspectArgs;
use crate::client::PROMPT;
use crate::failure::{Exit, Failure};
use crate::human::{ago, bytes, clock, duration, milliseconds, printable};
use crate::phases;

pub(super) async fn run(context: &Context, args: &InspectArgs) -> Result<Exit, Failure> {
    let path = format!("/v1/sessions/{}", args.id);
    let answer = context
        .client
        .answer::<Session>(Method::GET, &path, None::<&()>, PROMPT)
        .await?;
    if context.output.json {
        context.output.value(&answer.raw)?;
    } else {
        context
            .output
            .line(describe(&answer.value, Timestamp::now()).trim_end())?;
    }
    Ok(Exit::Done)
}

/// Lines of `key  value`.
struct Lines(String);

impl Lines {
    fn add(&mut self, key: &str, value: impl AsRef<str>) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "{key:<14}{}", printable(value.as_ref()));
    }

    fn add_some(&mut self, key: &str, value: Option<impl AsRef<str>>) {
        if let Some(value) = value {
            self.add(key, value);
        }
    }
}

fn describe(session: &Session, now: Timestamp) -> String {
    let mut lines = Lines(String::new());
    let time = |at: Timestamp| format!("{} ({})", clock(at), ago(now, at));
    lines.add("name", session.id.as_str());
    lines.add("state", session.state.as_str());
    lines.add_some("reason", session.reason.as_ref());
    lines.add_some("exit code", session.exit_code.map(|code| code.to_string()));
    lines.add(
        "url",
        session.url.as_deref().unwrap_or("none: it has no port"),
    );
    lines.add("node", &session.node);
    lines.add("generation", session.generation.to_string());
    lines.add_some("pid", session.pid.map(|pid| pid.to_string()));
    lines.add("connections", session.connections.to_string());
    lines.add("asked for", time(session.created_at));
    lines.add_some("running since", session.started_at.map(time));
    lines.add_some("ended", session.ended_at.map(time));
    describe_spec(&mut lines, &session.spec);
    describe_phases(&mut lines, session);
    lines.0
}

fn describe_spec(lines: &mut Lines, spec: &ResolvedSpec) {
    let words = |words: &[String]| {
        words
            .iter()
            .map(|word| format!("{word:?}"))
            .collect::<Vec<_>>()
            .join(" ")
    };
    let seconds = |seconds: u32| match seconds {
        0 => "never".to_owned(),
        _ => format!(
            "after {}",
            duration(std::time::Duration::from_secs(seconds.into()))
        ),
    };
    lines.add_some("template", spec.template.as_ref());
    lines.add("runtime", spec.runtime.to_string());
    lines.add("image", &spec.image);
    lines.add_some(
        "command",
        (!spec.command.is_empty()).then(|| words(&spec.command)),
    );
    lines.add_some(
        "arguments",
        (!spec.args.is_empty()).then(|| words(&spec.args)),
    );
    lines.add_some("terminal", spec.tty.then_some("kept; `conman attach`"));
    lines.add("network", spec.network.to_string());
    lines.add_some("port", spec.port.map(|port| port.to_string()));
    lines.add_some("ready path", spec.ready_path.as_ref());
    lines.add(
        "memory",
        spec.memory_bytes
            .map_or_else(|| "no limit".to_owned(), bytes),
    );
    lines.add_some("disk", spec.disk_bytes.map(bytes));
    lines.add_some(
        "files",
        spec.disk_inodes.map(|inodes| format!("at most {inodes}")),
    );
    lines.add(
        "cpus",
        spec.cpus
            .map_or_else(|| "no limit".to_owned(), |cpus| cpus.to_string()),
    );
    lines.add("processes", format!("at most {}", spec.pids));
    lines.add("stops idle", seconds(spec.idle_timeout_s));
    lines.add(
        "stops anyway",
        spec.expires_at.map_or_else(
            || seconds(spec.max_lifetime_s),
            |at| format!("at {}", clock(at)),
        ),
    );
    lines.add_some(
        "on preemption",
        spec.preempt_signal.as_ref().map(|signal| {
            format!(
                "{signal}, then SIGKILL after {}",
                milliseconds(spec.preempt_grace_ms.into())
            )
        }),
    );
    lines.add_some(
        "on node loss",
        (spec.on_node_loss == OnNodeLoss::Restart).then_some("restarts on another node"),
    );
    lines.add_some(
        "restarted",
        spec.restarted.as_ref().map(|restarted| {
            format!(
                "from {}, which was {}",
                printable(&restarted.from),
                restarted.because
            )
        }),
    );
    for (name, value) in &spec.env {
        lines.add("environment", format!("{name}={value}"));
    }
    for (name, value) in &spec.labels {
        lines.add("label", format!("{name}={value}"));
    }
    for bind in &spec.binds {
        lines.add("bind", bind);
    }
}

fn describe_phases(lines: &mut Lines, session: &Session) {
    if session.phases_ms.is_empty() {
        return;
    }
    lines.add(
        "last start",
        milliseconds(phases::total_ms(&session.phases_ms)),
    );
    let mut phases: Vec<_> = session.phases_ms.iter().collect();
    phases.sort_by_key(|(name, _)| phases::order(name));
    for (name, ms) in phases {
        lines.add(
            "",
            format!(
                "{name:<13}{:>9}  {}",
                milliseconds(*ms),
                phases::in_words(name)
            ),
        );
    }
}
