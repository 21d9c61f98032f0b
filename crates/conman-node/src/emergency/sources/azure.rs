//! Azure: watches the scheduled events of this virtual machine, and acknowledges one when everything is released and
//! nothing passes through the node any more.
//!
//! A spot machine gets `Preempt` at least 30 s ahead, others `Terminate`, `Redeploy` and `Reboot` minutes ahead.
//! An acknowledged event begins at once, so that the machine's last seconds are not paid for.
//!
//! <https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events>

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use ::http::Request;
use futures_util::future::{BoxFuture, FutureExt};
use serde::Deserialize;
use tokio::time::sleep;

use super::http::{Endpoint, MetadataError};
use super::{FailureBackoff, NoticeSender, NoticeSource, NoticeSourceKind, Setting};
use crate::error::PreemptError;

pub(super) const KIND: NoticeSourceKind = NoticeSourceKind {
    name: "azure",
    setting: Setting::Endpoint("http://169.254.169.254"),
    open,
};

/// The documentation advises to look every second: the shortest notice is 30 s.
const INTERVAL: Duration = Duration::from_secs(1);

/// The service answers from the host itself.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(5);

/// The first request for events switches them on for the machine, which may take two minutes.
const FIRST_TIMEOUT: Duration = Duration::from_secs(150);

const EVENTS: &str = "/metadata/scheduledevents?api-version=2020-07-01";
const NAME: &str = "/metadata/instance/compute/name?api-version=2021-02-01&format=text";

/// The only signal: events differ by their ids.
const SIGNAL: &str = "scheduled-event";

/// Types of events after which no process of the machine lives. `Freeze` pauses it for seconds.
const ENDS: [&str; 4] = ["Preempt", "Terminate", "Redeploy", "Reboot"];

#[derive(Debug)]
struct Azure {
    endpoint: Endpoint,
    /// The machine's own name, once known: the list has the events of its whole availability set.
    name: Option<String>,
    /// Whether it has ever listed events.
    has_listed: bool,
}

#[derive(Debug, Deserialize)]
struct Document {
    #[serde(rename = "Events")]
    events: Vec<ScheduledEvent>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ScheduledEvent {
    event_id: String,
    event_type: String,
    #[serde(default)]
    resources: Vec<String>,
    /// An HTTP date, or empty once the event has begun.
    #[serde(default)]
    not_before: String,
}

impl ScheduledEvent {
    /// Time until it may begin. `None` if the service does not say it.
    fn left(&self) -> Option<Duration> {
        if self.not_before.is_empty() {
            return Some(Duration::ZERO);
        }
        let at = httpdate::parse_http_date(&self.not_before).ok()?;
        Some(at.duration_since(SystemTime::now()).unwrap_or_default())
    }
}

fn open(endpoint: &[String]) -> Result<Box<dyn NoticeSource>, String> {
    Ok(Box::new(Azure {
        endpoint: super::endpoint(endpoint)?,
        name: None,
        has_listed: false,
    }))
}

impl NoticeSource for Azure {
    fn watch(mut self: Box<Self>, notices: NoticeSender) -> BoxFuture<'static, ()> {
        let watch = async move {
            let mut passed_on = BTreeSet::new();
            let mut backoff = FailureBackoff::default();
            loop {
                let pause = match self.look().await {
                    Ok(events) => {
                        backoff.succeeded();
                        self.pass_on(&notices, &events, &mut passed_on);
                        INTERVAL
                    }
                    Err(error) => {
                        let what = "cannot read Azure's scheduled events";
                        backoff.failed(&notices, what, &error)
                    }
                };
                sleep(pause).await;
            }
        };
        watch.boxed()
    }

    fn probe(mut self: Box<Self>) -> BoxFuture<'static, Result<String, String>> {
        let probe = async move {
            let events = self.look().await;
            let events = events.map_err(|error| conman_core::error_chain(&error))?;
            Ok(match events.first() {
                Some(event) => format!(
                    "{} not before {}",
                    super::cut(&event.event_type),
                    super::cut(&event.not_before)
                ),
                None => "no notice".to_owned(),
            })
        };
        probe.boxed()
    }
}

impl Azure {
    /// The events that end this machine.
    async fn look(&mut self) -> Result<Vec<ScheduledEvent>, MetadataError> {
        if self.name.is_none() {
            self.name = Some(self.get(NAME, EXCHANGE_TIMEOUT).await?);
        }
        let bound = match self.has_listed {
            true => EXCHANGE_TIMEOUT,
            false => FIRST_TIMEOUT,
        };
        let document: Document = serde_json::from_str(&self.get(EVENTS, bound).await?)?;
        self.has_listed = true;
        let mut events = document.events;
        events.retain(|event| ends(event, self.name.as_deref()));
        Ok(events)
    }

    async fn get(&self, target: &str, bound: Duration) -> Result<String, MetadataError> {
        let request = Request::get(target).header("metadata", "true");
        let answer = self.endpoint.send(request, String::new(), bound).await?;
        answer.success()
    }

    /// Passes a new event on, or the withdrawal of all. A repeated one is no new one: an operator may have readmitted
    /// in between.
    fn pass_on(
        &self,
        notices: &NoticeSender,
        events: &[ScheduledEvent],
        passed_on: &mut BTreeSet<String>,
    ) {
        if events.is_empty() {
            if !passed_on.is_empty()
                && notices.passed("a withdrawn event", notices.withdraw(SIGNAL))
            {
                passed_on.clear();
            }
            return;
        }
        passed_on.retain(|id| events.iter().any(|event| event.event_id == *id));
        for event in events {
            if !passed_on.contains(&event.event_id)
                && notices.passed("a scheduled event", self.preempt(notices, event))
            {
                passed_on.insert(event.event_id.clone());
            }
        }
    }

    fn preempt(&self, notices: &NoticeSender, event: &ScheduledEvent) -> Result<(), PreemptError> {
        let reason = format!("Azure: {} of this machine", super::cut(&event.event_type));
        let report = notices.preempt(SIGNAL, &reason, event.left())?;
        let (endpoint, id) = (self.endpoint.clone(), event.event_id.clone());
        let notices = notices.clone();
        tokio::spawn(async move {
            // While something is unreleased, it may still be saved until the event begins.
            if report
                .await
                .is_ok_and(|report| report.unreleased.is_empty())
                && let Err(error) = acknowledge(&endpoint, &id).await
            {
                let reason = conman_core::error_chain(&error);
                notices.warn(format!(
                    "cannot acknowledge Azure's event {}; it begins at its time: {reason}",
                    super::cut(&id)
                ));
            }
        });
        Ok(())
    }
}

async fn acknowledge(endpoint: &Endpoint, id: &str) -> Result<(), MetadataError> {
    let body = serde_json::json!({"StartRequests": [{"EventId": id}]}).to_string();
    let request = Request::post(EVENTS).header("metadata", "true");
    let answer = endpoint.send(request, body, EXCHANGE_TIMEOUT).await?;
    answer.success().map(drop)
}

fn ends(event: &ScheduledEvent, machine: Option<&str>) -> bool {
    let is_ours = machine.is_some_and(|machine| event.resources.iter().any(|one| one == machine));
    is_ours && ENDS.contains(&event.event_type.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As in the documentation.
    const DOCUMENTED: &str = r#"{"DocumentIncarnation": 1, "Events": [{
        "EventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123", "EventStatus": "Scheduled",
        "EventType": "Freeze", "ResourceType": "VirtualMachine",
        "Resources": ["WestNO_0", "WestNO_1"], "NotBefore": "Mon, 11 Apr 2022 22:26:58 GMT",
        "Description": "Virtual machine is being paused", "EventSource": "Platform",
        "DurationInSeconds": 5}]}"#;

    #[test]
    fn only_events_that_end_this_machine_count() {
        let document: Document = serde_json::from_str(DOCUMENTED).expect("documented");
        let [freeze] = &document.events[..] else {
            panic!("{document:?}");
        };
        assert_eq!(freeze.left(), Some(Duration::ZERO), "long past");
        assert!(!ends(freeze, Some("WestNO_0")));
        let preempt = ScheduledEvent {
            event_type: "Preempt".to_owned(),
            ..freeze.clone()
        };
        assert!(ends(&preempt, Some("WestNO_0")));
        assert!(!ends(&preempt, Some("WestNO_2")) && !ends(&preempt, None));
    }
}
