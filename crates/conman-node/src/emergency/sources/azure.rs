//! Azure: watches the scheduled events of this virtual machine, and acknowledges one when everything is released.
//!
//! A spot machine gets `Preempt` at least 30 s ahead, others `Terminate`, `Redeploy` and `Reboot` minutes ahead.
//! An acknowledged event begins at once, so that the machine's last seconds are not paid for.
//!
//! <https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events>

use std::time::{Duration, SystemTime};

use ::http::Request;
use futures_util::future::{BoxFuture, FutureExt};
use serde::Deserialize;
use tokio::time::sleep;

use super::http::{Endpoint, MetadataError};
use super::{NoticeSender, NoticeSource, NoticeSourceKind, Setting, Troubles};

pub(super) const KIND: NoticeSourceKind = NoticeSourceKind {
    name: "azure",
    setting: Setting::Endpoint("http://169.254.169.254"),
    open,
};

/// The documentation advises to look every second: the shortest notice is 30 s.
const INTERVAL: Duration = Duration::from_secs(1);

/// The first request switches the service on for the machine, which may take two minutes.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(150);

const EVENTS: &str = "/metadata/scheduledevents?api-version=2020-07-01";
const NAME: &str = "/metadata/instance/compute/name?api-version=2021-02-01&format=text";

/// The only signal: events are told apart by their ids.
const SIGNAL: &str = "scheduled-event";

/// Types of events after which no process of the machine lives. `Freeze` pauses it for seconds.
const ENDS: [&str; 4] = ["Preempt", "Terminate", "Redeploy", "Reboot"];

#[derive(Debug)]
struct Azure {
    endpoint: Endpoint,
    /// The machine's own name, once known: the list has the events of its whole availability set.
    name: Option<String>,
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
    }))
}

impl NoticeSource for Azure {
    fn watch(mut self: Box<Self>, notices: NoticeSender) -> BoxFuture<'static, ()> {
        let watch = async move {
            let mut passed_on: Option<String> = None;
            let mut troubles = Troubles::default();
            loop {
                let pause = match self.look().await {
                    Ok(event) => {
                        troubles.answered();
                        self.pass_on(&notices, event, &mut passed_on);
                        INTERVAL
                    }
                    Err(error) => {
                        let what = "cannot read Azure's scheduled events";
                        troubles.another(&notices, what, &error)
                    }
                };
                sleep(pause).await;
            }
        };
        watch.boxed()
    }

    fn probe(mut self: Box<Self>) -> BoxFuture<'static, Result<String, String>> {
        let probe = async move {
            let event = self.look().await;
            let event = event.map_err(|error| conman_core::error_chain(&error))?;
            let told = event.map(|event| {
                let ScheduledEvent {
                    event_type,
                    not_before,
                    ..
                } = event;
                format!(
                    "{} not before {}",
                    super::cut(&event_type),
                    super::cut(&not_before)
                )
            });
            Ok(told.unwrap_or_else(|| "no notice".to_owned()))
        };
        probe.boxed()
    }
}

impl Azure {
    /// The first event that ends this machine, if there is one.
    async fn look(&mut self) -> Result<Option<ScheduledEvent>, MetadataError> {
        if self.name.is_none() {
            self.name = Some(self.get(NAME).await?);
        }
        let document: Document = serde_json::from_str(&self.get(EVENTS).await?)?;
        Ok(document
            .events
            .into_iter()
            .find(|event| ends(event, self.name.as_deref())))
    }

    async fn get(&self, target: &str) -> Result<String, MetadataError> {
        let request = Request::get(target).header("metadata", "true");
        let answer = self
            .endpoint
            .send(request, String::new(), EXCHANGE_TIMEOUT)
            .await?;
        answer.success()
    }

    /// Passes a new event on, or its withdrawal. A repeated one is no new one: an operator may have readmitted in
    /// between.
    fn pass_on(
        &self,
        notices: &NoticeSender,
        event: Option<ScheduledEvent>,
        passed_on: &mut Option<String>,
    ) {
        let id = event.as_ref().map(|event| event.event_id.clone());
        if id == *passed_on {
            return;
        }
        let sent = match &event {
            Some(event) => {
                let reason = format!("Azure: {} of this machine", super::cut(&event.event_type));
                let report = notices.preempt(SIGNAL, &reason, event.left());
                report.map(|report| {
                    let (endpoint, id) = (self.endpoint.clone(), event.event_id.clone());
                    let notices = notices.clone();
                    tokio::spawn(async move {
                        // What is not released may still be saved until the event begins by itself.
                        if report.await.is_ok_and(|report| report.unreleased.is_empty())
                            && let Err(error) = acknowledge(&endpoint, &id).await
                        {
                            let reason = conman_core::error_chain(&error);
                            notices.warn(format!(
                                "cannot acknowledge Azure's event {}; it begins by itself: {reason}",
                                super::cut(&id)
                            ));
                        }
                    });
                })
            }
            None => notices.withdraw(SIGNAL),
        };
        if notices.passed("a scheduled event", sent) {
            *passed_on = id;
        }
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
