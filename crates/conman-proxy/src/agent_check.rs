//! Answers HAProxy's agent check: one line for each connection, with a weight from the node's load.
//!
//! One task serves one connection at a time and reads nothing, so clients that stay, or are many,
//! cost nothing. The line fits into the empty send buffer of a new socket.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;
use std::{fs, io};

use conman_watchdog::essential;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::Readiness;

/// The task's name in the log when it ends.
const NAME: &str = "agent";
/// How long HAProxy gets `ready` after the node does not leave any more: it keeps `drain` until then. Not
/// for longer, because `ready` would also end an operator's maintenance. Several checks apart.
const READY_FOR: Duration = Duration::from_secs(10);
/// Pause after an error that would recur at once, for example `EMFILE`.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Below this share of memory or places that are free, the weight falls.
const SCARCE: f64 = 0.2;

/// File in the state directory: HAProxy was told that the node does not leave any more. A daemon that finds none
/// is on a machine that left, or on a new one with its name, and HAProxy may still drain the name.
const UNDRAINED: &str = "agent-undrained";

/// A quantity that bounds a node, and how much of it is free, in any unit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Share {
    pub free: u64,
    /// 0 if it is unknown, which bounds nothing.
    pub all: u64,
}

/// What a node's weight is computed from.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct BalancedLoad {
    /// Share of the time in which a task waited for a processor.
    pub cpu_pressure_percent: f64,
    pub memory: Share,
    /// Sessions.
    pub places: Share,
}

/// What an agent check is answered from. It must not wait.
pub trait AgentSource: Send + 'static {
    /// The node's state; it also notes that a load balancer has probed the node.
    fn answer_probe(&self) -> Readiness;

    fn load(&self) -> BalancedLoad;
}

/// Answers at `address` until `closing`. `state_dir` keeps whether HAProxy drains this node.
///
/// # Errors
/// The address cannot be bound.
pub async fn answer_agent_checks(
    address: SocketAddr,
    state_dir: &Path,
    source: impl AgentSource,
    closing: CancellationToken,
) -> io::Result<()> {
    let listener = TcpListener::bind(address).await?;
    let undrained = state_dir.join(UNDRAINED);
    let mut saved = undrained.exists();
    let mut agent = Agent {
        left: !saved,
        back_at: None,
    };
    let serving = async move {
        loop {
            match listener.accept().await {
                Ok((mut client, _)) => {
                    let state = source.answer_probe();
                    let now = Instant::now();
                    let line = agent.line(state, &source.load(), now);
                    let is_undrained = agent.is_undrained(now);
                    if std::mem::replace(&mut saved, is_undrained) != is_undrained {
                        let undrained = undrained.clone();
                        // Not waited for: the disk may hang.
                        tokio::task::spawn_blocking(move || save(&undrained, is_undrained));
                    }
                    // A client that has left does not matter.
                    let _: io::Result<()> = client.write_all(line.as_bytes()).await;
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept an agent check");
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    };
    // Cancel safe: an answer that is lost at the end is not needed.
    tokio::spawn(essential(NAME, async move {
        closing.run_until_cancelled(serving).await;
    }));
    Ok(())
}

fn save(undrained: &Path, is_undrained: bool) {
    let saved = match is_undrained {
        true => fs::write(undrained, ""),
        false => fs::remove_file(undrained),
    };
    if let Err(error) = saved {
        tracing::warn!(%error, path = %undrained.display(), "cannot save whether HAProxy drains this node");
    }
}

#[derive(Debug, Default)]
struct Agent {
    /// HAProxy was told to drain the node, or may have been.
    left: bool,
    /// When the node stopped leaving.
    back_at: Option<Instant>,
}

impl Agent {
    fn line(&mut self, state: Readiness, load: &BalancedLoad, now: Instant) -> String {
        let weight = match state {
            Readiness::Ready => weight(load),
            // Not zero: all nodes may be in this state.
            Readiness::Lapsed => 1,
            Readiness::CutOff
            | Readiness::Cordoned
            | Readiness::Draining
            | Readiness::Preempted
            | Readiness::Stopping => {
                self.left = true;
                return "drain\n".to_owned();
            }
            // Not `down`: one answer would make HAProxy close the node's clients. Its own check of `/readyz`
            // decides, which fails too, and several times first.
            Readiness::Down => return "up 1%\n".to_owned(),
        };
        if std::mem::take(&mut self.left) {
            self.back_at = Some(now);
        }
        match self.is_undrained(now) {
            true => format!("up {weight}%\n"),
            false => format!("ready up {weight}%\n"),
        }
    }

    /// Whether HAProxy has had the time to learn that the node does not leave.
    fn is_undrained(&self, now: Instant) -> bool {
        !self.left && self.back_at.is_none_or(|at| now >= at + READY_FOR)
    }
}

/// The scarcest of processors, memory and places, in percent of the configured weight; at least 1.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a rough share between 0 and 1"
)]
fn weight(load: &BalancedLoad) -> u32 {
    let share = |share: Share| match share.all {
        0 => 1.0,
        all => share.free as f64 / all as f64 / SCARCE,
    };
    let idle = 1.0 - load.cpu_pressure_percent / 100.0;
    let scarcest = idle.min(share(load.memory)).min(share(load.places));
    (scarcest.clamp(0.01, 1.0) * 100.0).round() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(pressure: f64, memory: u64, taken: u64) -> BalancedLoad {
        BalancedLoad {
            cpu_pressure_percent: pressure,
            memory: Share {
                free: memory,
                all: 1_000,
            },
            places: Share {
                free: 100 - taken,
                all: 100,
            },
        }
    }

    #[test]
    fn the_weight_follows_what_is_scarcest() {
        assert_eq!(weight(&load(0.0, 1_000, 0)), 100);
        assert_eq!(weight(&load(0.0, 200, 80)), 100);
        assert_eq!(weight(&load(30.0, 1_000, 0)), 70);
        assert_eq!(weight(&load(30.0, 100, 0)), 50);
        assert_eq!(weight(&load(30.0, 100, 95)), 25);
        assert_eq!(weight(&load(100.0, 0, 100)), 1);
    }

    #[test]
    fn ready_is_said_for_a_while_after_leaving_was_taken_back_and_never_else() {
        let mut agent = Agent::default();
        let began = Instant::now();
        let mut at = |state, seconds| {
            let now = began + Duration::from_secs(seconds);
            agent.line(state, &load(0.0, 1_000, 0), now)
        };
        assert_eq!(at(Readiness::Ready, 0), "up 100%\n");
        assert_eq!(at(Readiness::Lapsed, 1), "up 1%\n");
        for state in [
            Readiness::CutOff,
            Readiness::Cordoned,
            Readiness::Draining,
            Readiness::Preempted,
            Readiness::Stopping,
        ] {
            assert_eq!(at(state, 2), "drain\n");
        }
        assert_eq!(at(Readiness::Lapsed, 60), "ready up 1%\n");
        assert_eq!(at(Readiness::Ready, 69), "ready up 100%\n");
        assert_eq!(at(Readiness::Ready, 71), "up 100%\n");
    }

    #[test]
    fn a_daemon_of_a_machine_that_left_or_is_new_says_ready_at_first() {
        let mut agent = Agent {
            left: true,
            back_at: None,
        };
        let began = Instant::now();
        let mut at = |seconds| {
            let now = began + Duration::from_secs(seconds);
            let line = agent.line(Readiness::Ready, &load(0.0, 1_000, 0), now);
            (line, agent.is_undrained(now))
        };
        assert_eq!(at(0), ("ready up 100%\n".to_owned(), false));
        assert_eq!(at(11), ("up 100%\n".to_owned(), true));
    }
}
