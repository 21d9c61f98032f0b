//! Disturbs a fleet at random while clients keep asking for its sessions.
//!
//! One task a session asks any node for it, again and again, and gives it up now and then; the
//! caller's task injects faults one after the other. They share nothing but the fleet.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use conman_e2e::Api;
use conman_linux::Signal;
use fastrand::Rng;
use http::Method;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::Report;
use super::faults::{Event, Fault, Scale, draw};
use super::tail::Tail;
use super::witness::{DOCKERS, TEMPLATE, journal, monotonic_ns};
use crate::cluster::Cluster;
use crate::cut::Cut;
use crate::layout::ETCD_PORT;
use crate::node::Node;

/// A client asks again after at most this long.
const ASK_MS: std::ops::Range<u64> = 50..400;
/// A client's patience with one answer: nodes stand still and are cut off here.
const ANSWER: Duration = Duration::from_secs(5);
/// One in so many questions is to end the session.
const END_ONE_IN: u32 = 40;
/// One in so many sessions is started again by the fleet itself.
const RESTARTED_ONE_IN: usize = 3;
/// Bound on a fleet's way back to where every node is ready and every session served, on a loaded
/// machine.
const RECOVERY: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(100);

/// How a fleet is to be disturbed.
#[derive(Debug, Clone)]
pub struct Drive {
    pub seed: u64,
    pub sessions: usize,
    /// So many of them are run by the Docker that the nodes have as well.
    pub dockers: usize,
    /// It ends after so many handovers, each of Docker's having moved once on the average …
    pub handovers: usize,
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
    /// When the fleet does not recover, or cannot be disturbed; when Docker's sessions have not moved.
    pub async fn run(&self, cluster: &Cluster, tell: &mut dyn FnMut(&str)) -> Result<Report> {
        let mut tail = Tail::open(&journal(cluster.layout()))?;
        let mut clients = JoinSet::new();
        for number in 0..self.sessions {
            let apis = cluster.nodes().iter().map(crate::Node::api).collect();
            let random = Rng::with_seed(self.seed.wrapping_add(number as u64 + 1));
            clients.spawn(ask_for_ever(number, self.wish(number), apis, random));
        }
        let mut random = Rng::with_seed(self.seed);
        let begun = Instant::now();
        let mut report = tail.catch_up()?;
        while (report.handovers < self.handovers || self.moved(&tail) < self.dockers)
            && begun.elapsed() < self.most
        {
            let (nodes, docker) = (cluster.nodes().len(), self.dockers > 0);
            let event = draw(&mut random, nodes, docker, self.scale);
            tell(&format!(
                "{:4} s, {} handovers, {} of them Docker's: {event}",
                begun.elapsed().as_secs(),
                report.handovers,
                self.moved(&tail)
            ));
            suffer(cluster, &event)
                .await
                .with_context(|| event.to_string())?;
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
        tell(&format!("{report}; {moved} handovers were Docker's"));
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

/// Injects an event's faults, lets them last, and takes them back.
async fn suffer(cluster: &Cluster, event: &Event) -> Result<()> {
    let first = inflict(cluster, &event.fault, event.lasts);
    match &event.beside {
        Some((fault, lasts)) => {
            tokio::try_join!(first, inflict(cluster, fault, *lasts)).map(|((), ())| ())
        }
        None => first.await,
    }
}

/// Has a node told something, and the contrary after a while.
async fn taken_back(node: &Node, order: &str, back: &str, lasts: Duration) -> Result<()> {
    let admin = node.admin();
    let body = json!({"reason": "a test"});
    let path = format!("/v1/nodes/self/{order}");
    // It may just have started, or be fenced.
    let _ = timeout(ANSWER, admin.try_send(Method::POST, &path, Some(&body))).await;
    sleep(lasts).await;
    let path = format!("/v1/nodes/self/{back}");
    let deadline = Instant::now() + RECOVERY;
    loop {
        let answer = timeout(ANSWER, admin.try_send(Method::POST, &path, None)).await;
        let why = match answer {
            Ok(Ok(answer)) if answer.status.is_success() => return Ok(()),
            Ok(Ok(answer)) => answer.text(),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "no answer".to_owned(),
        };
        ensure!(
            Instant::now() < deadline,
            "no {back} of {} in {RECOVERY:?}: {why}",
            node.name()
        );
        sleep(POLL).await;
    }
}

async fn inflict(cluster: &Cluster, fault: &Fault, lasts: Duration) -> Result<()> {
    let nodes = cluster.nodes();
    match fault {
        Fault::KillDaemon(node) => {
            nodes[*node].kill_daemon()?;
            sleep(lasts).await;
            nodes[*node].start()
        }
        Fault::KillShim(node) => {
            nodes[*node].kill_shim()?;
            sleep(lasts).await;
            Ok(())
        }
        Fault::KillBoth(node) => {
            // The daemon first, or it would start another shim meanwhile.
            nodes[*node].kill_daemon()?;
            nodes[*node].kill_shim()?;
            sleep(lasts).await;
            nodes[*node].start()
        }
        Fault::PauseDaemon(node) => {
            nodes[*node].signal_daemon(Signal::STOP)?;
            sleep(lasts).await;
            nodes[*node].signal_daemon(Signal::CONT)
        }
        Fault::PauseShim(node) => {
            nodes[*node].signal_shim(Signal::STOP)?;
            sleep(lasts).await;
            nodes[*node].signal_shim(Signal::CONT)
        }
        Fault::LoseMachine(node) => {
            nodes[*node].lose()?;
            sleep(lasts).await;
            nodes[*node].start()
        }
        Fault::KillLeader => {
            let leader = &cluster.members()[cluster.leader().await?];
            leader.kill()?;
            sleep(lasts).await;
            leader.start()
        }
        Fault::PauseQuorum => {
            let most = cluster.members().len() / 2 + 1;
            for member in &cluster.members()[..most] {
                member.signal(Signal::STOP)?;
            }
            sleep(lasts).await;
            for member in &cluster.members()[..most] {
                member.signal(Signal::CONT)?;
            }
            Ok(())
        }
        Fault::PauseDocker => {
            cluster.signal_docker(Signal::STOP)?;
            sleep(lasts).await;
            cluster.signal_docker(Signal::CONT)
        }
        Fault::KillDocker => {
            cluster.kill_docker()?;
            sleep(lasts).await;
            cluster.start_docker().await
        }
        Fault::Preempt(node) => taken_back(&nodes[*node], "preempt", "readmit", lasts).await,
        Fault::Drain(node) => taken_back(&nodes[*node], "drain", "undrain", lasts).await,
        Fault::CutFromAll(_)
        | Fault::CutFromEtcd(_)
        | Fault::LoseRequests(_)
        | Fault::LoseReplies(_)
        | Fault::CutPeers(..) => {
            let cuts = cuts(cluster, fault);
            for cut in &cuts {
                cluster.cut(cut)?;
            }
            sleep(lasts).await;
            // Another fault may have cut something else meanwhile.
            for cut in &cuts {
                cluster.mend(cut)?;
            }
            Ok(())
        }
    }
}

/// The packets that a fault of the network loses.
fn cuts(cluster: &Cluster, fault: &Fault) -> Vec<Cut> {
    let host = |node: &usize| cluster.nodes()[*node].host().clone();
    let members = || cluster.members().iter().map(|member| member.host().clone());
    match fault {
        Fault::CutFromAll(node) => {
            let own = host(node);
            let all = cluster.layout().hosts().into_iter();
            let others = all.filter(|other| *other != own);
            others
                .map(|other| Cut::Between(own.clone(), other))
                .collect()
        }
        Fault::CutFromEtcd(node) => members()
            .map(|member| Cut::Between(host(node), member))
            .collect(),
        Fault::LoseRequests(node) => members()
            .map(|to| Cut::OneWay {
                from: host(node),
                to,
            })
            .collect(),
        Fault::LoseReplies(node) => members()
            .map(|from| Cut::Replies {
                from,
                to: host(node),
                port: ETCD_PORT,
            })
            .collect(),
        Fault::CutPeers(one, other) => vec![Cut::Between(host(one), host(other))],
        _ => Vec::new(),
    }
}
