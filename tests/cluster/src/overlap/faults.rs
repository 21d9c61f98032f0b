//! What befalls a fleet, drawn from a seed: plans only, so that a seed always means the same.

use std::collections::BTreeSet;
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

/// What there is to be disturbed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Targets {
    pub nodes: usize,
    pub members: usize,
    /// Whether nodes have a Docker as well.
    pub docker: bool,
}

/// What is done to a fleet. Nodes and members are meant by their index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    KillDaemon(usize),
    /// It is told to end, and started again.
    RestartDaemon(usize),
    KillShim(usize),
    /// The shim goes on as a new program, with all that it runs.
    ReplaceShim(usize),
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
    /// One answer of each member is lost, with the connection that it comes by.
    LoseReply(usize),
    CutPeers(usize, usize),
    /// What the first sends to the second is lost.
    LoseToPeer(usize, usize),
    KillLeader,
    /// Most members stand still: this one and those that follow it.
    PauseQuorum(usize),
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
    /// What it is called, whomever it befalls.
    #[must_use]
    pub fn kind(&self) -> String {
        let text = format!("{self:?}");
        text.split('(').next().unwrap_or_default().to_owned()
    }

    /// Every one there is; Docker's only where there is a Docker.
    #[must_use]
    pub fn kinds(docker: bool) -> BTreeSet<String> {
        let every = every(0, 1, 0, docker);
        every.map(|(_, fault)| fault.kind()).collect()
    }

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
            | Self::RestartDaemon(node)
            | Self::KillShim(node)
            | Self::ReplaceShim(node)
            | Self::KillBoth(node)
            | Self::PauseDaemon(node)
            | Self::PauseShim(node)
            | Self::LoseMachine(node)
            | Self::CutFromAll(node)
            | Self::CutFromEtcd(node)
            | Self::LoseRequests(node)
            | Self::LoseReplies(node)
            | Self::LoseReply(node)
            | Self::Preempt(node)
            | Self::Drain(node) => vec![Place::Node(*node)],
            Self::CutPeers(one, other) | Self::LoseToPeer(one, other) => {
                vec![Place::Node(*one), Place::Node(*other)]
            }
            Self::KillLeader | Self::PauseQuorum(_) => vec![Place::Etcd],
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

impl Event {
    /// The one, or both.
    pub fn faults(&self) -> impl Iterator<Item = &Fault> {
        let beside = self.beside.iter().map(|(fault, _)| fault);
        std::iter::once(&self.fault).chain(beside)
    }
}

/// One in so many events is two faults at once, if they go together.
const TWO_ONE_IN: u32 = 5;

/// The next one.
pub fn draw(random: &mut Rng, targets: Targets, scale: Scale) -> Event {
    let (fault, lasts) = draw_one(random, targets, scale);
    let two = random.u32(..TWO_ONE_IN) == 0;
    let beside = two.then(|| draw_one(random, targets, scale));
    let beside = beside.filter(|(other, _)| fault.goes_with(other));
    let takeover = ms(scale.takeover);
    let pause = random.bool().then(|| random.u64(0..=takeover / 2));
    // A shim dies at most once within the takeover time: the protocol's assumption, too. One that
    // becomes another program stands still meanwhile.
    let ends_shim = |fault: &Fault| {
        matches!(
            fault,
            Fault::KillShim(_) | Fault::ReplaceShim(_) | Fault::KillBoth(_) | Fault::PauseShim(_)
        )
    };
    let mut event = Event {
        fault,
        lasts,
        beside,
        pause: pause.map(Duration::from_millis),
    };
    if event.faults().any(ends_shim) {
        event.pause = None;
    }
    event
}

/// Every kind of fault as it befalls these, and how often it comes.
fn every(
    node: usize,
    other: usize,
    member: usize,
    docker: bool,
) -> impl Iterator<Item = (usize, Fault)> {
    let every = [
        (10, Fault::KillDaemon(node)),
        (6, Fault::RestartDaemon(node)),
        (8, Fault::KillShim(node)),
        (4, Fault::ReplaceShim(node)),
        (6, Fault::KillBoth(node)),
        (10, Fault::PauseDaemon(node)),
        (6, Fault::PauseShim(node)),
        (14, Fault::LoseMachine(node)),
        (10, Fault::CutFromAll(node)),
        (6, Fault::CutFromEtcd(node)),
        (6, Fault::LoseRequests(node)),
        (6, Fault::LoseReplies(node)),
        (4, Fault::LoseReply(node)),
        (3, Fault::CutPeers(node, other)),
        (3, Fault::LoseToPeer(node, other)),
        (4, Fault::KillLeader),
        (3, Fault::PauseQuorum(member)),
        (4, Fault::Preempt(node)),
        (4, Fault::Drain(node)),
        (3, Fault::PauseDocker),
        (3, Fault::KillDocker),
    ];
    let is_there = move |(_, fault): &(usize, Fault)| docker || fault.of() != [Place::Docker];
    every.into_iter().filter(is_there)
}

fn draw_one(random: &mut Rng, targets: Targets, scale: Scale) -> (Fault, Duration) {
    let Targets { nodes, members, .. } = targets;
    let node = random.usize(..nodes);
    let other = (node + random.usize(1..nodes.max(2))) % nodes;
    let member = random.usize(..members.max(1));
    let mut lots: Vec<Fault> = every(node, other, member, targets.docker)
        .flat_map(|(often, fault)| std::iter::repeat_n(fault, often))
        .collect();
    let fault = lots.swap_remove(random.usize(..lots.len()));
    let takeover = ms(scale.takeover);
    let lasts = match fault {
        Fault::KillBoth(_) | Fault::ReplaceShim(_) => 0,
        // Longer would be beyond what the protocol assumes of a machine.
        Fault::PauseShim(_) => random.u64(0..=ms(scale.slack) / 2),
        Fault::KillDaemon(_)
        | Fault::RestartDaemon(_)
        | Fault::KillShim(_)
        | Fault::LoseReply(_)
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
            Fault::RestartDaemon(node) => format!("the daemon of {} is ended", name(node)),
            Fault::KillShim(node) => format!("the shim of {} is killed", name(node)),
            Fault::ReplaceShim(node) => format!("the shim of {} is replaced", name(node)),
            Fault::KillBoth(node) => format!("daemon and shim of {} are killed", name(node)),
            Fault::PauseDaemon(node) => format!("the daemon of {} stands still", name(node)),
            Fault::PauseShim(node) => format!("the shim of {} stands still", name(node)),
            Fault::LoseMachine(node) => format!("the power of {} fails", name(node)),
            Fault::CutFromAll(node) => format!("{} is cut off all", name(node)),
            Fault::CutFromEtcd(node) => format!("{} is cut off etcd", name(node)),
            Fault::LoseRequests(node) => format!("{}'s requests to etcd are lost", name(node)),
            Fault::LoseReplies(node) => format!("etcd's answers to {} are lost", name(node)),
            Fault::LoseReply(node) => {
                format!(
                    "one answer of each member of etcd to {} is lost",
                    name(node)
                )
            }
            Fault::CutPeers(one, other) => {
                format!("{} and {} are cut off each other", name(one), name(other))
            }
            Fault::LoseToPeer(from, to) => {
                format!("what {} sends to {} is lost", name(from), name(to))
            }
            Fault::KillLeader => "etcd's leader is killed".to_owned(),
            Fault::PauseQuorum(member) => {
                format!("most of etcd stands still, from e{} on", member + 1)
            }
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
    use super::*;

    const SCALE: Scale = Scale {
        takeover: Duration::from_secs(6),
        slack: Duration::from_secs(1),
    };

    fn drawn_of(seed: u64, docker: bool) -> Vec<Event> {
        let targets = Targets {
            nodes: 3,
            members: 3,
            docker,
        };
        let mut random = Rng::with_seed(seed);
        (0..1_000)
            .map(|_| draw(&mut random, targets, SCALE))
            .collect()
    }

    fn drawn(seed: u64) -> Vec<Event> {
        drawn_of(seed, true)
    }

    fn kinds(events: &[Event]) -> BTreeSet<String> {
        events
            .iter()
            .flat_map(Event::faults)
            .map(Fault::kind)
            .collect()
    }

    #[test]
    fn a_seed_always_means_the_same_and_every_fault_comes() {
        assert_eq!(drawn(7), drawn(7));
        assert_ne!(drawn(7), drawn(8));
        assert_eq!(kinds(&drawn(7)), Fault::kinds(true));
        assert_eq!(Fault::kinds(true).len(), 21);
    }

    #[test]
    fn where_there_is_no_docker_nothing_befalls_it() {
        let kinds = kinds(&drawn_of(7, false));
        assert_eq!(kinds, Fault::kinds(false));
        assert!(!kinds.iter().any(|kind| kind.contains("Docker")));
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
            if let Fault::CutPeers(one, other) | Fault::LoseToPeer(one, other) = event.fault {
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
