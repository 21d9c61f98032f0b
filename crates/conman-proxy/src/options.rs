//! The settings of a listener.

use std::time::Duration;

use conman_watchdog::Watchdog;
use http::HeaderName;

/// Most header fields that a node adds to a request that it forwards: the caller and the
/// session. The listener for nodes accepts this many more than that for clients, so that it
/// accepts every request that another node has accepted.
pub const ADDED_HEADERS: usize = 32;
/// Likewise, in bytes.
pub const ADDED_HEAD_BYTES: usize = 4 * 1024;

/// Longest domain: a host name has at most 253 bytes, and a session's label takes 63 and a dot.
const MAX_DOMAIN_BYTES: usize = 189;

/// The operator's settings of a [`Proxy`](crate::Proxy), and its watchdog.
#[derive(Debug, Clone)]
pub struct ProxyOptions {
    /// `{id}.<domain>` addresses a session by host name; `None` leaves only `/s/{id}/…`.
    pub domain: Option<String>,
    /// Threads of the data plane, each with its own runtime.
    pub workers: usize,
    /// Most client connections, including tunnels. For one more, the oldest without a completed
    /// request is closed; if there is none, the new one is answered 503 and closed.
    pub max_connections: usize,
    /// Most requests that wait for their session; more are answered 503 with `Retry-After`.
    pub max_held: usize,
    /// Longest wait for a session, longer than the directory's bound.
    pub hold_timeout: Duration,
    /// Time for a request's whole head, from the connection's opening or the head's first byte.
    pub head_timeout: Duration,
    /// How long a connection may stay open between requests.
    pub idle_timeout: Duration,
    /// Most bytes of a request's or response's head; at least 8,192.
    pub max_head_bytes: usize,
    /// Most header fields of a request or response.
    pub max_headers: usize,
    /// Longest wait for the next byte of a request's body while the session would take it.
    pub body_stall_timeout: Duration,
    /// Longest time without progress while data waits to be written, to the client or to the
    /// session, in ordinary exchanges and in tunnels.
    pub write_stall_timeout: Duration,
    /// How long an idle connection to a session or a node is kept.
    pub pool_idle_timeout: Duration,
    /// Whether `X-Forwarded-*` and `Forwarded` of the client are trusted and extended, because all
    /// clients are the operator's proxies.
    pub trust_forwarded: bool,
    /// Whether browsers may use `/s/{id}/…`, where all sessions share one origin.
    pub browser_paths: bool,
    /// Fields of sessions' answers that stay although [`is_server_order`](crate::is_server_order) holds for them.
    pub trusted_headers: Vec<HeaderName>,
    /// Watches the acceptor and the workers.
    pub watchdog: Watchdog,
}

impl Default for ProxyOptions {
    fn default() -> Self {
        Self {
            domain: Some("localhost".to_owned()),
            workers: std::thread::available_parallelism().map_or(2, usize::from),
            max_connections: 16_384,
            max_held: 4_096,
            hold_timeout: Duration::from_secs(660),
            head_timeout: Duration::from_secs(15),
            idle_timeout: Duration::from_secs(75),
            max_head_bytes: 64 * 1024,
            max_headers: 200,
            body_stall_timeout: Duration::from_secs(60),
            write_stall_timeout: Duration::from_secs(60),
            pool_idle_timeout: Duration::from_secs(30),
            trust_forwarded: false,
            browser_paths: false,
            trusted_headers: Vec::new(),
            watchdog: Watchdog::default(),
        }
    }
}

impl ProxyOptions {
    /// These options with the limits of heads that a listener for nodes needs.
    #[must_use]
    pub fn for_nodes(self) -> Self {
        Self {
            max_head_bytes: self.max_head_bytes + ADDED_HEAD_BYTES,
            max_headers: self.max_headers + ADDED_HEADERS,
            ..self
        }
    }
}

/// Whether hosts of sessions can end in this: a host name that leaves room for an id.
#[must_use]
pub fn is_domain(text: &str) -> bool {
    let is_label = |label: &str| {
        let mut bytes = label.bytes();
        !label.is_empty() && bytes.all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
    };
    text.len() <= MAX_DOMAIN_BYTES && text.split('.').all(is_label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domain_is_a_host_name_that_leaves_room_for_an_id() {
        let longest = ["a".repeat(63), "b".repeat(63), "c".repeat(61)].join(".");
        for text in ["localhost", "sessions.example.com", "a-1", &longest] {
            assert!(is_domain(text), "{text}");
        }
        let too_long = format!("{longest}d");
        for text in ["", "not a domain", "a..b", ".a", "a.", "a/b", &too_long] {
            assert!(!is_domain(text), "{text}");
        }
    }
}
