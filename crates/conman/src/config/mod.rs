//! The configuration file: its fields, their defaults, and its errors.
//!
//! A file is read and checked whole before anything is bound or created. All mistakes are
//! reported together, each with its line; an unknown field names the nearest known one.

mod admin;
mod fabric;
mod fleet;
mod images;
mod limits;
mod listen;
mod load;
mod net;
mod reader;
mod registry;
mod runtimes;
mod templates;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use conman_auth::{FleetTlsFiles, OriginRules};
use conman_core::SpecPolicy;
use conman_image::ImageLimits;
use conman_net::egress::EgressOptions;
use conman_net::{FabricKind, InterfaceNetwork, PoolNetworks};
use conman_node::{NodeLimits, NoticeSourceOptions, UrlScheme};
use conman_proto::{InterfaceName, RuntimeKind};
use conman_runtime::{KeptLogLimits, OciOptions, RootStore};
use conman_shim::IdPool;
use http::HeaderName;
use serde::Deserialize;

pub(crate) use admin::admin_socket;
pub(crate) use load::{ConfigError, load};
pub(crate) use registry::SharedRegistry;

/// The operator's settings, checked.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// `node.name`: the host's name when absent.
    pub(crate) name: String,
    /// `node.state_dir`.
    pub(crate) state_dir: PathBuf,
    /// `node.id_range`: user and group ids of native sessions.
    pub(crate) id_range: IdPool,
    /// `node.shutdown_delay_s`: how long load balancers may need to notice that the node leaves.
    pub(crate) shutdown_delay: Duration,
    /// `node.runtime`.
    pub(crate) runtime: RuntimeKind,
    pub(crate) listen: Listen,
    pub(crate) fleet: Fleet,
    /// `[registry]` and the time-outs of `[fleet]`; `None` for a registry of this node alone.
    pub(crate) shared: Option<SharedRegistry>,
    pub(crate) limits: Limits,
    /// `auth.tokens_file`. If absent, all listeners must be on loopback, the API's clients need the
    /// administrator's token, and sessions' clients need none.
    pub(crate) tokens_file: Option<PathBuf>,
    /// `auth.loopback = "open"`: no client of the API needs a token.
    pub(crate) open_loopback: bool,
    /// `auth.cookie_ttl_s`: how long a browser's cookie from a connect token is valid.
    pub(crate) cookie_ttl: Duration,
    pub(crate) preempt: Preempt,
    pub(crate) images: Images,
    pub(crate) net: Net,
    /// `docker.socket`.
    pub(crate) docker_socket: PathBuf,
    /// `[runtimes]`; gVisor is always there.
    pub(crate) oci: BTreeMap<RuntimeKind, OciOptions>,
    /// `log.format`.
    pub(crate) log_format: LogFormat,
    /// `binds.first_id`: host id of user 0 in files of native sessions' binds.
    pub(crate) bind_first_id: u32,
    /// Templates, `binds.allow`, and the limits of specs.
    pub(crate) policy: SpecPolicy,
    /// The file that the command line names.
    pub(crate) file: Option<PathBuf>,
    /// The file as plain tables, to compare with a later one.
    pub(crate) sections: toml::Table,
}

impl Config {
    /// The runtimes that the node or one of its templates uses.
    pub(crate) fn runtimes(&self) -> BTreeSet<RuntimeKind> {
        let templates = self.policy.templates.values();
        templates
            .filter_map(|template| template.runtime)
            .chain([self.runtime])
            .collect()
    }

    /// Whether sessions run in native containers.
    pub(crate) fn has_native_containers(&self) -> bool {
        self.runtimes().iter().any(|runtime| match runtime {
            RuntimeKind::Native | RuntimeKind::Gvisor | RuntimeKind::Oci(_) => true,
            RuntimeKind::Docker | RuntimeKind::Process => false,
        })
    }
}

/// `[listen]`
#[derive(Debug, Clone)]
pub(crate) struct Listen {
    /// `/v1`, probes, metrics.
    pub(crate) api: SocketAddr,
    /// Requests to sessions.
    pub(crate) sessions: SocketAddr,
    /// Listener for other nodes; `None` outside a fleet.
    pub(crate) peers: Option<SocketAddr>,
    /// Where HAProxy's agent check is answered.
    pub(crate) agent: Option<SocketAddr>,
    /// The command line's socket.
    pub(crate) admin: PathBuf,
    /// `{id}.<domain>` addresses a session.
    pub(crate) domain: String,
    /// Host names of the listeners besides loopback's.
    pub(crate) hosts: Vec<String>,
    /// Web origins that may call the API, or open WebSockets to sessions, from a browser.
    pub(crate) origins: OriginRules,
    /// How a session's URL is made; a path on the sessions listener if absent.
    pub(crate) urls: Option<UrlScheme>,
    /// Whether those URLs are HTTPS, so that cookies can be limited to it.
    pub(crate) secure_urls: bool,
    /// Whether `X-Forwarded-*` of clients is trusted.
    pub(crate) trust_forwarded: bool,
    /// Whether browsers may use `/s/{id}/…`, where all sessions share one origin.
    pub(crate) browser_paths: bool,
    /// Fields of sessions' answers that the server in front of the nodes may obey.
    pub(crate) trusted_headers: Vec<HeaderName>,
}

impl Listen {
    /// The file of the administrator's token, next to the admin socket.
    pub(crate) fn admin_token(&self) -> PathBuf {
        self.admin.with_file_name("admin.token")
    }
}

/// `[fleet]`
#[derive(Debug, Clone)]
pub(crate) struct Fleet {
    /// File with the secret from which connect tokens' keys, and certificates if none are given, are
    /// derived.
    pub(crate) secret_file: Option<PathBuf>,
    /// Certificates that authenticate nodes.
    pub(crate) tls: Option<FleetTlsFiles>,
    /// URL of this node for other nodes; `listen.peers` if that is the address of one host.
    pub(crate) peer_url: Option<String>,
    /// Labels that sessions can select nodes by.
    pub(crate) labels: BTreeMap<String, String>,
}

/// `[limits]`
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    pub(crate) node: NodeLimits,
    /// Client connections of the sessions listener.
    pub(crate) max_connections: usize,
    /// Client connections of the API listener and of the admin socket, each.
    pub(crate) max_api_connections: usize,
    /// Kernel memory that connections of the egress proxies may hold.
    pub(crate) proxy_buffer_bytes: u64,
    /// Events kept in the journal.
    pub(crate) max_events: u64,
    /// Logs of ended native sessions.
    pub(crate) kept_logs: KeptLogLimits,
    /// Processors of all native sessions together.
    pub(crate) total_cpus: f64,
    /// I/O of sessions.
    pub(crate) io: Io,
    /// Interval between checks of the host's limits; no checks if absent.
    pub(crate) check_host_every: Option<Duration>,
}

/// `limits.io_*`
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Io {
    /// Of each session, on the disk with its files.
    pub(crate) read_bytes_per_s: Option<u64>,
    pub(crate) write_bytes_per_s: Option<u64>,
    /// Of all native sessions together, next to the host's other cgroups.
    pub(crate) weight: Option<u16>,
}

/// `[preempt]`
#[derive(Debug, Clone)]
pub(crate) struct Preempt {
    pub(crate) on_sigterm: OnSigterm,
    /// Time until the machine stops, for a notice that states none.
    pub(crate) budget_ms: u32,
    /// The sources of preemption notices, also those that are not watched.
    pub(crate) notice_sources: Vec<NoticeSourceOptions>,
}

/// `[images]`
#[derive(Debug, Clone)]
pub(crate) struct Images {
    /// The registry of references that name none; they are refused if absent.
    pub(crate) default_registry: Option<String>,
    /// Registries that images may be pulled from; any if absent.
    pub(crate) registries: Option<BTreeSet<String>>,
    /// Those among them that use plain HTTP.
    pub(crate) insecure_registries: BTreeSet<String>,
    /// Logins at registries, by the registry's name.
    pub(crate) logins: BTreeMap<String, Login>,
    pub(crate) limits: ImageLimits,
    /// How the roots of native sessions are made.
    pub(crate) roots: RootStore,
    /// Interval between collections; only after a removal if absent.
    pub(crate) collect_every: Option<Duration>,
}

/// `[net]`
#[derive(Debug, Clone)]
pub(crate) struct Net {
    /// Addresses of sessions with the network `routed`.
    pub(crate) pool: Option<PoolNetworks>,
    /// Of the links of these sessions, in bytes.
    pub(crate) mtu: u32,
    /// `net.interfaces`: addresses of sessions' links on interfaces of this node.
    pub(crate) interfaces: BTreeMap<InterfaceName, InterfaceNetwork>,
    /// `net.fabric`, unless its kind is "none".
    pub(crate) fabric: Option<NetFabric>,
    /// Name servers, and special addresses.
    pub(crate) egress: EgressOptions,
}

/// `[net.fabric]`: how sessions reach those of other nodes.
#[derive(Debug, Clone)]
pub(crate) struct NetFabric {
    pub(crate) kind: FabricKind,
    pub(crate) pool: PoolNetworks,
    /// Prefix length of a part of the pool.
    pub(crate) part: u8,
    /// In bytes; what the interface allows if absent.
    pub(crate) mtu: Option<u32>,
    /// This node's address for other nodes; that of `listen.peers` if absent.
    pub(crate) address: Option<IpAddr>,
}

/// `[images.logins.<registry>]`
#[derive(Debug, Clone)]
pub(crate) struct Login {
    pub(crate) user: String,
    pub(crate) password_file: PathBuf,
}

/// What SIGTERM means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum OnSigterm {
    /// The machine stops: kill and release every session, then stop.
    Preempt,
    /// Only the daemon stops: the next one adopts the sessions.
    Leave,
}

/// Format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LogFormat {
    Text,
    Json,
}
