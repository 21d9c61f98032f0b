//! Google Compute Engine: watches the metadata server for a termination of the machine.
//!
//! `instance/preempted` turns `TRUE` some 30 s before a spot machine is stopped (and before any
//! ACPI signal); `instance/maintenance-event` turns `TERMINATE_ON_HOST_MAINTENANCE` some 60 s
//! before a machine that does not migrate is.

use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt, join};
use tokio::time::{Instant, sleep, sleep_until};

use super::metadata::{Endpoint, MetadataError, Value};
use super::notice_source::{NoticeSender, NoticeSource, NoticeSourceKind};

pub(super) const KIND: NoticeSourceKind = NoticeSourceKind {
    name: "gce",
    default_endpoint: "http://metadata.google.internal",
    open,
};

/// First pause after a failure; it doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(500);

/// Longest pause: a notice comes 30 s before the stop.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// Minimum time between two requests that were answered at once, for a server that does not wait for a
/// change.
const PACE: Duration = Duration::from_secs(1);

/// What a value means for the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Meaning {
    Stops,
    Stays,
    /// No documented value.
    Unknown,
}

/// A value of the metadata server that announces an end of the machine.
#[derive(Debug, Clone, Copy)]
struct Signal {
    key: &'static str,
    stops: &'static str,
    stays: &'static [&'static str],
    reason: &'static str,
}

const PREEMPTED: Signal = Signal {
    key: "preempted",
    stops: "TRUE",
    stays: &["FALSE"],
    reason: "Compute Engine preempts this machine",
};

const MAINTENANCE: Signal = Signal {
    key: "maintenance-event",
    stops: "TERMINATE_ON_HOST_MAINTENANCE",
    stays: &["NONE", "MIGRATE_ON_HOST_MAINTENANCE"],
    reason: "Compute Engine terminates this machine for host maintenance",
};

impl Signal {
    fn meaning(&self, value: &str) -> Meaning {
        if value == self.stops {
            Meaning::Stops
        } else if self.stays.contains(&value) {
            Meaning::Stays
        } else {
            Meaning::Unknown
        }
    }
}

fn open(endpoint: &str) -> Result<Box<dyn NoticeSource>, String> {
    Ok(Box::new(endpoint.parse::<Endpoint>()?))
}

impl NoticeSource for Endpoint {
    fn watch(self: Box<Self>, notices: NoticeSender) -> BoxFuture<'static, ()> {
        let watches = async move {
            join(
                watch(&self, PREEMPTED, &notices),
                watch(&self, MAINTENANCE, &notices),
            )
            .await;
        };
        watches.boxed()
    }
}

/// Watches one value. Never returns.
async fn watch(endpoint: &Endpoint, signal: Signal, notices: &NoticeSender) {
    let mut etag: Option<String> = None;
    let mut reported = None;
    let mut pause = FIRST_PAUSE;
    let mut is_failing = false;
    loop {
        let asked = Instant::now();
        match endpoint.read(signal.key, etag.as_deref()).await {
            Ok(value) => {
                pause = FIRST_PAUSE;
                is_failing = false;
                // A repeated value is no new notice: an operator may have readmitted in between.
                if reported.as_ref() != Some(&value.text) && report(notices, &signal, &value) {
                    reported = Some(value.text);
                }
                let changed = etag != value.etag;
                etag = value.etag;
                if !changed || etag.is_none() {
                    sleep_until(asked + PACE).await;
                }
            }
            Err(error) => {
                // Logged once until the server answers again.
                if !std::mem::replace(&mut is_failing, true) {
                    warn_of(notices, &signal, &error);
                }
                // Read the present value without waiting: it may have changed.
                etag = None;
                sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }
}

/// Passes a value on. Returns whether that succeeded.
fn report(notices: &NoticeSender, signal: &Signal, value: &Value) -> bool {
    let sent = match signal.meaning(&value.text) {
        Meaning::Stops => notices.preempt(signal.key, signal.reason),
        Meaning::Stays => notices.withdraw(signal.key),
        Meaning::Unknown => {
            let text: String = value.text.chars().take(64).collect();
            notices.warn(format!(
                "unknown metadata value of {}: {text:?}",
                signal.key
            ));
            Ok(())
        }
    };
    if let Err(error) = &sent {
        notices.warn(format!(
            "cannot pass on {} of {}: {error}",
            value.text, signal.key
        ));
    }
    sent.is_ok()
}

fn warn_of(notices: &NoticeSender, signal: &Signal, error: &MetadataError) {
    let reason = conman_core::error_chain(error);
    notices.warn(format!(
        "cannot read {} from the metadata server; retrying: {reason}",
        signal.key
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_documented_values_have_a_meaning() {
        assert_eq!(PREEMPTED.meaning("TRUE"), Meaning::Stops);
        assert_eq!(PREEMPTED.meaning("FALSE"), Meaning::Stays);
        assert_eq!(PREEMPTED.meaning("true"), Meaning::Unknown);
        assert_eq!(
            MAINTENANCE.meaning("TERMINATE_ON_HOST_MAINTENANCE"),
            Meaning::Stops
        );
        assert_eq!(
            MAINTENANCE.meaning("MIGRATE_ON_HOST_MAINTENANCE"),
            Meaning::Stays
        );
        assert_eq!(MAINTENANCE.meaning(""), Meaning::Unknown);
    }
}
