//! Google Compute Engine: watches the metadata server for a termination of the machine.
//!
//! `instance/preempted` turns `TRUE` some 30 s before a spot machine is stopped (and before any
//! ACPI signal); `instance/maintenance-event` turns `TERMINATE_ON_HOST_MAINTENANCE` some 60 s
//! before a machine that does not migrate is.

use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt, join};
use http::header::ETAG;
use http::{HeaderMap, Request};
use percent_encoding::{NON_ALPHANUMERIC, PercentEncode, utf8_percent_encode};
use tokio::time::{Instant, sleep, sleep_until};

use super::http::{Endpoint, MetadataError};
use super::{FailureBackoff, NoticeSender, NoticeSource, NoticeSourceKind, Setting};

pub(super) const KIND: NoticeSourceKind = NoticeSourceKind {
    name: "gce",
    setting: Setting::Endpoint("http://metadata.google.internal"),
    open,
};

/// Header that names the server, in requests and responses. A response without it is from another server.
const FLAVOR: &str = "metadata-flavor";
const FLAVOR_VALUE: &str = "Google";

/// Largest ETag that is kept; the server's have 16 bytes.
const MAX_ETAG_BYTES: usize = 256;

/// How long the server may keep a request open before it answers without a change.
const HANG_S: u64 = 60;

/// Bound on a whole exchange, with a margin for a server that ends its wait late.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(HANG_S + 30);

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

fn open(endpoint: &[String]) -> Result<Box<dyn NoticeSource>, String> {
    Ok(Box::new(Gce(super::endpoint(endpoint)?)))
}

#[derive(Debug)]
struct Gce(Endpoint);

/// A value and the ETag of its version.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Value {
    text: String,
    etag: Option<String>,
}

impl NoticeSource for Gce {
    fn watch(self: Box<Self>, notices: NoticeSender) -> BoxFuture<'static, ()> {
        let watches = async move {
            join(
                self.watch_one(PREEMPTED, &notices),
                self.watch_one(MAINTENANCE, &notices),
            )
            .await;
        };
        watches.boxed()
    }

    fn probe(self: Box<Self>) -> BoxFuture<'static, Result<String, String>> {
        let probe = async move {
            let mut shown = Vec::new();
            for signal in [PREEMPTED, MAINTENANCE] {
                let value = self.read(signal.key, None).await;
                let value = value.map_err(|error| conman_core::error_chain(&error))?;
                shown.push(format!("{} is {}", signal.key, super::cut(&value.text)));
            }
            Ok(shown.join(", "))
        };
        probe.boxed()
    }
}

impl Gce {
    /// Watches one value. Never returns.
    async fn watch_one(&self, signal: Signal, notices: &NoticeSender) {
        let mut etag: Option<String> = None;
        let mut reported = None;
        let mut backoff = FailureBackoff::default();
        loop {
            let asked = Instant::now();
            match self.read(signal.key, etag.as_deref()).await {
                Ok(value) => {
                    backoff.succeeded();
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
                    let what = format!("cannot read {} from the metadata server", signal.key);
                    // Read the present value without waiting: it may have changed.
                    etag = None;
                    sleep(backoff.failed(notices, &what, &error)).await;
                }
            }
        }
    }

    /// Reads the value of `key` below `instance/`: at once without an ETag, otherwise when the value no
    /// longer has this ETag, or after [`HANG_S`] seconds.
    async fn read(&self, key: &str, etag: Option<&str>) -> Result<Value, MetadataError> {
        let mut target = format!("/computeMetadata/v1/instance/{key}");
        if let Some(etag) = etag {
            let etag = escaped(etag);
            target += &format!("?wait_for_change=true&timeout_sec={HANG_S}&last_etag={etag}");
        }
        let request = Request::get(target).header(FLAVOR, FLAVOR_VALUE);
        let answer = self
            .0
            .send(request, String::new(), EXCHANGE_TIMEOUT)
            .await?;
        // Check this before the status: another server's answer says nothing about this machine.
        if !is_metadata_server(&answer.headers) {
            return Err(MetadataError::Wrong(
                "the response lacks `Metadata-Flavor: Google`, so it is no metadata server",
            ));
        }
        let etag = etag_of(&answer.headers);
        let text = answer.success()?;
        Ok(Value { text, etag })
    }
}

fn is_metadata_server(headers: &HeaderMap) -> bool {
    headers.get(FLAVOR).is_some_and(|value| {
        value
            .as_bytes()
            .eq_ignore_ascii_case(FLAVOR_VALUE.as_bytes())
    })
}

fn etag_of(headers: &HeaderMap) -> Option<String> {
    let etag = headers.get(ETAG)?.to_str().ok()?.trim();
    (!etag.is_empty() && etag.len() <= MAX_ETAG_BYTES).then(|| etag.to_owned())
}

/// An ETag is opaque: it may have characters that are not allowed in a query.
fn escaped(etag: &str) -> PercentEncode<'_> {
    utf8_percent_encode(etag, NON_ALPHANUMERIC)
}

/// Passes a value on. Returns whether that succeeded.
fn report(notices: &NoticeSender, signal: &Signal, value: &Value) -> bool {
    let sent = match signal.meaning(&value.text) {
        Meaning::Stops => notices.preempt(signal.key, signal.reason, None).map(drop),
        Meaning::Stays => notices.withdraw(signal.key),
        Meaning::Unknown => {
            let text = super::cut(&value.text);
            notices.warn(format!(
                "unknown metadata value of {}: {text:?}",
                signal.key
            ));
            Ok(())
        }
    };
    notices.passed(signal.key, sent)
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

    #[test]
    fn an_etag_stays_one_query_value() {
        assert_eq!(escaped("a1&b=\"2\"").to_string(), "a1%26b%3D%222%22");
    }
}
