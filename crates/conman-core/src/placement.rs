//! Chooses the node of a fleet that starts a session.
//!
//! ```text
//! nodes ─ refused, each with its reason
//!       └ fit ─ ordered per session (by a hash of its id and the node's name)
//!             └ the first, unless the second is clearly less busy; then again among the rest
//! ```
//!
//! The nodes' data is always a little old, and all nodes have the same data. If each chose the
//! least busy node, all would choose the same one until the next announcement. Two candidates that
//! depend on the session spread the choice, and the better of two random ones is nearly as good as
//! the best (M. Mitzenmacher, "The power of two choices in randomized load balancing"). Nodes with
//! the same data choose the same node for a session, so that two nodes that receive a request for
//! it at once do not claim it for different nodes. CPU pressure changes all the time, so if two
//! loads are similar, the session's order decides (D. Thaler and C. Ravishankar, "Using name-based
//! mappings to increase hit rates", which is rendezvous hashing): noise and data of different age
//! do not change the choice.
//!
//! The node that received the request is preferred unless it is clearly busier than the first, or the
//! request is for any node. Among the others, a node that has clearly less than its share of the sessions
//! comes first, so that one that has joined gets its share although all have room.
//!
//! This module does not decide ownership: the chosen node still has to claim.

mod share;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use conman_proto::{NodeStanding, RuntimeKind, SessionId};

pub use share::excess;

/// How much busier a node may be than another and still be preferred, because it received the
/// request, which saves all of the session's traffic a hop, or because it comes first in the
/// session's order. A fraction of a whole node; more than the usual change of the ten-second
/// pressure.
const NEAR_TIE: f64 = 0.1;

/// Weight of each start under way, added to the share of sessions: starting takes CPU time that the
/// pressure of the last ten seconds does not show yet.
const STARTING_WEIGHT: f64 = 0.02;

/// A node as placement sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeView {
    pub name: String,
    pub standing: NodeStanding,
    /// Takes no new sessions.
    pub draining: bool,
    /// Whether it has announced its peer listener; ignored for the node that received the request.
    pub reachable: bool,
    /// It does not reach most of the nodes that reach each other ([`crate::reach`]).
    pub cut_off: bool,
    /// Age of its data.
    pub announced_ago_ms: u64,
    pub labels: BTreeMap<String, String>,
    /// Names of its templates.
    pub templates: Vec<String>,
    pub max_sessions: u32,
    /// Its default runtime, if it has announced that.
    pub runtime: Option<RuntimeKind>,
    /// All its runtimes, if its announcement could be read.
    pub runtimes: Option<BTreeSet<RuntimeKind>>,
    /// Runtimes that could not start sessions when last checked, at most some seconds ago.
    pub ailing: BTreeSet<RuntimeKind>,
    pub load: NodeBusy,
}

/// The load of a node.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct NodeBusy {
    /// Sessions that have not ended, including those that are starting.
    pub sessions: u32,
    pub starting: u32,
    /// Share of the last 10 s in which some task waited for a processor, in percent.
    pub cpu_pressure_percent: f64,
    pub memory_available_bytes: u64,
    /// 0 if unknown; then memory is ignored.
    pub memory_total_bytes: u64,
}

/// The session to place.
#[derive(Debug, Clone, Copy)]
pub struct Demand<'a> {
    pub session: &'a SessionId,
    pub template: Option<&'a str>,
    /// Each node's default if absent.
    pub runtime: Option<RuntimeKind>,
    /// Labels that the node must have, each with this value.
    pub labels: &'a BTreeMap<String, String>,
    /// Memory that the session may use.
    pub memory_bytes: u64,
    /// No client's request is for it, so that all nodes are as near.
    pub anywhere: bool,
}

/// Limits above which a node takes no more sessions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PlacementLimits {
    /// Data older than this is ignored. Announcements come every few seconds.
    pub stale_after_ms: u64,
    /// Pressure above which further sessions would slow down all of a node's sessions.
    pub max_cpu_pressure_percent: f64,
    /// Fraction of the memory that stays free for the running sessions.
    pub min_memory_free: f64,
}

impl Default for PlacementLimits {
    fn default() -> Self {
        Self {
            stale_after_ms: 15_000,
            max_cpu_pressure_percent: 80.0,
            min_memory_free: 0.05,
        }
    }
}

/// Where a session may run.
#[derive(Debug, Clone, PartialEq)]
pub struct Placement {
    /// Names of nodes, best first. If there are no others: nodes that are only short of CPU time;
    /// if there are none of those either, nodes with a failing runtime, which may recover; last,
    /// nodes without the runtime, because a node's own template may need another one.
    pub candidates: Vec<String>,
    /// The remaining nodes of those classes, for something that no candidate has, for example its
    /// image.
    pub second: Vec<String>,
    /// Whether a node that is in neither list may have the requested runtime.
    pub runtime_elsewhere: bool,
    /// In the order of the nodes.
    pub refused: Vec<Refused>,
}

/// A node that is not used, or only if there is no other.
#[derive(Debug, Clone, PartialEq)]
pub struct Refused {
    pub node: String,
    pub why: Unfit,
}

/// Why a node takes no session.
#[derive(Debug, Clone, PartialEq)]
pub enum Unfit {
    Draining,
    Joining,
    Late,
    Silent,
    Fenced,
    Unreachable,
    CutOff,
    Stale {
        announced_ago_ms: u64,
    },
    Full {
        max_sessions: u32,
    },
    NoTemplate {
        template: String,
    },
    Label {
        name: String,
        wanted: String,
        found: Option<String>,
    },
    Memory {
        available_bytes: u64,
    },
    Pressure {
        percent: f64,
    },
    Runtime {
        runtime: RuntimeKind,
    },
    NoRuntime {
        runtime: RuntimeKind,
        has: Vec<RuntimeKind>,
    },
}

impl fmt::Display for Unfit {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Draining => formatter.write_str("is draining"),
            Self::Joining => formatter.write_str("has not joined the fleet yet"),
            Self::Late => formatter.write_str("is late to renew its ownership"),
            Self::Silent => formatter.write_str("has not been heard from for a while"),
            Self::Fenced => formatter.write_str("is fenced"),
            Self::Unreachable => formatter.write_str("has announced no `listen.peers`"),
            Self::CutOff => formatter.write_str("does not reach most of the other nodes"),
            Self::Stale { announced_ago_ms } => {
                write!(
                    formatter,
                    "announced itself {} s ago",
                    announced_ago_ms / 1_000
                )
            }
            Self::Full { max_sessions } => {
                write!(
                    formatter,
                    "has its {max_sessions} sessions (limits.max_sessions)"
                )
            }
            Self::NoTemplate { template } => write!(formatter, "has no template `{template}`"),
            Self::Label {
                name,
                wanted,
                found,
            } => match found {
                Some(found) => write!(formatter, "has `{name} = {found}`, not `{wanted}`"),
                None => write!(formatter, "has no label `{name} = {wanted}`"),
            },
            Self::Memory { available_bytes } => {
                write!(
                    formatter,
                    "has only {} MiB of memory left",
                    available_bytes >> 20
                )
            }
            Self::Pressure { percent } => {
                write!(
                    formatter,
                    "has tasks that wait for a CPU {percent:.0} % of the time"
                )
            }
            Self::Runtime { runtime } => {
                write!(
                    formatter,
                    "has a {runtime} runtime that failed its last check"
                )
            }
            Self::NoRuntime { runtime, has } => {
                let has: Vec<String> = has.iter().map(ToString::to_string).collect();
                write!(
                    formatter,
                    "has no {runtime} runtime, only {}",
                    has.join(" and ")
                )
            }
        }
    }
}

/// Orders the nodes for a session without an owner. `me` is the node that received the request;
/// only its own data is always current.
#[must_use]
pub fn place(
    me: &str,
    nodes: &[NodeView],
    demand: Demand<'_>,
    limits: &PlacementLimits,
) -> Placement {
    let mut refused = Vec::new();
    let (mut fit, mut pressed, mut ailing) = (Vec::new(), Vec::new(), Vec::new());
    let (mut lacking, mut runtime_elsewhere) = (Vec::new(), false);
    for node in nodes {
        match unfit(node, node.name == me, &demand, limits) {
            None => fit.push(node),
            Some(why) => {
                match why {
                    Unfit::Pressure { .. } => pressed.push(node),
                    Unfit::Runtime { .. } => ailing.push(node),
                    Unfit::NoRuntime { .. } => lacking.push(node),
                    _ => {
                        let may_have =
                            demand.runtime.is_some() && lacks_runtime(node, &demand).is_none();
                        runtime_elsewhere |= may_have;
                    }
                }
                let node = node.name.clone();
                refused.push(Refused { node, why });
            }
        }
    }
    let choices = [fit, pressed, ailing, lacking].into_iter();
    let choices = choices.filter(|nodes| !nodes.is_empty());
    let near = (!demand.anywhere).then_some(me);
    let mut choices = choices.map(|nodes| in_order(near, nodes, demand.session));
    Placement {
        candidates: choices.next().unwrap_or_default(),
        second: choices.flatten().collect(),
        runtime_elsewhere,
        refused,
    }
}

/// Returns why the node takes no session at all, if it takes none.
fn takes_none(node: &NodeView, is_me: bool, limits: &PlacementLimits) -> Option<Unfit> {
    match node.standing {
        NodeStanding::Live => {}
        NodeStanding::Joining => return Some(Unfit::Joining),
        NodeStanding::Late => return Some(Unfit::Late),
        NodeStanding::Silent => return Some(Unfit::Silent),
        NodeStanding::Fenced => return Some(Unfit::Fenced),
    }
    if node.draining {
        return Some(Unfit::Draining);
    }
    if !is_me && !node.reachable {
        return Some(Unfit::Unreachable);
    }
    if node.cut_off {
        return Some(Unfit::CutOff);
    }
    if !is_me && node.announced_ago_ms > limits.stale_after_ms {
        let announced_ago_ms = node.announced_ago_ms;
        return Some(Unfit::Stale { announced_ago_ms });
    }
    None
}

fn unfit(
    node: &NodeView,
    is_me: bool,
    demand: &Demand<'_>,
    limits: &PlacementLimits,
) -> Option<Unfit> {
    if let Some(why) = takes_none(node, is_me, limits) {
        return Some(why);
    }
    if let Some(template) = demand.template
        && !node.templates.iter().any(|known| known == template)
    {
        let template = template.to_owned();
        return Some(Unfit::NoTemplate { template });
    }
    let missing = demand
        .labels
        .iter()
        .find(|(name, wanted)| node.labels.get(*name) != Some(wanted));
    if let Some((name, wanted)) = missing {
        return Some(Unfit::Label {
            name: name.clone(),
            wanted: wanted.clone(),
            found: node.labels.get(name).cloned(),
        });
    }
    if node.load.sessions >= node.max_sessions {
        let max_sessions = node.max_sessions;
        return Some(Unfit::Full { max_sessions });
    }
    let load = &node.load;
    let kept = load.memory_total_bytes as f64 * limits.min_memory_free;
    let left = load.memory_available_bytes as f64 - demand.memory_bytes as f64;
    if load.memory_total_bytes > 0 && left < kept {
        let available_bytes = load.memory_available_bytes;
        return Some(Unfit::Memory { available_bytes });
    }
    if let Some(lacks) = lacks_runtime(node, demand) {
        return Some(lacks);
    }
    let needed = demand.runtime.or(node.runtime);
    if let Some(runtime) = needed.filter(|needed| node.ailing.contains(needed)) {
        return Some(Unfit::Runtime { runtime });
    }
    let percent = load.cpu_pressure_percent;
    (percent >= limits.max_cpu_pressure_percent).then_some(Unfit::Pressure { percent })
}

/// Returns an error if the node has announced that it lacks the requested runtime.
fn lacks_runtime(node: &NodeView, demand: &Demand<'_>) -> Option<Unfit> {
    let (runtime, has) = (demand.runtime?, node.runtimes.as_ref()?);
    (!has.contains(&runtime)).then(|| Unfit::NoRuntime {
        runtime,
        has: has.iter().copied().collect(),
    })
}

fn in_order(near: Option<&str>, nodes: Vec<&NodeView>, session: &SessionId) -> Vec<String> {
    // Sorted in reverse: the last element is the next one.
    let mut hashed: Vec<(u64, &NodeView)> = nodes
        .into_iter()
        .map(|node| (rank(session.as_str(), &node.name), node))
        .collect();
    hashed.sort_unstable_by(|(one, a), (other, b)| other.cmp(one).then(b.name.cmp(&a.name)));
    let mut rest: Vec<&NodeView> = hashed.into_iter().map(|(_, node)| node).collect();
    let mut order = Vec::with_capacity(rest.len());
    while let Some(first) = rest.pop() {
        let Some(second) = rest.pop() else {
            order.push(first);
            break;
        };
        if comes_first(first, second) {
            rest.push(second);
            order.push(first);
        } else {
            rest.push(first);
            order.push(second);
        }
    }
    if let Some(me) = near {
        prefer_me(me, &mut order);
    }
    order.into_iter().map(|node| node.name.clone()).collect()
}

/// Moves the node that received the request to the front if it is hardly busier than the first.
fn prefer_me(me: &str, order: &mut [&NodeView]) {
    let Some(at) = order.iter().position(|node| node.name == me) else {
        return;
    };
    if is_near(order[at], order[0]) {
        order[..=at].rotate_right(1);
    }
}

/// Whether `one` stays before `other`: it is clearly less busy, or hardly busier and has not clearly more
/// sessions for its size.
fn comes_first(one: &NodeView, other: &NodeView) -> bool {
    !is_near(other, one) || is_near(one, other) && !share::exceeds(one, other)
}

/// Whether `one` is less busy than `other`, or hardly busier.
fn is_near(one: &NodeView, other: &NodeView) -> bool {
    busyness(one) <= busyness(other) + NEAR_TIE
}

/// How close a node is to its nearest limit: 0 for idle, 1 for full.
fn busyness(node: &NodeView) -> f64 {
    let load = &node.load;
    let sessions = f64::from(load.sessions) / f64::from(node.max_sessions.max(1));
    let memory = if load.memory_total_bytes == 0 {
        0.0
    } else {
        1.0 - load.memory_available_bytes as f64 / load.memory_total_bytes as f64
    };
    let pressure = load.cpu_pressure_percent / 100.0;
    sessions.max(memory).max(pressure) + f64::from(load.starting) * STARTING_WEIGHT
}

/// The position of node `me` among the `live` nodes in the order that `name` gives them: 0 is first.
/// `None` if it is not among them.
#[must_use]
pub fn turn(me: &str, live: &[&str], name: &str) -> Option<usize> {
    let score = |node: &str| rank(name, node);
    live.contains(&me).then(|| {
        let mine = (score(me), me);
        live.iter()
            .filter(|other| (score(other), **other) > mine)
            .count()
    })
}

/// A number that depends on both names and looks random: FNV-1a, then the finalizer of splitmix64,
/// because FNV's upper bits hardly depend on the last letters.
fn rank(name: &str, node: &str) -> u64 {
    let bytes = name.bytes().chain([0]).chain(node.bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ (hash >> 31)
}

#[cfg(test)]
mod tests;
