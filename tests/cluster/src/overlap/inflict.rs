//! Does to a fleet what was drawn, and takes it back.

use std::time::Duration;

use anyhow::{Result, ensure};
use conman_linux::Signal;
use http::Method;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout};

use super::drive::{ANSWER, POLL, RECOVERY};
use super::faults::{Event, Fault};
use crate::cluster::Cluster;
use crate::cut::Cut;
use crate::layout::ETCD_PORT;
use crate::node::Node;

/// Injects an event's faults, lets them last, and takes them back.
pub(super) async fn suffer(cluster: &Cluster, event: &Event) -> Result<()> {
    let first = inflict(cluster, &event.fault, event.lasts);
    match &event.beside {
        Some((fault, lasts)) => {
            tokio::try_join!(first, inflict(cluster, fault, *lasts)).map(|((), ())| ())
        }
        None => first.await,
    }
}

/// Has a node do something, and the contrary after a while.
async fn taken_back(node: &Node, order: &str, back: &str, lasts: Duration) -> Result<()> {
    let body = json!({"reason": "a test"});
    ordered(node, order, Some(&body)).await?;
    sleep(lasts).await;
    ordered(node, back, None).await
}

/// Tells a node until it does it: it may just have started, or be fenced.
async fn ordered(node: &Node, order: &str, body: Option<&Value>) -> Result<()> {
    let admin = node.admin();
    let path = format!("/v1/nodes/self/{order}");
    let deadline = Instant::now() + RECOVERY;
    loop {
        let answer = timeout(ANSWER, admin.try_send(Method::POST, &path, body)).await;
        let why = match answer {
            Ok(Ok(answer)) if answer.status.is_success() => return Ok(()),
            Ok(Ok(answer)) => answer.text(),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "no answer".to_owned(),
        };
        ensure!(
            Instant::now() < deadline,
            "no {order} of {} in {RECOVERY:?}: {why}",
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
        Fault::RestartDaemon(node) => {
            nodes[*node].end_daemon().await?;
            sleep(lasts).await;
            nodes[*node].start()
        }
        Fault::KillShim(node) => {
            nodes[*node].kill_shim()?;
            sleep(lasts).await;
            Ok(())
        }
        Fault::ReplaceShim(node) => {
            let deadline = Instant::now() + RECOVERY;
            // It may just be started.
            while let Err(error) = nodes[*node].replace_shim() {
                if Instant::now() > deadline {
                    return Err(error);
                }
                sleep(POLL).await;
            }
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
            nodes[*node].signal_daemon(Signal::SIGSTOP)?;
            sleep(lasts).await;
            nodes[*node].signal_daemon(Signal::SIGCONT)
        }
        Fault::PauseShim(node) => {
            nodes[*node].signal_shim(Signal::SIGSTOP)?;
            sleep(lasts).await;
            nodes[*node].signal_shim(Signal::SIGCONT)
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
        Fault::PauseQuorum(first) => {
            let members = cluster.members().iter().cycle().skip(*first);
            let most: Vec<_> = members.take(cluster.members().len() / 2 + 1).collect();
            for member in &most {
                member.signal(Signal::SIGSTOP)?;
            }
            sleep(lasts).await;
            for member in &most {
                member.signal(Signal::SIGCONT)?;
            }
            Ok(())
        }
        Fault::PauseDocker => {
            cluster.signal_docker(Signal::SIGSTOP)?;
            sleep(lasts).await;
            cluster.signal_docker(Signal::SIGCONT)
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
        | Fault::LoseReply(_)
        | Fault::CutPeers(..)
        | Fault::LoseToPeer(..) => {
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
        Fault::LoseReply(node) => members()
            .map(|from| Cut::Reply {
                from,
                to: host(node),
                port: ETCD_PORT,
            })
            .collect(),
        Fault::CutPeers(one, other) => vec![Cut::Between(host(one), host(other))],
        Fault::LoseToPeer(from, to) => vec![Cut::OneWay {
            from: host(from),
            to: host(to),
        }],
        _ => Vec::new(),
    }
}
