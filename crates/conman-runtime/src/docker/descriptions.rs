//! Parses dockerd's descriptions of itself and of its containers.

use std::path::PathBuf;

use bollard::Docker;
use bollard::models::{
    ContainerInspectResponse, ContainerSummary, ContainerSummaryStateEnum, SystemInfo,
};
use bollard::query_parameters::LogsOptionsBuilder;
use conman_core::naming::{LABEL_GENERATION, LABEL_SESSION};
use conman_proto::Generation;
use futures_util::stream::StreamExt;

use super::container_body::{LABEL_FILES, LABEL_TTY};
use super::failure::quote;
use crate::{ContainerKey, FoundContainer, RuntimeError};

/// An error quotes at most this many lines of a failed container's log.
const QUOTED_LINES: &str = "5";
const QUOTED_BYTES: usize = 2_000;

/// How a message of docker-init, the container's first process, begins when it cannot execute the
/// program.
const INIT_CANNOT_EXECUTE: &str = "[FATAL tini (";

/// A container in dockerd's list.
#[derive(Debug, Clone)]
pub(super) struct Listed {
    pub(super) key: ContainerKey,
    pub(super) container_id: String,
    pub(super) files_dir: Option<PathBuf>,
    pub(super) exit_code: Option<i32>,
    /// As far as dockerd has noticed.
    pub(super) is_believed_running: bool,
    /// Its program has a terminal.
    pub(super) tty: bool,
}

impl Listed {
    /// `None` for a container with the instance's label but without the others: conman did not
    /// make it.
    pub(super) fn of(container: ContainerSummary) -> Option<Self> {
        let labels = container.labels.unwrap_or_default();
        let key = ContainerKey::new(
            labels.get(LABEL_SESSION)?.parse().ok()?,
            Generation::new(labels.get(LABEL_GENERATION)?.parse().ok()?)?,
        );
        let exit_code = match container.state {
            Some(ContainerSummaryStateEnum::EXITED | ContainerSummaryStateEnum::DEAD) => {
                container.status.as_deref().and_then(exit_code_in_words)
            }
            _ => None,
        };
        let is_believed_running = matches!(
            container.state,
            Some(
                ContainerSummaryStateEnum::RUNNING
                    | ContainerSummaryStateEnum::PAUSED
                    | ContainerSummaryStateEnum::RESTARTING
            )
        );
        Some(Self {
            key,
            container_id: container.id?,
            files_dir: labels.get(LABEL_FILES).map(PathBuf::from),
            exit_code,
            is_believed_running,
            tty: labels.contains_key(LABEL_TTY),
        })
    }

    pub(super) fn found(self, pid: Option<i32>) -> FoundContainer {
        FoundContainer {
            key: self.key,
            container_id: self.container_id,
            pid,
            exit_code: self.exit_code,
        }
    }
}

/// The list has the exit code only as text: `Exited (137) 2 seconds ago`.
fn exit_code_in_words(status: &str) -> Option<i32> {
    let (_, rest) = status.split_once('(')?;
    rest.split_once(')')?.0.parse().ok()
}

pub(super) fn running_pid(container: &ContainerInspectResponse) -> Option<i32> {
    let state = container
        .state
        .as_ref()
        .filter(|state| state.running == Some(true))?;
    state
        .pid
        .and_then(|pid| i32::try_from(pid).ok())
        .filter(|pid| *pid > 0)
}

/// Why a started container does not run: the last output of its first process or its program.
pub(super) async fn ended_at_once(
    client: &Docker,
    key: &ContainerKey,
    container: ContainerInspectResponse,
) -> RuntimeError {
    let log = last_lines(client, container.id.as_deref().unwrap_or_default()).await;
    let state = container.state.unwrap_or_default();
    let exit_code = state.exit_code.and_then(|code| i32::try_from(code).ok());
    let subject = key.to_string();
    if let Some(exit_code @ (126 | 127)) = exit_code
        && let Some((_, words)) = log.split_once(INIT_CANNOT_EXECUTE)
    {
        let reason = words
            .split_once(" failed: ")
            .map_or(words, |(_, reason)| reason);
        let command = container.path.unwrap_or_default();
        let reason = quote(reason);
        return RuntimeError::NoSuchCommand {
            command,
            subject,
            reason,
            exit_code,
        };
    }
    let mut reason = match exit_code {
        Some(exit_code) => format!("ended at once with exit code {exit_code}"),
        None => "ended at once".to_owned(),
    };
    let complaint = state.error.filter(|complaint| !complaint.is_empty());
    for words in complaint
        .into_iter()
        .chain((!log.trim().is_empty()).then_some(log))
    {
        reason.push_str(": ");
        reason.push_str(&quote(&words));
    }
    RuntimeError::EndedAtOnce { subject, reason }
}

/// The last lines of a container's log, as far as it can be read.
async fn last_lines(client: &Docker, container_id: &str) -> String {
    let query = LogsOptionsBuilder::default()
        .stdout(true)
        .stderr(true)
        .tail(QUOTED_LINES)
        .build();
    let mut stream = client.logs(container_id, Some(query));
    let mut lines = Vec::new();
    while let Some(Ok(output)) = stream.next().await {
        lines.extend_from_slice(&output.into_bytes());
        if lines.len() > QUOTED_BYTES {
            break;
        }
    }
    String::from_utf8_lossy(&lines).into_owned()
}

/// Settings of this daemon that make sessions less safe.
pub(super) fn warnings(info: &SystemInfo) -> Vec<String> {
    let mut warnings = Vec::new();
    if info.live_restore_enabled != Some(true) {
        warnings.push(
            "a restart of Docker would stop every session: put \"live-restore\": true into \
             /etc/docker/daemon.json and run `systemctl reload docker`"
                .to_owned(),
        );
    }
    for (has, what) in [
        (info.memory_limit, "memory"),
        (info.cpu_cfs_quota, "cpus"),
        (info.pids_limit, "pids"),
    ] {
        if has == Some(false) {
            warnings.push(format!(
                "Docker cannot enforce the limit `{what}` on this host: enable the kernel's cgroup \
                 controller for it"
            ));
        }
    }
    if info.memory_limit == Some(true) && info.swap_limit == Some(false) {
        warnings.push(
            "sessions may swap beyond their limit `memory_bytes`: boot with swapaccount=1, or \
             without swap"
                .to_owned(),
        );
    }
    warnings
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn summary(labels: &[(&str, &str)], status: &str) -> ContainerSummary {
        let labels = labels
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        ContainerSummary {
            id: Some("abc".to_owned()),
            labels: Some(labels.collect::<HashMap<_, _>>()),
            state: Some(ContainerSummaryStateEnum::EXITED),
            status: Some(status.to_owned()),
            ..ContainerSummary::default()
        }
    }

    #[test]
    fn a_listed_container_is_known_by_its_labels() {
        let labels = [
            (LABEL_SESSION, "alice"),
            (LABEL_GENERATION, "7"),
            (LABEL_FILES, "/f"),
        ];
        let listed = Listed::of(summary(&labels, "Exited (137) 2 seconds ago")).expect("ours");
        assert_eq!(listed.key.to_string(), "alice (generation 7)");
        assert_eq!(
            (listed.exit_code, listed.files_dir),
            (Some(137), Some("/f".into()))
        );
        for labels in [
            &[(LABEL_SESSION, "alice")][..],
            &[(LABEL_SESSION, "../etc"), (LABEL_GENERATION, "7")],
            &[(LABEL_SESSION, "alice"), (LABEL_GENERATION, "0")],
        ] {
            assert!(Listed::of(summary(labels, "")).is_none(), "{labels:?}");
        }
    }

    #[test]
    fn words_without_an_exit_code_have_none() {
        for status in ["", "Dead", "Up 2 hours", "Exited (", "Exited (x) ago"] {
            assert_eq!(exit_code_in_words(status), None, "{status}");
        }
    }

    #[test]
    fn a_daemon_without_live_restore_is_warned_of_with_the_remedy() {
        let good = SystemInfo {
            live_restore_enabled: Some(true),
            ..SystemInfo::default()
        };
        assert_eq!(warnings(&good), Vec::<String>::new());
        let bad = warnings(&SystemInfo::default());
        assert!(
            matches!(&bad[..], [one] if one.contains("/etc/docker/daemon.json")),
            "{bad:?}"
        );
    }
}
