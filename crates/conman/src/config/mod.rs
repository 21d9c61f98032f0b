//! The configuration file: what may stand in it, what holds when it does not, and what is wrong.
//!
//! A file is read and checked whole before anything is bound or made. Every mistake is told at
//! once, each with its line; an unknown field names the nearest known one.

mod admin;
mod fleet;
mod images;
mod load;
mod reader;
mod registry;
mod templates;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use conman_auth::FleetTlsFiles;
use conman_core::SpecPolicy;
use conman_image::ImageLimits;
use conman_node::{NodeLimits, UrlScheme};
use conman_proto::RuntimeKind;
use conman_shim::IdPool;

pub(crate) use admin::admin_socket;
pub(crate) use load::{ConfigError, load};
pub(crate) use registry::SharedRegistry;

/// Everything that an operator may set, checked.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// `node.name`: the host's name when absent.
    pub(crate) name: String,
    /// Whether the configuration names it.
    pub(crate) name_is_given: bool,
    /// `node.state_dir`.
    pub(crate) state_dir: PathBuf,
    /// `node.id_range`: user and group ids of native sessions.
    pub(crate) id_range: IdPool,
    /// `node.runtime`.
    pub(crate) runtime: RuntimeKind,
    pub(crate) listen: Listen,
    pub(crate) fleet: Fleet,
    /// `[registry]` and the time-outs of `[fleet]`, where the registry is not this node's alone.
    pub(crate) shared: Option<SharedRegistry>,
    pub(crate) limits: Limits,
    /// `auth.tokens_file`: nobody needs a token when absent, and nothing may listen beyond
    /// loopback then.
    pub(crate) tokens_file: Option<PathBuf>,
    /// `auth.cookie_ttl_s`: how long a browser's first visit with a connect token lasts.
    pub(crate) cookie_ttl: Duration,
    pub(crate) preempt: Preempt,
    pub(crate) images: Images,
    /// `docker.socket`.
    pub(crate) docker_socket: PathBuf,
    /// `log.format`.
    pub(crate) log_format: LogFormat,
    /// `binds.first_id`: host id of user 0 in files of native sessions' binds.
    pub(crate) bind_first_id: u32,
    /// Templates, `binds.allow`, and the limits of specs.
    pub(crate) policy: SpecPolicy,
}

impl Config {
    /// The runtimes that the node or one of its templates names.
    pub(crate) fn runtimes(&self) -> BTreeSet<RuntimeKind> {
        let templates = self.policy.templates.values();
        templates
            .filter_map(|template| template.runtime)
            .chain([self.runtime])
            .collect()
    }
}

/// `[listen]`
#[derive(Debug, Clone)]
pub(crate) struct Listen {
    /// `/v1`, probes, metrics.
    pub(crate) api: SocketAddr,
    /// The sessions themselves.
    pub(crate) sessions: SocketAddr,
    /// Other nodes; there are none when absent.
    pub(crate) peers: Option<SocketAddr>,
    /// The command line's socket.
    pub(crate) admin: PathBuf,
    /// `{id}.<domain>` addresses a session.
    pub(crate) domain: String,
    /// Names under which the listeners may be addressed besides loopback's.
    pub(crate) hosts: Vec<String>,
    /// Pages that may call the API, or open WebSockets to sessions, from a browser.
    pub(crate) allowed_origins: Vec<String>,
    /// How a session's URL is made; by path on the sessions listener when absent.
    pub(crate) urls: Option<UrlScheme>,
    /// Whether those URLs are HTTPS, so that cookies may be kept to it.
    pub(crate) secure_urls: bool,
    /// Whether `X-Forwarded-*` of clients are believed.
    pub(crate) trust_forwarded: bool,
    /// Whether browsers may use `/s/{id}/…`, where all sessions share one origin.
    pub(crate) browser_paths: bool,
}

/// `[fleet]`
#[derive(Debug, Clone)]
pub(crate) struct Fleet {
    /// Holds the secret by which nodes know each other.
    pub(crate) secret_file: Option<PathBuf>,
    /// The certificates by which they do.
    pub(crate) tls: Option<FleetTlsFiles>,
    /// Where other nodes reach this one; `listen.peers` when it is an address of one host.
    pub(crate) peer_url: Option<String>,
    /// By which sessions can ask for nodes.
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
    /// Events kept in the journal.
    pub(crate) max_events: u64,
    /// Processors of all native sessions together.
    pub(crate) total_cpus: f64,
    /// Between two looks at the host's own limits; they refuse nothing when absent.
    pub(crate) check_host_every: Option<Duration>,
}

/// `[preempt]`
#[derive(Debug, Clone)]
pub(crate) struct Preempt {
    pub(crate) on_sigterm: OnSigterm,
    /// Time between a notice that names none and the end of the machine.
    pub(crate) budget_ms: u32,
    /// Base URL of Google Compute Engine's metadata server, when it is to be watched.
    pub(crate) gce_endpoint: Option<String>,
}

/// `[images]`
#[derive(Debug, Clone)]
pub(crate) struct Images {
    /// Registries that images may be pulled from; any when absent.
    pub(crate) registries: Option<BTreeSet<String>>,
    /// Those among them that are spoken to in plain HTTP.
    pub(crate) insecure_registries: BTreeSet<String>,
    /// Who conman is to registries, by the registry's name.
    pub(crate) logins: BTreeMap<String, Login>,
    pub(crate) limits: ImageLimits,
    /// Between two collections; only after a removal when absent.
    pub(crate) collect_every: Option<Duration>,
}

/// `[images.logins.<registry>]`
#[derive(Debug, Clone)]
pub(crate) struct Login {
    pub(crate) user: String,
    pub(crate) password_file: PathBuf,
}

/// What SIGTERM means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnSigterm {
    /// The machine is going: kill and release every session, then stop.
    Preempt,
    /// Only the daemon is going: the sessions stay for the next one to adopt.
    Leave,
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LogFormat {
    Text,
    Json,
}
