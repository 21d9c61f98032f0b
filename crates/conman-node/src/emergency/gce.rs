//! Watches the metadata server for a termination of the machine.
//!
//! `instance/preempted` turns `TRUE` some 30 s before a spot machine is stopped (and before any
//! ACPI signal); `instance/maintenance-event` turns `TERMINATE_ON_HOST_MAINTENANCE` some 60 s
//! before a machine that does not migrate is. One task watches each, on the emergency thread.

use std::time::Duration;

use conman_proto::PreemptRequest;
use tokio::time::sleep;

use super::metadata::{Endpoint, MetadataError, Value};
use super::preemption_state::Origin;
use super::{Command, PreemptionHandle};

/// First pause after a failure; it doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(500);

/// Longest pause: a notice comes 30 s before the stop.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// Minimum time between two requests that were answered at once, for a server that does not wait for a
/// change.
const PACE: Duration = Duration::from_secs(1);

/// What a value means for the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Word {
    Going,
    Staying,
    /// No documented value.
    Unknown,
}

#[derive(Debug, Clone, Copy)]
struct Watched {
    key: &'static str,
    going: &'static str,
    staying: &'static [&'static str],
    origin: Origin,
    reason: &'static str,
}

const PREEMPTED: Watched = Watched {
    key: "preempted",
    going: "TRUE",
    staying: &["FALSE"],
    origin: Origin::GcePreempted,
    reason: "Compute Engine preempts this machine",
};

const MAINTENANCE: Watched = Watched {
    key: "maintenance-event",
    going: "TERMINATE_ON_HOST_MAINTENANCE",
    staying: &["NONE", "MIGRATE_ON_HOST_MAINTENANCE"],
    origin: Origin::GceMaintenance,
    reason: "Compute Engine terminates this machine for host maintenance",
};

impl Watched {
    fn word(&self, value: &str) -> Word {
        if value == self.going {
            Word::Going
        } else if self.staying.contains(&value) {
            Word::Staying
        } else {
            Word::Unknown
        }
    }
}

/// Starts both watches; they end with the emergency thread.
pub(crate) fn watch(handle: &PreemptionHandle, endpoint: &Endpoint) {
    for watched in [PREEMPTED, MAINTENANCE] {
        handle.spawn(watch_one(handle.clone(), endpoint.clone(), watched));
    }
}

async fn watch_one(handle: PreemptionHandle, endpoint: Endpoint, watched: Watched) {
    let mut etag: Option<String> = None;
    let mut heard = None;
    let mut pause = FIRST_PAUSE;
    let mut quiet = false;
    loop {
        let asked = tokio::time::Instant::now();
        match endpoint.read(watched.key, etag.as_deref()).await {
            Ok(value) => {
                pause = FIRST_PAUSE;
                quiet = false;
                // A repeated value is no new notice: an operator may have readmitted in between.
                if heard.as_ref() != Some(&value.text) && act(&handle, &watched, &value) {
                    heard = Some(value.text);
                }
                let changed = etag != value.etag;
                etag = value.etag;
                if !changed || etag.is_none() {
                    tokio::time::sleep_until(asked + PACE).await;
                }
            }
            Err(error) => {
                complain(&handle, &watched, &error, &mut quiet);
                // Read the present value without waiting: it may have changed.
                etag = None;
                sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }
}

/// Passes a value on. Returns whether that succeeded; duplicates are harmless.
fn act(handle: &PreemptionHandle, watched: &Watched, value: &Value) -> bool {
    let given = match watched.word(&value.text) {
        Word::Going => {
            let request = PreemptRequest {
                reason: Some(watched.reason.to_owned()),
                ..Default::default()
            };
            // The report goes to the journal; no caller waits for it.
            handle.give(&request, "gce", watched.origin).map(drop)
        }
        Word::Staying => handle.send(Command::Readmit(watched.origin, None)),
        Word::Unknown => {
            let text: String = value.text.chars().take(64).collect();
            handle.log.warn(format!(
                "unknown metadata value of {}: {text:?}",
                watched.key
            ));
            return true;
        }
    };
    if let Err(error) = given {
        handle.log.warn(format!(
            "cannot pass on {} of {}: {error}",
            value.text, watched.key
        ));
        return false;
    }
    true
}

/// Logs a failure once until the server answers again.
fn complain(handle: &PreemptionHandle, watched: &Watched, error: &MetadataError, quiet: &mut bool) {
    if !std::mem::replace(quiet, true) {
        let reason = crate::error_chain(error);
        let key = watched.key;
        handle.log.warn(format!(
            "cannot read {key} from the metadata server; retrying: {reason}"
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_documented_values_are_a_word() {
        assert_eq!(PREEMPTED.word("TRUE"), Word::Going);
        assert_eq!(PREEMPTED.word("FALSE"), Word::Staying);
        assert_eq!(PREEMPTED.word("true"), Word::Unknown);
        assert_eq!(
            MAINTENANCE.word("TERMINATE_ON_HOST_MAINTENANCE"),
            Word::Going
        );
        assert_eq!(
            MAINTENANCE.word("MIGRATE_ON_HOST_MAINTENANCE"),
            Word::Staying
        );
        assert_eq!(MAINTENANCE.word(""), Word::Unknown);
    }
}
