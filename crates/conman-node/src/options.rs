//! A node's identity and limits.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use conman_core::SpecPolicy;
use conman_core::naming::Instance;
use conman_net::egress::EgressOptions;
use conman_net::{HostNetlink, SessionRules};
use conman_proto::SessionId;
use conman_registry::Standing;
use conman_watchdog::Watchdog;
use tokio::sync::watch;

/// A node's identity and limits.
#[derive(Debug, Clone)]
pub struct NodeOptions {
    /// Shown in the API and the journal.
    pub name: String,
    pub instance: Instance,
    /// Labels that sessions can ask for. A fleet's placement has checked them before a start; a node that
    /// is alone checks them itself.
    pub labels: BTreeMap<String, String>,
    /// Each container's own small files go below it.
    pub state_dir: PathBuf,
    pub policy: SpecPolicy,
    pub limits: NodeLimits,
    pub bounds: NodeBounds,
    pub urls: UrlScheme,
    /// Like `urls`, for browsers.
    pub browser_urls: UrlScheme,
    /// Time between a preemption notice that names none and the end of the machine.
    pub preempt_budget_ms: u32,
    /// How long load balancers may need to notice that the node leaves.
    pub shutdown_delay: Duration,
    /// Whether the node holds its ownership, in a fleet.
    pub standing: watch::Receiver<Standing>,
    /// Watches the tasks that are essential for the daemon.
    pub watchdog: Watchdog,
    pub egress: EgressOptions,
    /// What sessions with attached links are refused.
    pub session_rules: Arc<SessionRules>,
    /// By which links are attached.
    pub netlink: HostNetlink,
}

impl NodeOptions {
    /// The documented defaults.
    #[must_use]
    pub fn new(name: String, instance: Instance, state_dir: PathBuf, policy: SpecPolicy) -> Self {
        Self {
            name,
            instance,
            labels: BTreeMap::new(),
            state_dir,
            policy,
            limits: NodeLimits::default(),
            bounds: NodeBounds::default(),
            urls: UrlScheme::host("http", "localhost:7701"),
            browser_urls: UrlScheme::host("http", "localhost:7701"),
            preempt_budget_ms: 25_000,
            shutdown_delay: Duration::ZERO,
            standing: watch::channel(Standing::Alone).1,
            watchdog: Watchdog::default(),
            egress: EgressOptions::default(),
            session_rules: Arc::default(),
            netlink: HostNetlink::default(),
        }
    }
}

/// Limits on numbers and sizes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeLimits {
    /// Sessions that have not ended.
    pub max_sessions: usize,
    /// Starts that the runtime works on at a time; further ones are queued.
    pub max_starting: usize,
    /// Ended sessions that are still shown; the oldest are forgotten.
    pub max_stopped_kept: usize,
    /// Connections held for one session that is starting.
    pub max_held_per_session: usize,
    /// Connections held for all sessions together.
    pub max_held: usize,
    /// Bytes that must stay free on the file system with the state directory: with less, no session is
    /// started.
    pub disk_reserve_bytes: u64,
}

impl Default for NodeLimits {
    fn default() -> Self {
        Self {
            max_sessions: 1_000,
            max_starting: 8,
            max_stopped_kept: 1_000,
            max_held_per_session: 128,
            max_held: 4_096,
            disk_reserve_bytes: 512 << 20,
        }
    }
}

/// Bounds on durations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeBounds {
    /// One durable write of the registry.
    pub registry: Duration,
    /// A start's wait for its turn among `max_starting`.
    pub queue: Duration,
    /// Checking a start's binds.
    pub prepare: Duration,
    /// The runtime's creation of a container, beyond the runtime's own bound.
    pub create: Duration,
    /// The runtime's start of a container, beyond the runtime's own bound.
    pub start: Duration,
    /// Time after SIGKILL until a session counts as stuck.
    pub stuck_after: Duration,
    /// The runtime's answer with the exit code of a program: dockerd notices an end late on a busy host.
    pub exit_code: Duration,
    /// An ensure's wait for the end of the session's former container.
    pub ending: Duration,
}

impl Default for NodeBounds {
    fn default() -> Self {
        Self {
            registry: Duration::from_secs(30),
            queue: Duration::from_secs(120),
            prepare: Duration::from_secs(10),
            create: Duration::from_secs(120),
            start: Duration::from_secs(120),
            stuck_after: Duration::from_secs(5),
            exit_code: Duration::from_secs(10),
            ending: Duration::from_secs(30),
        }
    }
}

/// Where a session is reached, as a pattern.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UrlScheme {
    before: String,
    after: String,
}

impl UrlScheme {
    /// `http://{id}.localhost:7701/`: `authority` is the domain, with the port where it is not
    /// the scheme's own.
    #[must_use]
    pub fn host(scheme: &str, authority: &str) -> Self {
        Self {
            before: format!("{scheme}://"),
            after: format!(".{authority}/"),
        }
    }

    /// `http://127.0.0.1:7701/s/{id}/`: `base` is everything before `/s`.
    #[must_use]
    pub fn path(base: &str) -> Self {
        Self {
            before: format!("{}/s/", base.trim_end_matches('/')),
            after: "/".to_owned(),
        }
    }

    /// The URL of a session's port, with `{port}` in place of its number. `None` for an id that leaves no
    /// room for a port in its host.
    #[must_use]
    pub fn port_url(&self, id: &SessionId) -> Option<String> {
        let Self { before, after } = self;
        if before.ends_with("/s/") {
            return Some(format!("{before}{id}:{{port}}{after}"));
        }
        let fits = id.as_str().len() <= SessionId::MAX_WITH_PORT;
        fits.then(|| format!("{before}{{port}}-{id}{after}"))
    }

    /// The session's URL.
    #[must_use]
    pub fn url(&self, id: &SessionId) -> String {
        format!("{}{id}{}", self.before, self.after)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_has_a_url_by_host_or_by_path() {
        let id: SessionId = "alice".parse().expect("an id");
        let by_host = UrlScheme::host("https", "conman.example");
        assert_eq!(by_host.url(&id), "https://alice.conman.example/");
        let by_path = UrlScheme::path("http://127.0.0.1:7701/");
        assert_eq!(by_path.url(&id), "http://127.0.0.1:7701/s/alice/");
        let at_port = by_host.port_url(&id);
        assert_eq!(
            at_port.as_deref(),
            Some("https://{port}-alice.conman.example/")
        );
        let at_port = by_path.port_url(&id);
        assert_eq!(
            at_port.as_deref(),
            Some("http://127.0.0.1:7701/s/alice:{port}/")
        );
        let long: SessionId = "a".repeat(58).parse().expect("an id");
        assert!(by_host.port_url(&long).is_none() && by_path.port_url(&long).is_some());
    }
}
