//! Certificates of the nodes of a fleet.

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwap;
use jiff::Timestamp;
use rustls::client::Resumption;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, InvalidDnsNameError, PrivateKeyDer, ServerName};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use sha2::{Digest as _, Sha256};
use thiserror::Error;
use x509_cert::der::Decode as _;

use super::cluster_secret::ClusterSecret;
use super::derived;

#[cfg(test)]
mod tests;

/// Maximum size of each of the three files.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Paths of the certificates, in PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FleetTlsFiles {
    /// The CA of the nodes' certificates. It must sign no others, because every holder of its
    /// certificates counts as a node.
    pub ca: PathBuf,
    /// This node's certificate, for servers and for clients, and the intermediate certificates.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// Both sides of TLS between nodes, replaced as a whole when the files or the secret change.
#[derive(Debug)]
pub struct FleetTls {
    source: Source,
    loaded: ArcSwap<Loaded>,
    /// How often it was replaced.
    reloads: AtomicU64,
}

#[derive(Debug)]
enum Source {
    Files(FleetTlsFiles),
    /// The secret and the node's name.
    Secret(Arc<ClusterSecret>, String),
}

#[derive(Debug)]
struct Loaded {
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
    /// `None` for derived certificates.
    expires_at: Option<Timestamp>,
    /// Hash of the files or of the derived keys, to detect changes.
    digest: [u8; 32],
}

/// The certificate that a node presents, and the CAs that it trusts.
pub(super) struct Identity {
    pub(super) roots: RootCertStore,
    pub(super) chain: Vec<CertificateDer<'static>>,
    pub(super) key: PrivateKeyDer<'static>,
}

/// Why certificates cannot be used.
#[derive(Debug, Error)]
pub enum FleetTlsError {
    #[error("cannot read {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{path} is larger than {MAX_FILE_BYTES} bytes")]
    TooLarge { path: PathBuf },
    #[error("{path} holds no {what} in PEM")]
    Pem {
        path: PathBuf,
        what: &'static str,
        #[source]
        source: rustls::pki_types::pem::Error,
    },
    #[error("{path} holds a certificate that cannot be read")]
    Certificate {
        path: PathBuf,
        #[source]
        source: x509_cert::der::Error,
    },
    #[error("{path} holds a certificate that is not valid for a CA")]
    Root {
        path: PathBuf,
        #[source]
        source: rustls::Error,
    },
    #[error("the certificate {cert} and the key {key} cannot be used together")]
    Pair {
        cert: PathBuf,
        key: PathBuf,
        #[source]
        source: rustls::Error,
    },
    #[error("cannot derive certificates from the secret")]
    Derive(#[from] rcgen::Error),
    #[error("the certificates derived from the secret cannot be used")]
    Derived(#[source] rustls::Error),
}

impl FleetTls {
    /// With the certificates in these files.
    ///
    /// # Errors
    /// Files that cannot be read or do not match.
    pub fn load(files: FleetTlsFiles) -> Result<Self, FleetTlsError> {
        Self::new(Source::Files(files))
    }

    /// With certificates for the node `node` that are derived from the fleet's secret.
    ///
    /// # Errors
    /// The system returns no random bytes for the certificate's key.
    pub fn derive(secret: Arc<ClusterSecret>, node: &str) -> Result<Self, FleetTlsError> {
        Self::new(Source::Secret(secret, node.to_owned()))
    }

    fn new(source: Source) -> Result<Self, FleetTlsError> {
        let loaded = ArcSwap::from_pointee(source.load()?);
        Ok(Self {
            source,
            loaded,
            reloads: AtomicU64::new(0),
        })
    }

    /// Reads the files again, or derives the certificates from the secret as it is now, and returns
    /// whether they have changed. Existing connections stay.
    ///
    /// # Errors
    /// As for [`FleetTls::load`] and [`FleetTls::derive`]; what was loaded stays in use.
    pub fn reload(&self) -> Result<bool, FleetTlsError> {
        let loaded = self.source.load()?;
        let changed = loaded.digest != self.loaded.load().digest;
        if changed {
            self.loaded.store(Arc::new(loaded));
            self.reloads.fetch_add(1, Ordering::Relaxed);
        }
        Ok(changed)
    }

    /// How often the certificates have changed: connections opened before the latest change use older ones.
    #[must_use]
    pub fn reloads(&self) -> u64 {
        self.reloads.load(Ordering::Relaxed)
    }

    /// For incoming connections: requires a certificate of the fleet.
    #[must_use]
    pub fn server(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.loaded.load().server)
    }

    /// For outgoing connections: presents this node's certificate.
    #[must_use]
    pub fn client(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.loaded.load().client)
    }

    /// The name that the certificate of the node `node` at `host` must have.
    ///
    /// # Errors
    /// No certificate can have it.
    pub fn server_name(
        &self,
        node: &str,
        host: &str,
    ) -> Result<ServerName<'static>, InvalidDnsNameError> {
        match &self.source {
            Source::Files(_) => host.to_owned().try_into(),
            Source::Secret(..) => derived::certificate_name(node).try_into(),
        }
    }

    /// When the first of this node's certificates expires; `None` if they are derived.
    #[must_use]
    pub fn expires_at(&self) -> Option<Timestamp> {
        self.loaded.load().expires_at
    }
}

impl Source {
    fn load(&self) -> Result<Loaded, FleetTlsError> {
        let (identity, expires_at, digest) = match self {
            Self::Files(files) => {
                let contents = Contents::read(files)?;
                let (identity, expires_at) = contents.identity(files)?;
                (identity, Some(expires_at), contents.digest())
            }
            Self::Secret(secret, node) => {
                let keys = secret.derive(derived::PURPOSE);
                let digest = Sha256::digest(keys.concat()).into();
                (derived::identity(&keys, node)?, None, digest)
            }
        };
        let (server, client) = identity.configure().map_err(|source| match self {
            Self::Files(files) => FleetTlsError::Pair {
                cert: files.cert.clone(),
                key: files.key.clone(),
                source,
            },
            Self::Secret(..) => FleetTlsError::Derived(source),
        })?;
        Ok(Loaded {
            server: Arc::new(server),
            client: Arc::new(client),
            expires_at,
            digest,
        })
    }
}

impl Identity {
    fn configure(self) -> Result<(ServerConfig, ClientConfig), rustls::Error> {
        let roots = Arc::new(self.roots);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        // Without hints, the other end does not learn which CAs this node trusts. Every node has
        // only one certificate to choose from.
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
                .clear_root_hint_subjects()
                .build()
                .map_err(|error| rustls::Error::General(error.to_string()))?;
        // Both sides are conman, so nothing older than 1.3 is needed.
        let versions = &[&rustls::version::TLS13];
        let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(versions)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(self.chain.clone(), self.key.clone_key())?;
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)?
            .with_root_certificates(roots)
            .with_client_auth_cert(self.chain, self.key)?;
        // A resumed session presents no certificate, so an expired one would be accepted.
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        client.resumption = Resumption::disabled();
        // The name would be sent unencrypted, and the other end has only one certificate.
        client.enable_sni = false;
        Ok((server, client))
    }
}

/// Content of the three files.
struct Contents {
    ca: Vec<u8>,
    cert: Vec<u8>,
    key: Vec<u8>,
}

impl Contents {
    fn read(files: &FleetTlsFiles) -> Result<Self, FleetTlsError> {
        Ok(Self {
            ca: read(&files.ca)?,
            cert: read(&files.cert)?,
            key: read(&files.key)?,
        })
    }

    fn digest(&self) -> [u8; 32] {
        let mut digest = Sha256::new();
        for part in [&self.ca, &self.cert, &self.key] {
            digest.update((part.len() as u64).to_be_bytes());
            digest.update(part);
        }
        digest.finalize().into()
    }

    fn identity(&self, files: &FleetTlsFiles) -> Result<(Identity, Timestamp), FleetTlsError> {
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&self.ca, &files.ca)? {
            roots
                .add(certificate)
                .map_err(|source| FleetTlsError::Root {
                    path: files.ca.clone(),
                    source,
                })?;
        }
        let chain = certificates(&self.cert, &files.cert)?;
        let expires_at = expiry(&chain, &files.cert)?;
        let key =
            PrivateKeyDer::from_pem_slice(&self.key).map_err(|source| FleetTlsError::Pem {
                path: files.key.clone(),
                what: "private key",
                source,
            })?;
        Ok((Identity { roots, chain, key }, expires_at))
    }
}

fn read(path: &Path) -> Result<Vec<u8>, FleetTlsError> {
    let failed = |source| FleetTlsError::Read {
        path: path.to_path_buf(),
        source,
    };
    let file = std::fs::File::open(path).map_err(failed)?;
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        let path = path.to_path_buf();
        return Err(FleetTlsError::TooLarge { path });
    }
    Ok(bytes)
}

fn certificates(pem: &[u8], path: &Path) -> Result<Vec<CertificateDer<'static>>, FleetTlsError> {
    let failed = |source| FleetTlsError::Pem {
        path: path.to_path_buf(),
        what: "certificate",
        source,
    };
    let found: Vec<_> = CertificateDer::pem_slice_iter(pem)
        .collect::<Result<_, _>>()
        .map_err(failed)?;
    if found.is_empty() {
        return Err(failed(rustls::pki_types::pem::Error::NoItemsFound));
    }
    Ok(found)
}

/// When the first of the certificates in a PEM text expires, if they can be read.
#[must_use]
pub fn certificates_expire_at(pem: &[u8]) -> Option<Timestamp> {
    let nowhere = Path::new("");
    let chain = certificates(pem, nowhere).ok()?;
    expiry(&chain, nowhere).ok()
}

fn expiry(chain: &[CertificateDer<'_>], path: &Path) -> Result<Timestamp, FleetTlsError> {
    let mut first = Timestamp::MAX;
    for certificate in chain {
        let certificate = x509_cert::Certificate::from_der(certificate).map_err(|source| {
            FleetTlsError::Certificate {
                path: path.to_path_buf(),
                source,
            }
        })?;
        let not_after = certificate.tbs_certificate.validity.not_after;
        let seconds = i64::try_from(not_after.to_unix_duration().as_secs()).unwrap_or(i64::MAX);
        // A time beyond the range of timestamps counts as never.
        first = first.min(Timestamp::from_second(seconds).unwrap_or(Timestamp::MAX));
    }
    Ok(first)
}
