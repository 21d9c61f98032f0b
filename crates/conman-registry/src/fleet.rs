//! What the rest of the daemon requests about the other nodes.
//!
//! Everything here is a hint, except [`Fleet::locate`] with `fresh`: do not act on it alone. The
//! registry's transactions decide which node owns a session.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use conman_core::ownership::Timing;
use conman_proto::{Generation, NodeStore, SessionId};
use jiff::Timestamp;
use tokio::sync::watch;

use crate::{RegistryError, SessionRecord};

/// Maximum number of sessions in one page.
pub const MAX_SESSION_PAGE: usize = 512;

/// Maximum number of unreadable records reported with one page; further ones are omitted.
pub const MAX_UNREADABLE: usize = 20;

/// The nodes that share one registry, as one of them sees them.
///
/// A node that the registry does not answer continues to report its last known state of other nodes
/// and sessions. Methods that query the registry fail with a retryable error.
#[async_trait]
pub trait Fleet: Send + Sync + std::fmt::Debug + 'static {
    /// This node's name.
    fn me(&self) -> &str;

    /// The known nodes, ordered by name: those that have ever joined and are not forgotten,
    /// including this one. Empty where there can be no other nodes.
    fn peers(&self) -> Arc<[Peer]>;

    /// Notifies after a node has joined, was declared dead or was forgotten: [`Fleet::peers`] shows it.
    fn peer_changes(&self) -> watch::Receiver<()>;

    /// Returns the owner of a session: the last known one, or, where none is known or with `fresh`,
    /// the result of one linearizable read, which is cached. "No owner" is not cached. This node's
    /// cached location of a session is dropped when it claims or forgets that session.
    async fn locate(&self, id: &SessionId, fresh: bool) -> Result<Sighting, RegistryError>;

    /// The node that was cached as the owner of `generation` has denied it: drops the cached
    /// location of that generation or an earlier one, and keeps a later one.
    fn forget_location(&self, id: &SessionId, generation: Generation);

    /// How long a node is not heard from before it is declared dead: the longest such time of all
    /// nodes.
    fn takeover(&self) -> Duration {
        Duration::from_millis(Timing::default().takeover_ms)
    }

    /// Whether this node's ownership of its sessions is valid.
    fn standing(&self) -> watch::Receiver<Standing>;

    /// The reason in words, while ownership is late or has lapsed.
    fn why_late(&self) -> Option<String> {
        None
    }

    /// How this node finds the registry; `None` where there are no other nodes.
    fn store(&self) -> Option<NodeStore> {
        None
    }

    /// Sets what this node publishes about itself. It is published at once and then periodically;
    /// if this node has not joined, once it has.
    fn announce(&self, announcement: Announcement);

    /// Removes a permanently lost node that owns nothing from the fleet. Its ended sessions stay.
    /// If a node of that name comes back, it joins like any other, with a greater incarnation.
    async fn forget_node(&self, node: &str) -> Result<(), ForgetError>;

    /// A key that all nodes of the fleet share, and that only readers of its registry can learn;
    /// `None` where there are no other nodes.
    async fn shared_key(&self) -> Result<Option<[u8; 32]>, RegistryError> {
        Ok(None)
    }

    /// A page of all sessions, ordered by id: those after `after`, which need not exist. At most
    /// `limit` sessions; 0 counts as 1, more than [`MAX_SESSION_PAGE`] counts as that. A page is
    /// shorter when records are large or slow to read; only `next` marks the end. Ended sessions
    /// are included until they are forgotten. Unreadable records count towards `limit` and may fill
    /// a page.
    async fn sessions(
        &self,
        after: Option<&SessionId>,
        limit: usize,
    ) -> Result<SessionPage, RegistryError>;
}

/// Why a node cannot be forgotten.
#[derive(Debug, thiserror::Error)]
pub enum ForgetError {
    #[error("there is no node `{node}` in this fleet's registry")]
    Unknown { node: String },
    #[error(
        "node `{node}` is not known to be dead; drain it, stop its daemon, and try again once it is \
         listed as fenced"
    )]
    Alive { node: String },
    #[error(
        "node `{node}` still owns {count} of the fleet's sessions, `{first}` among them; have them \
         started on other nodes first, after which they may be stopped"
    )]
    Owns {
        node: String,
        count: usize,
        first: String,
    },
    #[error(transparent)]
    Registry(#[from] RegistryError),
}

/// A node of the fleet.
#[derive(Debug, Clone, PartialEq)]
pub struct Peer {
    pub name: String,
    pub incarnation: u64,
    pub standing: PeerStanding,
    /// When it was declared dead, by the wall clock of the node that did it.
    pub fenced_at: Option<Timestamp>,
    /// It is live, but its heartbeat has not changed for so long that new sessions are placed
    /// elsewhere.
    pub is_late: bool,
    /// Age of its latest heartbeat that this node has seen.
    pub heartbeat_ago_ms: u64,
    /// `None` before its first announcement since it started.
    pub announcement: Option<Announcement>,
    /// Age of its latest announcement on this node.
    pub announced_ago_ms: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerStanding {
    Live,
    /// Its heartbeat has not changed for longer than its fence timeout.
    Silent,
    /// Declared dead: its sessions may be claimed.
    Fenced,
}

/// The latest field of ownership records that this conman reads: they are numbered in the order in which
/// versions after 0.1.0 add them. A node must write a field only while every node that may act announces
/// that it reads it: an earlier conman would drop it. There is no such field yet, and no check; the first one adds
/// it.
pub const READS: u32 = 0;

/// What a node publishes about itself. Fields that a later conman adds are ignored.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Announcement {
    /// Its [`READS`].
    pub reads: u32,
    /// URL of its peer listener, such as `https://10.0.0.1:7702`.
    pub peer_url: Option<String>,
    pub version: String,
    /// Takes no new sessions.
    pub draining: bool,
    pub labels: BTreeMap<String, String>,
    /// Names of its templates.
    pub templates: Vec<String>,
    pub max_sessions: u32,
    pub load: NodeLoad,
    /// The node as its API shows it; `None` where another version uses a format that cannot be
    /// read.
    #[serde(deserialize_with = "understood")]
    pub view: Option<conman_proto::Node>,
}

/// Display data that cannot be read must not hide the rest, such as the peer URL.
fn understood<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: serde::Deserializer<'de>,
    T: serde::de::DeserializeOwned,
{
    let value = <serde_json::Value as serde::Deserialize>::deserialize(deserializer)?;
    Ok(serde_json::from_value(value).ok())
}

#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct NodeLoad {
    /// Sessions that have not ended.
    pub sessions: u32,
    /// Those that are starting.
    pub starting: u32,
    /// Share of the last 10 s in which some task waited for a processor, in percent
    /// (`/proc/pressure/cpu`).
    pub cpu_pressure_percent: f64,
    /// `MemAvailable` of `/proc/meminfo`.
    pub memory_available_bytes: u64,
    pub memory_total_bytes: u64,
}

/// Where a session is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Located {
    pub node: String,
    pub generation: Generation,
    /// Ownership was given up; any node may claim it.
    pub released: bool,
}

/// The result of locating a session.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sighting {
    /// `None` for a session that was never owned, or that was forgotten.
    pub located: Option<Located>,
    /// Whether the registry was read for this answer.
    pub fresh: bool,
}

/// A page of the fleet's sessions.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SessionPage {
    pub sessions: Vec<FleetSession>,
    /// Records that cannot be read, as text: where, why, and what to do. At most
    /// [`MAX_UNREADABLE`].
    pub unreadable: Vec<String>,
    /// The next page begins after this id; `None` on the last page.
    pub next: Option<SessionId>,
}

/// A session as its record describes it.
#[derive(Debug, Clone, PartialEq)]
pub struct FleetSession {
    pub node: String,
    pub record: SessionRecord,
}

/// Whether this node's ownership of its sessions is valid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing {
    /// Not in a fleet: no other node can own anything.
    Alone,
    /// Not live yet, or no longer live, with the reason in words.
    Joining {
        reason: String,
    },
    Live,
    /// Live, and its renewal is late: not ready for new work.
    Late,
    /// The fence has fired: everything is frozen or about to be.
    Fenced,
}

impl Standing {
    /// Whether sessions may be started and served.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        matches!(self, Self::Alone | Self::Live)
    }

    /// Whether everything that the node runs is frozen or about to be: another node may own it.
    #[must_use]
    pub fn is_frozen(&self) -> bool {
        match self {
            Self::Joining { .. } | Self::Fenced => true,
            Self::Alone | Self::Live | Self::Late => false,
        }
    }
}

/// A node whose registry is not shared.
#[derive(Debug)]
pub struct SoloFleet {
    me: String,
    standing: watch::Sender<Standing>,
    /// Never notified: there are no other nodes.
    peer_changes: watch::Sender<()>,
}

impl SoloFleet {
    #[must_use]
    pub fn new(me: String) -> Self {
        Self {
            me,
            standing: watch::Sender::new(Standing::Alone),
            peer_changes: watch::Sender::default(),
        }
    }
}

#[async_trait]
impl Fleet for SoloFleet {
    fn me(&self) -> &str {
        &self.me
    }

    fn peers(&self) -> Arc<[Peer]> {
        Arc::new([])
    }

    fn peer_changes(&self) -> watch::Receiver<()> {
        self.peer_changes.subscribe()
    }

    async fn locate(&self, _id: &SessionId, _fresh: bool) -> Result<Sighting, RegistryError> {
        Ok(Sighting::default())
    }

    fn forget_location(&self, _id: &SessionId, _generation: Generation) {}

    fn standing(&self) -> watch::Receiver<Standing> {
        self.standing.subscribe()
    }

    fn announce(&self, _announcement: Announcement) {}

    async fn forget_node(&self, node: &str) -> Result<(), ForgetError> {
        let node = node.to_owned();
        Err(match node == self.me {
            true => ForgetError::Alive { node },
            false => ForgetError::Unknown { node },
        })
    }

    async fn sessions(
        &self,
        _after: Option<&SessionId>,
        _limit: usize,
    ) -> Result<SessionPage, RegistryError> {
        Ok(SessionPage::default())
    }
}
