//! Names to addresses, by the node's name servers.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use hickory_resolver::TokioResolver;
use hickory_resolver::config::{
    ConnectionConfig, LookupIpStrategy, NameServerConfig, ResolveHosts, ResolverConfig,
};
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use tokio::time::timeout;

/// Bound on one lookup, with all of its tries.
const LOOKUP: Duration = Duration::from_secs(8);
/// Bound on one try.
const TRY: Duration = Duration::from_secs(3);
/// Answers that are cached for all sessions.
const CACHED: u64 = 4_096;
/// Maximum time for which an answer is cached.
const MAX_TTL: Duration = Duration::from_secs(300);

#[derive(Debug)]
pub(super) struct Names {
    /// `None` if the host has no usable resolv.conf.
    resolver: Option<TokioResolver>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum LookupError {
    #[error("the name does not exist")]
    NoSuchName,
    #[error("the name has no address")]
    NoAddress,
    #[error("no name server has answered within {} s", LOOKUP.as_secs())]
    TimedOut,
    #[error("the name servers could not be asked: {0}")]
    Failed(String),
}

impl Names {
    /// Uses the given name servers, or those of the host's resolv.conf, with its hosts file.
    pub(super) fn new(servers: &[SocketAddr]) -> Self {
        let builder = if servers.is_empty() {
            TokioResolver::builder_tokio()
        } else {
            let servers = servers.iter().map(|server| {
                let connection = |mut connection: ConnectionConfig| {
                    connection.port = server.port();
                    connection
                };
                let connections = [ConnectionConfig::udp(), ConnectionConfig::tcp()];
                NameServerConfig::new(
                    server.ip(),
                    true,
                    connections.map(connection).into_iter().collect(),
                )
            });
            let config = ResolverConfig::from_name_servers(servers.collect());
            let provider = TokioRuntimeProvider::default();
            Ok(TokioResolver::builder_with_config(config, provider))
        };
        let resolver = builder.and_then(|mut builder| {
            let options = builder.options_mut();
            options.timeout = TRY;
            options.attempts = 2;
            options.cache_size = CACHED;
            options.positive_max_ttl = Some(MAX_TTL);
            options.negative_max_ttl = Some(TRY);
            options.ip_strategy = LookupIpStrategy::Ipv4AndIpv6;
            if !servers.is_empty() {
                // The host's hosts file is for the host's programs.
                options.use_hosts_file = ResolveHosts::Never;
            }
            builder.build()
        });
        if let Err(error) = &resolver {
            tracing::warn!(%error, "sessions with `egress` cannot resolve names; set `dns` in [net]");
        }
        Self {
            resolver: resolver.ok(),
        }
    }

    /// Returns the addresses of a name, at least one.
    pub(super) async fn resolve(&self, name: &str) -> Result<Vec<IpAddr>, LookupError> {
        let Some(resolver) = &self.resolver else {
            return Err(LookupError::Failed("none is configured".to_owned()));
        };
        // With the final dot: no search domain applies.
        let found = timeout(LOOKUP, resolver.lookup_ip(format!("{name}."))).await;
        let addresses: Vec<IpAddr> = match found {
            Err(_) => return Err(LookupError::TimedOut),
            Ok(Err(error)) if error.is_nx_domain() => return Err(LookupError::NoSuchName),
            Ok(Err(error)) if error.is_no_records_found() => return Err(LookupError::NoAddress),
            Ok(Err(error)) => return Err(LookupError::Failed(error.to_string())),
            Ok(Ok(found)) => found.iter().collect(),
        };
        if addresses.is_empty() {
            return Err(LookupError::NoAddress);
        }
        Ok(addresses)
    }
}
