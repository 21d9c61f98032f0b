//! Nodes, their state and their limits.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Generation, LimitMet, RuntimeKind, SessionId};

/// Whether a node takes sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum NodeState {
    /// Serves and admits.
    Live,
    /// Still adopting what an earlier daemon left; serves what is adopted.
    Recovering,
    /// Takes no new sessions; the present ones stay and are served.
    Cordoned,
    /// Takes no new sessions, and moves the present ones away or has done so.
    Draining,
    /// A preemption notice came; kills and releases, or has done so.
    Preempted,
    /// The daemon stops; its sessions stay for the next one.
    Stopping,
}

impl NodeState {
    /// Every state.
    pub const ALL: [Self; 6] = [
        Self::Live,
        Self::Recovering,
        Self::Cordoned,
        Self::Draining,
        Self::Preempted,
        Self::Stopping,
    ];

    /// Returns the state as the API writes it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Recovering => "recovering",
            Self::Cordoned => "cordoned",
            Self::Draining => "draining",
            Self::Preempted => "preempted",
            Self::Stopping => "stopping",
        }
    }
}

/// A node as the API shows it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Node {
    pub name: String,
    /// Random id of this installation; everything it makes bears it.
    pub instance: String,
    pub version: String,
    pub state: NodeState,
    pub runtime: RuntimeKind,
    /// Why the runtime cannot start sessions at present; null when it can.
    pub runtime_error: Option<String>,
    /// All its runtimes, that one included; empty where it has not told them.
    #[serde(default)]
    pub runtimes: Vec<NodeRuntime>,
    pub sessions_running: u64,
    pub sessions_starting: u64,
    pub sessions_stuck: u64,
    /// Sessions that are paused.
    #[serde(default)]
    pub sessions_paused: u64,
    /// Sessions that are frozen because the node could not prove ownership.
    #[serde(default)]
    pub sessions_frozen: u64,
    pub max_sessions: u64,
    /// What the host itself leaves room for, where that is less: null otherwise.
    #[serde(default)]
    pub host_limit: Option<HostLimit>,
    pub connections: u64,
    /// Tunnels and requests in flight of this node's clients to sessions on other nodes: what would
    /// be cut if the node were switched off.
    #[serde(default)]
    pub through: u64,
    /// Null for a node that is alone.
    #[serde(default)]
    pub takeover: Option<NodeTakeover>,
    /// The registry, as this node finds it: null for a node that is alone.
    #[serde(default)]
    pub store: Option<NodeStore>,
    /// Live nodes that this one does not reach.
    #[serde(default)]
    pub unreached: Vec<String>,
    /// Its wall clock when it published this.
    #[serde(default)]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub clock: Option<Timestamp>,
    #[schema(value_type = String, format = DateTime)]
    pub started_at: Timestamp,
    /// How the other nodes see it: null for a node that is alone.
    #[serde(default)]
    pub fleet: Option<NodeInFleet>,
}

impl Node {
    /// Returns the number of sessions that have not ended.
    #[must_use]
    pub fn sessions(&self) -> u64 {
        self.sessions_running
            + self.sessions_starting
            + self.sessions_stuck
            + self.sessions_paused
            + self.sessions_frozen
    }

    /// A node that has not announced itself: only its name is known.
    #[must_use]
    pub fn unannounced(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            instance: String::new(),
            version: String::new(),
            state: NodeState::Recovering,
            runtime: RuntimeKind::Native,
            runtime_error: None,
            runtimes: Vec::new(),
            sessions_running: 0,
            sessions_starting: 0,
            sessions_stuck: 0,
            sessions_paused: 0,
            sessions_frozen: 0,
            max_sessions: 0,
            host_limit: None,
            connections: 0,
            through: 0,
            takeover: None,
            store: None,
            unreached: Vec::new(),
            clock: None,
            started_at: Timestamp::UNIX_EPOCH,
            fleet: None,
        }
    }
}

/// When other nodes take over a node's sessions, and whether its host is steady enough for that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeTakeover {
    /// Other nodes claim its sessions this many milliseconds after its last heartbeat.
    pub takeover_ms: u64,
    /// The longest time for which the host stood still within about a week, in milliseconds.
    pub longest_stall_ms: u64,
    /// The longest stall with which a takeover is safe, in milliseconds.
    pub borne_stall_ms: u64,
}

impl NodeTakeover {
    /// Returns a warning if the longest stall comes near what the times bear.
    #[must_use]
    pub fn warning(&self) -> Option<String> {
        let Self {
            longest_stall_ms,
            borne_stall_ms,
            ..
        } = self;
        (*longest_stall_ms > borne_stall_ms / 2).then(|| {
            format!(
                "the host stood still for {longest_stall_ms} ms, and its takeover time bears \
                 {borne_stall_ms} ms: after a longer stall, sessions may run twice for a moment. \
                 Restart conman, which then derives a longer time, or raise `fleet.takeover_ms` if \
                 it is set; look for an overcommitted host"
            )
        })
    }
}

/// A runtime of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeRuntime {
    pub runtime: RuntimeKind,
    /// Why it cannot start sessions at present; null when it can.
    pub error: Option<String>,
    /// Time since its last answer, in milliseconds; null before the first. The native runtime is the
    /// shim.
    #[serde(default)]
    pub answered_ago_ms: Option<u64>,
}

/// The registry of a fleet, as one of its nodes finds it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeStore {
    /// Time since its last answer, in milliseconds; null before the first.
    pub answered_ago_ms: Option<u64>,
    /// How long the latest renewal of the node's ownership took, in milliseconds; null before the first.
    pub round_trip_ms: Option<u64>,
    /// Which times of the configuration would fit, if that is too long for the present ones.
    pub warning: Option<String>,
}

/// A node as a node of its fleet sees it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NodeInFleet {
    pub standing: NodeStanding,
    /// Takes no new sessions.
    pub draining: bool,
    /// It does not reach most of the live nodes that reach each other, and gets no new sessions.
    #[serde(default)]
    pub cut_off: bool,
    /// How far its wall clock is ahead of the fleet's, in milliseconds, if that is too much for
    /// certificates, tokens and logs; null otherwise.
    #[serde(default)]
    pub clock_ahead_ms: Option<i64>,
    /// Age of its latest announcement, in milliseconds; null before its first one.
    pub announced_ago_ms: Option<u64>,
    /// Where it listens for other nodes.
    pub peer_url: Option<String>,
    pub labels: BTreeMap<String, String>,
    /// Null before its first announcement.
    pub load: Option<NodeLoad>,
}

/// Whether a node owns what it owns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum NodeStanding {
    Live,
    /// Has not joined the fleet yet.
    Joining,
    /// Its renewal is late; not ready for new work.
    Late,
    /// Not heard of for longer than its fence takes.
    Silent,
    /// Frozen, or declared dead: its sessions may be claimed by others.
    Fenced,
}

impl NodeStanding {
    /// Every standing.
    pub const ALL: [Self; 5] = [
        Self::Live,
        Self::Joining,
        Self::Late,
        Self::Silent,
        Self::Fenced,
    ];

    /// Returns the standing as the API writes it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Joining => "joining",
            Self::Late => "late",
            Self::Silent => "silent",
            Self::Fenced => "fenced",
        }
    }
}

/// How much a node has to do.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NodeLoad {
    /// Share of the last 10 s in which some task waited for a processor, in percent.
    pub cpu_pressure_percent: f64,
    pub memory_available_bytes: u64,
    pub memory_total_bytes: u64,
}

/// The limit of a host that binds first for sessions of the node's runtime.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostLimit {
    /// Sessions that there may be; further ones are refused with this limit.
    pub max_sessions: u64,
    pub limit: LimitMet,
}

/// All nodes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NodeList {
    pub nodes: Vec<Node>,
    /// Why some of this may be out of date, for people: the registry does not answer.
    #[serde(default)]
    pub warnings: Vec<String>,
}

/// Answer to `DELETE /v1/nodes/{id}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeRemoval {
    /// Of the node that was forgotten.
    pub name: String,
}

/// Body of `POST /v1/nodes/{id}/preempt`; may be empty.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PreemptRequest {
    /// Only say what would happen.
    pub dry_run: bool,
    /// Time until the machine is gone, in milliseconds; bounds every grace period. The node's
    /// `preempt_budget_ms` when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 3_600_000)]
    pub budget_ms: Option<u32>,
    /// Why, for the journal.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 500, pattern = r"^[^\u0000-\u001f\u007f-\u009f]*$")]
    pub reason: Option<String>,
}

/// What a preemption would do: the answer to a dry run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PreemptPlan {
    pub sessions: Vec<PreemptSession>,
    /// Longest grace among the sessions within the budget, in milliseconds: the earliest moment
    /// at which the last SIGKILL is sent.
    pub last_kill_ms: u64,
    pub budget_ms: u64,
}

/// One session in a [`PreemptPlan`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PreemptSession {
    pub id: SessionId,
    pub generation: Generation,
    /// Null for a session whose container has no process yet.
    pub pid: Option<i32>,
    pub signal: Option<String>,
    /// Already cut to the budget.
    pub grace_ms: u64,
}

/// What a preemption did; times count from the notice, in milliseconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PreemptReport {
    #[schema(value_type = String, format = DateTime)]
    pub noticed_at: Timestamp,
    /// Who gave the notice: `api`, `admin`, `signal`, a source such as `gce`, or `restart` where an earlier daemon had
    /// it.
    pub source: String,
    pub sessions: u64,
    pub killed: u64,
    pub certified: u64,
    pub released: u64,
    /// Null when there was nothing to do.
    pub last_kill_ms: Option<f64>,
    pub last_certificate_ms: Option<f64>,
    pub last_release_ms: Option<f64>,
    /// What could not be released, each with its reason.
    pub unreleased: Vec<Unreleased>,
    /// Tunnels and requests to sessions on other nodes that still pass through the node. With 0, the
    /// machine can be switched off without cutting a client's connection.
    #[serde(default)]
    pub through: u64,
}

/// A session that a preemption could not release.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Unreleased {
    pub id: SessionId,
    pub generation: Generation,
    pub reason: String,
}

/// Answer of `/readyz` when the node is ready.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Readiness {
    pub state: NodeState,
    /// What is amiss without making the node unready, in words: for example a runtime that does
    /// not answer, while the sessions that run go on being served.
    pub warnings: Vec<String>,
}
