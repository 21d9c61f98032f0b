//! `conman notice test`: probes the sources of preemption notices, without the daemon.

use std::process::ExitCode;

use conman_cli::{NoticeArgs, NoticeCommand};
use conman_node::NoticeSourceOptions;
use futures_util::future::join_all;
use serde::Serialize;

use crate::config;

/// What a source answered.
#[derive(Debug, Serialize)]
struct ProbeResult {
    source: &'static str,
    /// Where it is.
    setting: String,
    /// Whether the daemon watches it.
    on: bool,
    answers: bool,
    message: String,
}

pub(crate) fn run(arguments: &NoticeArgs, json: bool) -> ExitCode {
    let NoticeCommand::Test { config } = &arguments.command;
    let config = match config::load(config.as_deref()) {
        Ok(config) => config,
        Err(error) => return crate::fail(&format!("{:#}", anyhow::Error::new(error))),
    };
    crate::on_runtime(async move {
        let results = join_all(config.preempt.notice_sources.into_iter().map(probe)).await;
        let silent = results.iter().any(|one| one.on && !one.answers);
        if json {
            crate::tell(&serde_json::json!(results).to_string());
        } else {
            crate::tell(&text(&results));
        }
        match silent {
            true => ExitCode::FAILURE,
            false => ExitCode::SUCCESS,
        }
    })
}

async fn probe(source: NoticeSourceOptions) -> ProbeResult {
    let answer = source.probe().await;
    let answers = answer.is_ok();
    ProbeResult {
        source: source.kind.name,
        setting: source.setting.join(" "),
        on: source.is_on,
        answers,
        message: answer.unwrap_or_else(|error| error),
    }
}

fn text(results: &[ProbeResult]) -> String {
    let line = |one: &ProbeResult| {
        let on = if one.on { "on" } else { "off" };
        let answers = if one.answers { "answers" } else { "silent" };
        format!(
            "{:<8} {on:<4} {answers:<8} {}: {}",
            one.source, one.setting, one.message
        )
    };
    let mut lines: Vec<String> = results.iter().map(line).collect();
    let useful = results.iter().filter(|one| one.answers && !one.on);
    lines.extend(
        useful.map(|one| format!("switch it on with `{} = true` in `[preempt]`", one.source)),
    );
    if results.iter().any(|one| one.on && !one.answers) {
        lines.push(
            "a source that is on and silent gives no notice: mend it, or switch it off in `[preempt]`".to_owned(),
        );
    }
    lines.join("\n")
}
