//! Amazon EC2: watches the instance metadata service (version 2) for the end of a spot instance.
//!
//! `spot/instance-action` exists from two minutes before the instance is stopped, terminated or hibernated, and
//! says when. `events/recommendations/rebalance` exists once an interruption is likely: it cordons the node.
//!
//! <https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html>,
//! <https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/rebalance-recommendations.html>,
//! <https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-retrieval.html>

use std::time::Duration;

use ::http::{Request, StatusCode};
use futures_util::future::{BoxFuture, FutureExt};
use jiff::Timestamp;
use serde::Deserialize;
use tokio::time::{Instant, sleep};

use super::http::{Endpoint, MetadataError};
use super::{FailureBackoff, NoticeSender, NoticeSource, NoticeSourceKind, Setting};

pub(super) const KIND: NoticeSourceKind = NoticeSourceKind {
    name: "aws",
    setting: Setting::Endpoint("http://169.254.169.254"),
    open,
};

/// The documentation advises to look every five seconds; the notice comes 120 s ahead.
const INTERVAL: Duration = Duration::from_secs(5);

/// The service answers from the host itself.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a token is good for, and when it is replaced.
const TOKEN_LIFETIME: Duration = Duration::from_hours(6);
const TOKEN_AGE: Duration = Duration::from_hours(5);

/// Largest token that is kept; the service's have 56 bytes.
const MAX_TOKEN_BYTES: usize = 1024;

const ACTION: &str = "spot/instance-action";
const REBALANCE: &str = "events/recommendations/rebalance";

#[derive(Debug)]
struct Aws {
    endpoint: Endpoint,
    token: Option<(String, Instant)>,
}

/// The body of `spot/instance-action`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct SpotAction {
    /// `stop`, `terminate` or `hibernate`.
    action: String,
    time: Timestamp,
}

/// The notices that were passed on.
#[derive(Debug, Default)]
struct PassedOn {
    action: Option<SpotAction>,
    rebalance: bool,
}

fn open(endpoint: &[String]) -> Result<Box<dyn NoticeSource>, String> {
    Ok(Box::new(Aws {
        endpoint: super::endpoint(endpoint)?,
        token: None,
    }))
}

impl NoticeSource for Aws {
    fn watch(mut self: Box<Self>, notices: NoticeSender) -> BoxFuture<'static, ()> {
        let watch = async move {
            let mut passed_on = PassedOn::default();
            let mut backoff = FailureBackoff::default();
            loop {
                let pause = match self.look(&notices, &mut passed_on).await {
                    Ok(()) => {
                        backoff.succeeded();
                        INTERVAL
                    }
                    Err(error) => {
                        let what = "cannot read the instance metadata service";
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
            Ok(match (self.action().await?, self.rebalance().await?) {
                (Some(SpotAction { action, time }), _) => {
                    format!("{} at {time}", super::cut(&action))
                }
                (None, true) => "recommends to rebalance".to_owned(),
                (None, false) => "no notice".to_owned(),
            })
        };
        let described = |error: MetadataError| conman_core::error_chain(&error);
        probe.map(move |probed| probed.map_err(described)).boxed()
    }
}

impl Aws {
    /// Passes on what has changed. The end of the machine comes first: a failure to read the recommendation must
    /// not delay it.
    async fn look(
        &mut self,
        notices: &NoticeSender,
        passed_on: &mut PassedOn,
    ) -> Result<(), MetadataError> {
        let action = self.action().await?;
        pass_on_action(notices, action, &mut passed_on.action);
        let rebalance = self.rebalance().await?;
        let is_new = rebalance && !passed_on.rebalance;
        let recommended = "EC2 recommends to rebalance: an interruption is likely";
        if !is_new || notices.passed(REBALANCE, notices.cordon(recommended)) {
            passed_on.rebalance = rebalance;
        }
        Ok(())
    }

    async fn action(&mut self) -> Result<Option<SpotAction>, MetadataError> {
        let action = self.read(ACTION).await?;
        Ok(action.as_deref().map(serde_json::from_str).transpose()?)
    }

    async fn rebalance(&mut self) -> Result<bool, MetadataError> {
        Ok(self.read(REBALANCE).await?.is_some())
    }

    /// Reads what is below `meta-data/`; `None` if it does not exist.
    async fn read(&mut self, key: &str) -> Result<Option<String>, MetadataError> {
        let target = format!("/latest/meta-data/{key}");
        loop {
            let (token, is_new) = self.token().await?;
            let request = Request::get(&target).header("x-aws-ec2-metadata-token", token);
            let answer = self
                .endpoint
                .send(request, String::new(), EXCHANGE_TIMEOUT)
                .await?;
            match answer.status {
                StatusCode::NOT_FOUND => return Ok(None),
                // It has expired early: the instance was moved or its clock was set.
                StatusCode::UNAUTHORIZED if !is_new => self.token = None,
                _ => return answer.success().map(Some),
            }
        }
    }

    /// The token, and whether the service has just made it.
    async fn token(&mut self) -> Result<(String, bool), MetadataError> {
        if let Some((token, made)) = &self.token
            && made.elapsed() < TOKEN_AGE
        {
            return Ok((token.clone(), false));
        }
        let request = Request::put("/latest/api/token").header(
            "x-aws-ec2-metadata-token-ttl-seconds",
            TOKEN_LIFETIME.as_secs(),
        );
        let answer = self
            .endpoint
            .send(request, String::new(), EXCHANGE_TIMEOUT)
            .await?;
        let token = answer.success()?;
        if token.is_empty() || token.len() > MAX_TOKEN_BYTES {
            return Err(MetadataError::Wrong("it sent no token"));
        }
        self.token = Some((token.clone(), Instant::now()));
        Ok((token, true))
    }
}

/// Passes a change on. A repeated notice is no new one: an operator may have readmitted in between.
fn pass_on_action(
    notices: &NoticeSender,
    action: Option<SpotAction>,
    passed_on: &mut Option<SpotAction>,
) {
    if action == *passed_on {
        return;
    }
    let sent = match &action {
        Some(SpotAction { action, time }) => {
            let action = super::cut(action);
            let reason = format!("EC2 will {action} this spot instance at {time}");
            let left = time.duration_since(Timestamp::now());
            let left = Duration::try_from(left).unwrap_or_default();
            notices.preempt(ACTION, &reason, Some(left)).map(drop)
        }
        None => notices.withdraw(ACTION),
    };
    if notices.passed(ACTION, sent) {
        *passed_on = action;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As in the documentation.
    #[test]
    fn the_documented_body_is_read() {
        let action: SpotAction =
            serde_json::from_str(r#"{"action": "stop", "time": "2017-09-18T08:22:00Z"}"#)
                .expect("documented");
        assert_eq!(action.action, "stop");
        assert_eq!(action.time.to_string(), "2017-09-18T08:22:00Z");
    }
}
