//! Certificates of the nodes of a fleet.

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use jiff::Timestamp;
use rustls::client::Resumption;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, VerifierBuilderError, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use sha2::{Digest as _, Sha256};
use thiserror::Error;
use x509_cert::der::Decode as _;

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

/// Both sides of TLS between nodes, from files that may be replaced.
#[derive(Debug)]
pub struct FleetTls {
    files: FleetTlsFiles,
    loaded: ArcSwap<Loaded>,
}

#[derive(Debug)]
struct Loaded {
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
    expires_at: Timestamp,
    /// Hash of all three files, to detect changes.
    digest: [u8; 32],
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
    #[error("{path} holds no certificate of a CA")]
    Authority {
        path: PathBuf,
        #[source]
        source: VerifierBuilderError,
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
}

impl FleetTls {
    /// Reads the files.
    ///
    /// # Errors
    /// Files that cannot be read or do not match.
    pub fn load(files: FleetTlsFiles) -> Result<Self, FleetTlsError> {
        let loaded = ArcSwap::from_pointee(Contents::read(&files)?.load(&files)?);
        Ok(Self { files, loaded })
    }

    /// Reads the files again and returns whether they have changed. Existing connections stay.
    ///
    /// # Errors
    /// As for [`FleetTls::load`]; what was loaded stays in use.
    pub fn reload(&self) -> Result<bool, FleetTlsError> {
        let contents = Contents::read(&self.files)?;
        if contents.digest() == self.loaded.load().digest {
            return Ok(false);
        }
        self.loaded.store(Arc::new(contents.load(&self.files)?));
        Ok(true)
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

    /// When the first of this node's certificates expires.
    #[must_use]
    pub fn expires_at(&self) -> Timestamp {
        self.loaded.load().expires_at
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

    fn load(&self, files: &FleetTlsFiles) -> Result<Loaded, FleetTlsError> {
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&self.ca, &files.ca)? {
            roots
                .add(certificate)
                .map_err(|source| FleetTlsError::Root {
                    path: files.ca.clone(),
                    source,
                })?;
        }
        let roots = Arc::new(roots);
        let chain = certificates(&self.cert, &files.cert)?;
        let expires_at = expiry(&chain, &files.cert)?;
        let key = || {
            PrivateKeyDer::from_pem_slice(&self.key).map_err(|source| FleetTlsError::Pem {
                path: files.key.clone(),
                what: "private key",
                source,
            })
        };
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
                .build()
                .map_err(|source| FleetTlsError::Authority {
                    path: files.ca.clone(),
                    source,
                })?;
        let pair = |source| FleetTlsError::Pair {
            cert: files.cert.clone(),
            key: files.key.clone(),
            source,
        };
        // Both sides are conman, so nothing older than 1.3 is needed.
        let versions = &[&rustls::version::TLS13];
        let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(versions)
            .map_err(pair)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain.clone(), key()?)
            .map_err(pair)?;
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .map_err(pair)?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key()?)
            .map_err(pair)?;
        // A resumed session presents no certificate, so an expired one would be accepted.
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        client.resumption = Resumption::disabled();
        Ok(Loaded {
            server: Arc::new(server),
            client: Arc::new(client),
            expires_at,
            digest: self.digest(),
        })
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

#[cfg(test)]
mod tests {
    use std::fs;

    use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
    use rustls::pki_types::ServerName;
    use rustls::{ClientConnection, ConnectionCommon, HandshakeKind, ServerConnection};

    use super::*;

    /// A folder with a CA and one node's certificate, which expires in this year.
    fn folder(year: i32) -> (tempfile::TempDir, FleetTlsFiles) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        let files = FleetTlsFiles {
            ca: path("ca.pem"),
            cert: path("cert.pem"),
            key: path("key.pem"),
        };
        write(&files, year);
        (folder, files)
    }

    fn write(files: &FleetTlsFiles, year: i32) {
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca_key = KeyPair::generate().expect("a key");
        let ca = params.self_signed(&ca_key).expect("signed");
        let issuer = Issuer::new(params, ca_key);
        let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).expect("a name");
        params.not_after = rcgen::date_time_ymd(year, 1, 1);
        let key = KeyPair::generate().expect("a key");
        let cert = params.signed_by(&key, &issuer).expect("signed");
        fs::write(&files.ca, ca.pem()).expect("written");
        fs::write(&files.cert, cert.pem()).expect("written");
        fs::write(&files.key, key.serialize_pem()).expect("written");
    }

    #[test]
    fn certificates_are_loaded_anew_when_the_files_have_changed_and_kept_when_they_are_bad() {
        let (_folder, files) = folder(2090);
        let tls = FleetTls::load(files.clone()).expect("valid");
        assert_eq!(tls.expires_at().to_string(), "2090-01-01T00:00:00Z");
        let before = tls.server();
        assert!(!tls.reload().expect("valid"));
        assert!(Arc::ptr_eq(&before, &tls.server()));
        write(&files, 2091);
        assert!(tls.reload().expect("valid"));
        assert_eq!(tls.expires_at().to_string(), "2091-01-01T00:00:00Z");
        // Half of a replacement: the old key with the new certificate.
        let key = fs::read(&files.key).expect("there");
        write(&files, 2092);
        fs::write(&files.key, key).expect("written");
        let error = tls.reload().expect_err("they do not belong together");
        assert!(matches!(error, FleetTlsError::Pair { .. }), "{error:?}");
        assert_eq!(tls.expires_at().to_string(), "2091-01-01T00:00:00Z");
    }

    #[test]
    fn every_connection_shows_its_certificate_anew() {
        let (_folder, files) = folder(2090);
        let tls = FleetTls::load(files).expect("valid");
        for _ in 0..2 {
            let name = ServerName::try_from("127.0.0.1").expect("a name");
            let mut client = ClientConnection::new(tls.client(), name).expect("configured");
            let mut server = ServerConnection::new(tls.server()).expect("configured");
            // One more iteration than needed: includes what the server sends unrequested.
            for _ in 0..4 {
                pass(&mut client, &mut server);
                pass(&mut server, &mut client);
            }
            assert!(!client.is_handshaking() && !server.is_handshaking());
            assert_eq!(client.handshake_kind(), Some(HandshakeKind::Full));
            assert_eq!(client.tls13_tickets_received(), 0);
        }
    }

    /// Passes all pending data of one side to the other.
    fn pass<A, B>(from: &mut ConnectionCommon<A>, to: &mut ConnectionCommon<B>) {
        let mut said = Vec::new();
        while from.wants_write() {
            from.write_tls(&mut said).expect("written");
        }
        let mut said = &said[..];
        while !said.is_empty() {
            to.read_tls(&mut said).expect("read");
            to.process_new_packets().expect("no error");
        }
    }

    #[test]
    fn files_that_hold_nothing_of_use_are_named() {
        for spoilt in 0..3 {
            let (_folder, files) = folder(2090);
            let path = [&files.ca, &files.cert, &files.key][spoilt];
            for text in [
                "",
                "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
            ] {
                fs::write(path, text).expect("written");
                let error = FleetTls::load(files.clone()).expect_err("spoilt");
                let name = path.to_string_lossy().into_owned();
                assert!(error.to_string().contains(&name), "{error}");
            }
            fs::remove_file(path).expect("there");
            let error = FleetTls::load(files.clone()).expect_err("gone");
            assert!(matches!(error, FleetTlsError::Read { .. }), "{error:?}");
        }
    }
}
