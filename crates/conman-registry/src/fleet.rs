//! What the rest of the daemon asks about the other nodes.
//!
//! Everything here is a hint but [`Fleet::locate`] with `fresh`: nobody may act on it alone. Who
//! owns a session is decided by the registry's own transactions.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use conman_core::ownership::Timing;
use conman_core::retention::Age;
use conman_proto::{Generation, SessionId};
use tokio::sync::watch;

use crate::{RegistryError, SessionRecord};

/// Sessions in one answer.
pub const MAX_SESSION_PAGE: usize = 512;

/// What cannot be read of one page and is told of; more is left out.
pub const MAX_UNREADABLE: usize = 20;

/// The nodes that share one registry, as one of them sees them.
///
/// One that the registry does not answer goes on telling what it knew of the others and remembers of
/// sessions; what asks the registry fails with an error that is retryable.
#[async_trait]
pub trait Fleet: Send + Sync + std::fmt::Debug + 'static {
    /// This node's name.
    fn me(&self) -> &str;

    /// The nodes that are known, ordered by name: those that have ever joined and are not forgotten,
    /// this one included. None where there can be no others.
    fn peers(&self) -> Arc<[Peer]>;

    /// Who owns a session: what was last known, or where nothing is, or with `fresh`, one
    /// linearizable read, which is remembered. That nobody owns it is not: it is asked for anew each
    /// time. What this node remembers of a session is over when it claims or forgets that.
    async fn locate(&self, id: &SessionId, fresh: bool) -> Result<Sighting, RegistryError>;

    /// Whoever was said to own that generation says that it does not: what is remembered of that one
    /// or of an earlier one is over, and of a later one is not.
    fn forget_location(&self, id: &SessionId, generation: Generation);

    /// How long a node is not heard of before it is declared dead, whichever of them that is.
    fn takeover(&self) -> Duration {
        Duration::from_millis(Timing::default().takeover_ms)
    }

    /// Whether this node owns what it owns.
    fn standing(&self) -> watch::Receiver<Standing>;

    /// While ownership is late or has lapsed: why, in words.
    fn why_late(&self) -> Option<String> {
        None
    }

    /// What the others shall know of this node; told at once and again from time to time, and once
    /// it has joined if it has not yet, or not any more.
    fn announce(&self, announcement: Announcement);

    /// Takes a node that is gone for good, and owns nothing, out of what is known of the fleet. Its
    /// sessions that have ended stay. One that comes back by that name joins as any other, with a
    /// greater incarnation. Nodes forget those by themselves that have been gone for a day.
    async fn forget_node(&self, node: &str) -> Result<(), ForgetError>;

    /// For how long the nodes that are gone have been, in all: as far as any daemon saw, this one and
    /// those before it. Of `seen`, which are all that are gone and that records are of, and what was
    /// seen of them since, what is news is kept for later daemons. Whoever is not gone is not in the
    /// answer, and of whoever is back, or gone without a trace, nothing is kept any more.
    async fn count_gone(
        &self,
        _seen: BTreeMap<String, Option<Age>>,
    ) -> Result<BTreeMap<String, Age>, RegistryError> {
        Ok(BTreeMap::new())
    }

    /// A key that all nodes of the fleet have and nobody else, but for who can read its registry;
    /// `None` where there are no others.
    async fn shared_key(&self) -> Result<Option<[u8; 32]>, RegistryError> {
        Ok(None)
    }

    /// A page of all sessions, ordered by id: those behind `after`, which need not be one, at most
    /// `limit`, of which 0 counts as 1 and more than [`MAX_SESSION_PAGE`] as that; fewer where they are
    /// large or come slowly, whose end only `next` tells. One that has ended is among them until it is
    /// forgotten. What cannot be read counts, and may fill a page alone.
    async fn sessions(
        &self,
        after: Option<&SessionId>,
        limit: usize,
    ) -> Result<SessionPage, RegistryError>;
}

/// Why a node is not forgotten.
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
    /// It is live, and its heartbeat has not changed for so long that new sessions go elsewhere.
    pub is_late: bool,
    /// `None` before its first announcement since it began.
    pub announcement: Option<Announcement>,
    /// Since its latest announcement arrived here.
    pub announced_ago_ms: u64,
    /// Since the look at the registry began that showed it as it is here.
    pub seen_ago_ms: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerStanding {
    Live,
    /// Its heartbeat has not changed for longer than its fence takes.
    Silent,
    /// Declared dead: its sessions may be claimed.
    Fenced,
}

/// What a node says of itself.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct Announcement {
    /// Where its peers' listener is reached, such as `https://10.0.0.1:7702`.
    pub peer_url: Option<String>,
    pub version: String,
    /// Takes no new sessions.
    pub draining: bool,
    pub labels: BTreeMap<String, String>,
    /// Names of its templates.
    pub templates: Vec<String>,
    pub max_sessions: u32,
    pub load: NodeLoad,
    /// The node as its own API shows it; none where another version shows it in words of its own.
    #[serde(deserialize_with = "understood")]
    pub view: Option<conman_proto::Node>,
}

/// What is only shown must not hide the rest, such as where a node is reached.
fn understood<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: serde::Deserializer<'de>,
    T: serde::de::DeserializeOwned,
{
    let value = <serde_json::Value as serde::Deserialize>::deserialize(deserializer)?;
    Ok(serde_json::from_value(value).ok())
}

#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct NodeLoad {
    /// Lives that have not ended.
    pub sessions: u32,
    /// Those of them that are starting.
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
    /// Given up; anybody may claim it.
    pub released: bool,
}

/// What a look for a session came to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sighting {
    /// `None` for one that nobody has ever owned, or that was forgotten.
    pub located: Option<Located>,
    /// Whether the registry was asked just now.
    pub fresh: bool,
}

/// A page of the fleet's sessions.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SessionPage {
    pub sessions: Vec<FleetSession>,
    /// What is there and cannot be read, in words: where, why, and what to do. At most
    /// [`MAX_UNREADABLE`].
    pub unreadable: Vec<String>,
    /// Behind which the next page begins; `None` on the last one.
    pub next: Option<SessionId>,
}

/// A session as its record tells of it.
#[derive(Debug, Clone, PartialEq)]
pub struct FleetSession {
    pub node: String,
    pub record: SessionRecord,
}

/// Whether this node owns what it owns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing {
    /// Alone with its registry: nobody else can own anything.
    Alone,
    /// Not live yet, or not any more, and why in words.
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

    /// Whether all that the node runs is frozen, or about to be: it may be another node's by now.
    #[must_use]
    pub fn is_frozen(&self) -> bool {
        match self {
            Self::Joining { .. } | Self::Fenced => true,
            Self::Alone | Self::Live | Self::Late => false,
        }
    }
}

/// A node whose registry nobody shares.
#[derive(Debug)]
pub struct SoloFleet {
    me: String,
    standing: watch::Sender<Standing>,
}

impl SoloFleet {
    #[must_use]
    pub fn new(me: String) -> Self {
        Self {
            me,
            standing: watch::Sender::new(Standing::Alone),
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
