//! What befalls a fleet, drawn from a seed: plans only, so that a seed always means the same.

use std::fmt;
use std::time::Duration;

use fastrand::Rng;

/// How long the fleet's time-outs are, for faults that are to be shorter or longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scale {
    /// A node that is silent for so long is taken over.
    pub takeover: Duration,
    /// The protocol bears a shim that stands still for so long.
    pub slack: Duration,
}

/// What is done to a fleet. Nodes and members are meant by their index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    KillDaemon(usize),
    KillShim(usize),
    /// Daemon and shim at once, and both are started again at once: a shim that stays dead is beyond
    /// what the protocol assumes.
    KillBoth(usize),
    PauseDaemon(usize),
    PauseShim(usize),
    /// Power fails.
    LoseMachine(usize),
    CutFromAll(usize),
    CutFromEtcd(usize),
    /// What the node sends to etcd is lost.
    LoseRequests(usize),
    /// What etcd answers is lost.
    LoseReplies(usize),
    CutPeers(usize, usize),
    KillLeader,
    /// Most members stand still.
    PauseQuorum,
    /// The machine is said to be going, and stays.
    Preempt(usize),
    /// The node is emptied, and may go on.
    Drain(usize),
    /// The Docker that all nodes have beside their own runtime stands still.
    PauseDocker,
    KillDocker,
}

/// What a fault befalls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Node(usize),
    Etcd,
    Docker,
}

impl Fault {
    /// Whether another one may happen meanwhile: not to the same place twice, and none
    /// beside a shim that stands still, as what is done to the one would prolong the other.
    fn goes_with(&self, other: &Self) -> bool {
        let is_brief = |fault: &Self| matches!(fault, Self::PauseShim(_));
        let (own, others) = (self.of(), other.of());
        !is_brief(self) && !is_brief(other) && own.iter().all(|one| !others.contains(one))
    }

    fn of(&self) -> Vec<Place> {
        match self {
            Self::KillDaemon(node)
            | Self::KillShim(node)
            | Self::KillBoth(node)
            | Self::PauseDaemon(node)
            | Self::PauseShim(node)
            | Self::LoseMachine(node)
            | Self::CutFromAll(node)
            | Self::CutFromEtcd(node)
            | Self::LoseRequests(node)
            | Self::LoseReplies(node)
            | Self::Preempt(node)
            | Self::Drain(node) => vec![Place::Node(*node)],
            Self::CutPeers(one, other) => vec![Place::Node(*one), Place::Node(*other)],
            Self::KillLeader | Self::PauseQuorum => vec![Place::Etcd],
            Self::PauseDocker | Self::KillDocker => vec![Place::Docker],
        }
    }
}

/// A fault and how long it lasts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    pub fault: Fault,
    pub lasts: Duration,
    /// Another one at the same time, and how long that lasts.
    pub beside: Option<(Fault, Duration)>,
    /// Afterwards, until the next one; `None`: until the fleet is well.
    pub pause: Option<Duration>,
}

/// One in so many events is two faults at once, if they go together.
const TWO_ONE_IN: u32 = 5;

/// The next one; Docker's only where there is a Docker.
pub fn draw(random: &mut Rng, nodes: usize, docker: bool, scale: Scale) -> Event {
    let (fault, lasts) = draw_one(random, nodes, docker, scale);
    let two = random.u32(..TWO_ONE_IN) == 0;
    let beside = two.then(|| draw_one(random, nodes, docker, scale));
    let beside = beside.filter(|(other, _)| fault.goes_with(other));
    let takeover = ms(scale.takeover);
    let pause = random.bool().then(|| random.u64(0..=takeover / 2));
    // A shim dies at most once within the takeover time: the protocol's assumption, too.
    let ends_shim = |fault: &Fault| {
        matches!(
            fault,
            Fault::KillShim(_) | Fault::KillBoth(_) | Fault::PauseShim(_)
        )
    };
    let waits = ends_shim(&fault) || beside.as_ref().is_some_and(|(other, _)| ends_shim(other));
    Event {
        fault,
        lasts,
        beside,
        pause: pause.filter(|_| !waits).map(Duration::from_millis),
    }
}

fn draw_one(random: &mut Rng, nodes: usize, docker: bool, scale: Scale) -> (Fault, Duration) {
    let node = random.usize(..nodes);
    let other = (node + random.usize(1..nodes.max(2))) % nodes;
    let fault = match random.u8(..if docker { 106 } else { 100 }) {
        0..10 => Fault::KillDaemon(node),
        10..18 => Fault::KillShim(node),
        18..24 => Fault::KillBoth(node),
        24..34 => Fault::PauseDaemon(node),
        34..40 => Fault::PauseShim(node),
        40..54 => Fault::LoseMachine(node),
        54..64 => Fault::CutFromAll(node),
        64..70 => Fault::CutFromEtcd(node),
        70..76 => Fault::LoseRequests(node),
        76..82 => Fault::LoseReplies(node),
        82..85 => Fault::CutPeers(node, other),
        85..89 => Fault::KillLeader,
        89..92 => Fault::PauseQuorum,
        92..96 => Fault::Preempt(node),
        96..100 => Fault::Drain(node),
        100..103 => Fault::PauseDocker,
        _ => Fault::KillDocker,
    };
    let takeover = ms(scale.takeover);
    let lasts = match fault {
        Fault::KillBoth(_) => 0,
        // Longer would be beyond what the protocol assumes of a machine.
        Fault::PauseShim(_) => random.u64(0..=ms(scale.slack) / 2),
        Fault::KillDaemon(_)
        | Fault::KillShim(_)
        | Fault::Preempt(_)
        | Fault::Drain(_)
        | Fault::KillDocker => random.u64(0..=takeover / 2),
        // Half of them are over before anybody is taken over.
        _ if random.bool() => random.u64(0..=takeover),
        _ => random.u64(takeover..=takeover + takeover / 2),
    };
    (fault, Duration::from_millis(lasts))
}

fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl fmt::Display for Event {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "{} for {} ms",
            self.fault,
            self.lasts.as_millis()
        )?;
        match &self.beside {
            Some((fault, lasts)) => write!(formatter, ", {fault} for {} ms", lasts.as_millis()),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |node: &usize| format!("n{}", node + 1);
        let what = match self {
            Fault::KillDaemon(node) => format!("the daemon of {} is killed", name(node)),
            Fault::KillShim(node) => format!("the shim of {} is killed", name(node)),
            Fault::KillBoth(node) => format!("daemon and shim of {} are killed", name(node)),
            Fault::PauseDaemon(node) => format!("the daemon of {} stands still", name(node)),
            Fault::PauseShim(node) => format!("the shim of {} stands still", name(node)),
            Fault::LoseMachine(node) => format!("the power of {} fails", name(node)),
            Fault::CutFromAll(node) => format!("{} is cut off all", name(node)),
            Fault::CutFromEtcd(node) => format!("{} is cut off etcd", name(node)),
            Fault::LoseRequests(node) => format!("{}'s requests to etcd are lost", name(node)),
            Fault::LoseReplies(node) => format!("etcd's answers to {} are lost", name(node)),
            Fault::CutPeers(one, other) => {
                format!("{} and {} are cut off each other", name(one), name(other))
            }
            Fault::KillLeader => "etcd's leader is killed".to_owned(),
            Fault::PauseQuorum => "most of etcd stands still".to_owned(),
            Fault::Preempt(node) => format!("{} is preempted, and stays", name(node)),
            Fault::Drain(node) => format!("{} is drained, and goes on", name(node)),
            Fault::PauseDocker => "Docker stands still".to_owned(),
            Fault::KillDocker => "Docker is killed".to_owned(),
        };
        formatter.write_str(&what)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const SCALE: Scale = Scale {
        takeover: Duration::from_secs(6),
        slack: Duration::from_secs(1),
    };

    fn drawn(seed: u64) -> Vec<Event> {
        let mut random = Rng::with_seed(seed);
        (0..1_000)
            .map(|_| draw(&mut random, 3, true, SCALE))
            .collect()
    }

    #[test]
    fn a_seed_always_means_the_same_and_every_fault_comes() {
        assert_eq!(drawn(7), drawn(7));
        assert_ne!(drawn(7), drawn(8));
        let kinds: BTreeSet<String> = drawn(7)
            .iter()
            .map(|event| format!("{:?}", event.fault).replace(|c: char| !c.is_alphabetic(), ""))
            .collect();
        assert_eq!(kinds.len(), 17, "{kinds:?}");
    }

    #[test]
    fn some_faults_come_two_at_a_time() {
        let events = drawn(3);
        let twice = events.iter().filter(|event| event.beside.is_some());
        assert!((50..200).contains(&twice.count()), "of {}", events.len());
    }

    #[test]
    fn nothing_is_beyond_what_the_protocol_assumes() {
        for event in drawn(3) {
            if let Fault::PauseShim(_) = event.fault {
                assert!(event.lasts <= SCALE.slack / 2, "{event}");
            }
            if let Fault::CutPeers(one, other) = event.fault {
                assert_ne!(one, other);
            }
            if let Fault::KillBoth(_) = event.fault {
                assert!(event.lasts.is_zero(), "{event}");
            }
            if let Some((other, _)) = &event.beside {
                assert!(event.fault.goes_with(other), "{event}");
            }
        }
    }
}
