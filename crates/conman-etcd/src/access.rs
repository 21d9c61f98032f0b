//! How etcd is reached: endpoints, credentials, certificates.

use std::fmt;
use std::time::Duration;

use conman_core::error_chain;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};

/// First line of a certificate in PEM (RFC 7468).
const PEM_CERTIFICATE: &str = "-----BEGIN CERTIFICATE-----";

/// Interval of keep-alive pings on a connection with calls under way: etcd disconnects clients that
/// ping more often than every five seconds.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);

/// After this time without an answer to a ping, a watch notices that its etcd is gone.
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(3);

/// How etcd is reached.
#[derive(Clone, PartialEq, Eq)]
pub struct EtcdAccess {
    /// `http://HOST:PORT` or `https://HOST:PORT`, at least one.
    pub endpoints: Vec<String>,
    pub credentials: Option<EtcdCredentials>,
    pub tls: Option<EtcdTls>,
}

impl fmt::Debug for EtcdAccess {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("EtcdAccess")
            .field("endpoints", &self.endpoints)
            .field("user", &self.credentials.as_ref().map(|one| &one.user))
            .field("tls", &self.tls.is_some())
            .finish_non_exhaustive()
    }
}

/// This node's user in etcd.
#[derive(Clone, PartialEq, Eq)]
pub struct EtcdCredentials {
    pub user: String,
    pub password: String,
}

impl fmt::Debug for EtcdCredentials {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "EtcdCredentials({})", self.user)
    }
}

/// PEM texts.
#[derive(Clone, PartialEq, Eq)]
pub struct EtcdTls {
    /// The CA that signed etcd's certificates.
    pub ca: Vec<u8>,
    /// This node's certificate and key, where etcd requires one.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
}

impl fmt::Debug for EtcdTls {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("EtcdTls(…)")
    }
}

/// Why no connection to etcd can be tried.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    #[error("no etcd endpoint is configured; name at least one, such as `http://10.0.0.1:2379`")]
    NoEndpoint,
    #[error("`{endpoint}` is not an etcd endpoint; use `http://HOST:PORT` or `https://HOST:PORT`")]
    Endpoint { endpoint: String },
    #[error(
        "the certificates for etcd cannot be used: {reason}; `registry.ca_file`, \
         `registry.cert_file` and `registry.key_file` must be PEM files, the last two of one pair"
    )]
    Tls { reason: String },
    #[error("`registry.ca_file` holds no certificate; it must be a PEM file of etcd's CA")]
    NoAuthority,
}

/// The endpoints, not connected yet. `patience` is the timeout of a connection.
pub(super) fn endpoints(
    access: &EtcdAccess,
    patience: Duration,
) -> Result<Vec<Endpoint>, AccessError> {
    let endpoints: Vec<Endpoint> = access
        .endpoints
        .iter()
        .map(|text| endpoint(text, access.tls.as_ref(), patience))
        .collect::<Result<_, _>>()?;
    match endpoints.is_empty() {
        true => Err(AccessError::NoEndpoint),
        false => Ok(endpoints),
    }
}

fn endpoint(
    text: &str,
    tls: Option<&EtcdTls>,
    patience: Duration,
) -> Result<Endpoint, AccessError> {
    let wrong = || AccessError::Endpoint {
        endpoint: text.to_owned(),
    };
    let secure = text.starts_with("https://");
    if !secure && !text.starts_with("http://") {
        return Err(wrong());
    }
    let endpoint = Endpoint::from_shared(text.to_owned()).map_err(|_| wrong())?;
    if endpoint.uri().host().is_none() {
        return Err(wrong());
    }
    let endpoint = endpoint
        .connect_timeout(patience)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
        .keep_alive_while_idle(false);
    if !secure {
        return Ok(endpoint);
    }
    let mut config = ClientTlsConfig::new();
    if let Some(tls) = tls {
        if !String::from_utf8_lossy(&tls.ca).contains(PEM_CERTIFICATE) {
            return Err(AccessError::NoAuthority);
        }
        config = config.ca_certificate(Certificate::from_pem(&tls.ca));
        if let Some((certificate, key)) = &tls.identity {
            config = config.identity(Identity::from_pem(certificate, key));
        }
    }
    endpoint
        .tls_config(config)
        .map_err(|error| AccessError::Tls {
            reason: error_chain(&error),
        })
}
