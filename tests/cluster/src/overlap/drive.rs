//! Disturbs a fleet at random while clients keep asking for its sessions.
//!
//! One task a session asks any node for it, again and again, and gives it up now and then; the
//! caller's task injects faults one after the other. They share nothing but the fleet.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use conman_e2e::Api;
use fastrand::Rng;
use http::Method;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::Report;
use super::faults::{Event, Fault, Scale, Targets, draw};
use super::inflict::suffer;
use super::tail::Tail;
use super::witness::{DOCKERS, TEMPLATE, journal, monotonic_ns};
use crate::cluster::Cluster;

/// A client asks again after at most this long.
const ASK_MS: std::ops::Range<u64> = 50..400;
/// A client's patience with one answer: nodes stand still and are cut off here.
pub(super) const ANSWER: Duration = Duration::from_secs(5);
/// One in so many questions is to end the session.
const END_ONE_IN: u32 = 40;
/// One in so many sessions is started again by the fleet itself.
const RESTARTED_ONE_IN: usize = 3;
/// Bound on a fleet's way back to where every node is ready and every session served, on a loaded
/// machine.
pub(super) const RECOVERY: Duration = Duration::from_secs(120);
pub(super) const POLL: Duration = Duration::from_millis(100);

/// How a fleet is to be disturbed.
#[derive(Debug, Clone)]
pub struct Drive {
    pub seed: u64,
    pub sessions: usize,
    /// So many of them are run by the Docker that the nodes have as well.
    pub dockers: usize,
    /// It ends after so many handovers, each of Docker's having moved once on the average …
    pub handovers: usize,
    /// … and, if so, after at least one fault of every kind, …
    pub every_kind: bool,
    /// … or after this time, whatever has happened.
    pub most: Duration,
    pub scale: Scale,
}

impl Drive {
    /// Disturbs the fleet and heals it; `tell` hears of every fault.
    ///
    /// The report is that of the whole time, with the first violation at the latest. With none,
    /// every session was served again in the end.
    ///
    /// # Errors
    /// When the fleet does not recover, or cannot be disturbed; when Docker's sessions have not moved,
    /// or not every kind of fault has come that was to.
    pub async fn run(&self, cluster: &Cluster, tell: &mut dyn FnMut(&str)) -> Result<Report> {
        let mut tail = Tail::open(&journal(cluster.layout()))?;
        let mut clients = JoinSet::new();
        for number in 0..self.sessions {
            let apis = cluster.nodes().iter().map(crate::Node::api).collect();
            let random = Rng::with_seed(self.seed.wrapping_add(number as u64 + 1));
            clients.spawn(ask_for_ever(number, self.wish(number), apis, random));
        }
        let mut random = Rng::with_seed(self.seed);
        let targets = Targets {
            nodes: cluster.nodes().len(),
            members: cluster.members().len(),
            docker: self.dockers > 0,
        };
        let mut inflicted = Inflicted::none(targets.docker);
        let begun = Instant::now();
        let mut report = tail.catch_up()?;
        while begun.elapsed() < self.most {
            let moved_enough =
                report.handovers >= self.handovers && self.moved(&tail) >= self.dockers;
            let mut event = draw(&mut random, targets, self.scale);
            if moved_enough {
                if !self.every_kind || inflicted.missing().next().is_none() {
                    break;
                }
                // Nothing else is waited for any more.
                while !event.faults().any(|fault| inflicted.is_missing(fault)) {
                    event = draw(&mut random, targets, self.scale);
                }
            }
            tell(&format!(
                "{:4} s, {} handovers, {} of them Docker's: {event}",
                begun.elapsed().as_secs(),
                report.handovers,
                self.moved(&tail)
            ));
            suffer(cluster, &event)
                .await
                .with_context(|| event.to_string())?;
            inflicted.count(&event);
            match event.pause {
                Some(pause) => sleep(pause).await,
                None => recovered(cluster)
                    .await
                    .with_context(|| format!("after: {event}"))?,
            }
            report = tail.catch_up()?;
            if !report.violations.is_empty() {
                return Ok(report);
            }
        }
        recovered(cluster).await?;
        // With nobody who ends sessions, but with those that ask for them.
        clients.abort_all();
        let report = self.served(cluster, &mut tail).await?;
        let moved = self.moved(&tail);
        tell(&format!(
            "{report}; {moved} handovers were Docker's; faults: {inflicted}"
        ));
        let missing: Vec<&str> = inflicted.missing().collect();
        ensure!(
            !self.every_kind || missing.is_empty() || !report.violations.is_empty(),
            "in {:?} these faults have not come: {}",
            self.most,
            missing.join(", ")
        );
        ensure!(
            moved >= self.dockers || !report.violations.is_empty(),
            "Docker's sessions have moved {moved} times, not {}, in {:?}",
            self.dockers,
            self.most
        );
        Ok(report)
    }

    fn is_docker(&self, number: usize) -> bool {
        number >= self.sessions - self.dockers
    }

    /// How often Docker's sessions have changed hosts.
    fn moved(&self, tail: &Tail) -> usize {
        let dockers = (0..self.sessions).filter(|number| self.is_docker(*number));
        dockers
            .map(|number| tail.checker().handovers(&session(number)))
            .sum()
    }

    /// What is asked for, each time.
    fn wish(&self, number: usize) -> Value {
        let template = if self.is_docker(number) {
            DOCKERS
        } else {
            TEMPLATE
        };
        let on_node_loss = match number % RESTARTED_ONE_IN {
            0 => "restart",
            _ => "wait",
        };
        json!({"template": template, "on_node_loss": on_node_loss})
    }

    /// Asks for every session until each has written anew.
    async fn served(&self, cluster: &Cluster, tail: &mut Tail) -> Result<Report> {
        let healed = monotonic_ns();
        let deadline = Instant::now() + RECOVERY;
        let mut waiting: Vec<usize> = (0..self.sessions).collect();
        loop {
            let report = tail.catch_up()?;
            let writes = |number: &usize| {
                let lives = tail.checker().lives(&session(*number));
                lives.iter().any(|life| life.last_ns > healed)
            };
            waiting.retain(|number| !writes(number));
            if waiting.is_empty() || !report.violations.is_empty() {
                return Ok(report);
            }
            ensure!(
                Instant::now() < deadline,
                "not served {RECOVERY:?} after everything was healed: {waiting:?}"
            );
            for number in &waiting {
                let node = &cluster.nodes()[number % cluster.nodes().len()];
                ensure_session(&node.api(), *number, &self.wish(*number)).await;
            }
            sleep(POLL).await;
        }
    }
}

/// How often each kind of fault has come.
struct Inflicted(BTreeMap<String, usize>);

impl Inflicted {
    fn none(docker: bool) -> Self {
        let kinds = Fault::kinds(docker).into_iter();
        Self(kinds.map(|kind| (kind, 0)).collect())
    }

    fn count(&mut self, event: &Event) {
        for fault in event.faults() {
            *self.0.entry(fault.kind()).or_default() += 1;
        }
    }

    fn is_missing(&self, fault: &Fault) -> bool {
        self.0.get(&fault.kind()).is_none_or(|times| *times == 0)
    }

    fn missing(&self) -> impl Iterator<Item = &str> {
        let missing = self.0.iter().filter(|(_, times)| **times == 0);
        missing.map(|(kind, _)| kind.as_str())
    }
}

impl fmt::Display for Inflicted {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let each = self.0.iter().map(|(kind, times)| format!("{kind} {times}"));
        formatter.write_str(&each.collect::<Vec<_>>().join(", "))
    }
}

fn session(number: usize) -> String {
    format!("w{number}")
}

async fn ask_for_ever(number: usize, wish: Value, apis: Vec<Api>, mut random: Rng) {
    let id = session(number);
    loop {
        let api = &apis[random.usize(..apis.len())];
        if random.u32(..END_ONE_IN) == 0 {
            let path = format!("/v1/sessions/{id}");
            // Any answer and none will do: the journal tells what came of it.
            let _ = timeout(ANSWER, api.try_send(Method::DELETE, &path, None)).await;
        } else {
            ensure_session(api, number, &wish).await;
        }
        sleep(Duration::from_millis(random.u64(ASK_MS))).await;
    }
}

async fn ensure_session(api: &Api, number: usize, wish: &Value) {
    let path = format!("/v1/sessions/{}", session(number));
    // As above.
    let _ = timeout(ANSWER, api.try_send(Method::PUT, &path, Some(wish))).await;
}

/// Waits until every node is ready.
async fn recovered(cluster: &Cluster) -> Result<()> {
    let deadline = Instant::now() + RECOVERY;
    for node in cluster.nodes() {
        loop {
            if let Some(status) = node.ended()? {
                bail!(
                    "the daemon of {} has ended by itself ({status})",
                    node.name()
                );
            }
            let Err(why) = node.readiness().await else {
                break;
            };
            ensure!(
                Instant::now() < deadline,
                "{} is not ready {RECOVERY:?} after everything was healed: {why}",
                node.name()
            );
            sleep(POLL).await;
        }
    }
    Ok(())
}
