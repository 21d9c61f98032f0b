//! Certificates of the nodes of a fleet.

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

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

/// What a node authenticates itself with, and whom it trusts.
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
        Ok(Self { source, loaded })
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
        }
        Ok(changed)
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

#[cfg(test)]
mod tests {
    use std::fs;

    use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
    use std::os::unix::fs::PermissionsExt as _;

    use rustls::{ClientConnection, ConnectionCommon, HandshakeKind, ServerConnection};

    use super::*;

    fn expires(tls: &FleetTls) -> String {
        tls.expires_at().expect("given").to_string()
    }

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
        issue(&Authority::new(), files, year);
    }

    struct Authority {
        pem: String,
        issuer: Issuer<'static, KeyPair>,
    }

    impl Authority {
        fn new() -> Self {
            let mut params = CertificateParams::new(Vec::new()).expect("no names");
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            let key = KeyPair::generate().expect("a key");
            let pem = params.self_signed(&key).expect("signed").pem();
            let issuer = Issuer::new(params, key);
            Self { pem, issuer }
        }
    }

    fn issue(authority: &Authority, files: &FleetTlsFiles, year: i32) {
        let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).expect("a name");
        params.not_after = rcgen::date_time_ymd(year, 1, 1);
        let key = KeyPair::generate().expect("a key");
        let cert = params.signed_by(&key, &authority.issuer).expect("signed");
        fs::write(&files.ca, &authority.pem).expect("written");
        fs::write(&files.cert, cert.pem()).expect("written");
        fs::write(&files.key, key.serialize_pem()).expect("written");
    }

    #[test]
    fn certificates_are_loaded_anew_when_the_files_have_changed_and_kept_when_they_are_bad() {
        let (_folder, files) = folder(2090);
        let tls = FleetTls::load(files.clone()).expect("valid");
        assert_eq!(expires(&tls), "2090-01-01T00:00:00Z");
        let before = tls.server();
        assert!(!tls.reload().expect("valid"));
        assert!(Arc::ptr_eq(&before, &tls.server()));
        write(&files, 2091);
        assert!(tls.reload().expect("valid"));
        assert_eq!(expires(&tls), "2091-01-01T00:00:00Z");
        // Half of a replacement: the old key with the new certificate.
        let key = fs::read(&files.key).expect("there");
        write(&files, 2092);
        fs::write(&files.key, key).expect("written");
        let error = tls.reload().expect_err("they do not belong together");
        assert!(matches!(error, FleetTlsError::Pair { .. }), "{error:?}");
        assert_eq!(expires(&tls), "2091-01-01T00:00:00Z");
    }

    #[test]
    fn every_connection_shows_its_certificate_anew() {
        let (_folder, files) = folder(2090);
        let tls = FleetTls::load(files).expect("valid");
        for _ in 0..2 {
            let (client, server) = connect(&tls, &tls, "a").expect("it trusts itself");
            assert!(!client.is_handshaking() && !server.is_handshaking());
            assert_eq!(client.handshake_kind(), Some(HandshakeKind::Full));
            assert_eq!(client.tls13_tickets_received(), 0);
        }
    }

    /// Connects one node to another, which is called `to` and is at 127.0.0.1.
    fn connect(
        from: &FleetTls,
        at: &FleetTls,
        to: &str,
    ) -> Result<(ClientConnection, ServerConnection), rustls::Error> {
        let name = from.server_name(to, "127.0.0.1").expect("a name");
        let mut client = ClientConnection::new(from.client(), name)?;
        let mut server = ServerConnection::new(at.server())?;
        assert_eq!(server.server_name(), None);
        // One more iteration than needed: includes what the server sends unrequested.
        for _ in 0..4 {
            pass(&mut client, &mut server)?;
            assert_eq!(server.server_name(), None, "it is sent unencrypted");
            pass(&mut server, &mut client)?;
        }
        Ok((client, server))
    }

    /// Passes all pending data of one side to the other.
    fn pass<A, B>(
        from: &mut ConnectionCommon<A>,
        to: &mut ConnectionCommon<B>,
    ) -> Result<(), rustls::Error> {
        let mut said = Vec::new();
        while from.wants_write() {
            from.write_tls(&mut said).expect("written");
        }
        let mut said = &said[..];
        while !said.is_empty() {
            to.read_tls(&mut said).expect("read");
            to.process_new_packets()?;
        }
        Ok(())
    }

    const OLD: &str = "0123456789abcdef0123456789abcdef";
    const NEW: &str = "fedcba9876543210fedcba9876543210";

    /// A node with a secret file of these lines.
    struct Node {
        tls: FleetTls,
        secret: Arc<ClusterSecret>,
        _folder: tempfile::TempDir,
    }

    fn node(name: &str, lines: &[&str]) -> Node {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("fleet.key");
        fs::write(&path, lines.join("\n")).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("chmod");
        let secret = Arc::new(ClusterSecret::load(path).expect("valid"));
        Node {
            tls: FleetTls::derive(Arc::clone(&secret), name).expect("derived"),
            secret,
            _folder: folder,
        }
    }

    impl Node {
        fn replace(&self, lines: &[&str]) {
            fs::write(self.secret.path(), lines.join("\n")).expect("written");
            assert!(self.secret.reload().expect("valid"));
            assert!(self.tls.reload().expect("derived"), "it has changed");
            assert!(!self.tls.reload().expect("derived"), "not again");
        }
    }

    /// Whether each of the two accepts the other's connection.
    fn accept_each_other(a: &Node, b: &Node) -> [bool; 2] {
        [
            connect(&a.tls, &b.tls, "b").is_ok(),
            connect(&b.tls, &a.tls, "a").is_ok(),
        ]
    }

    #[test]
    fn nodes_with_one_secret_accept_each_other_and_none_with_another() {
        let (a, b) = (node("a", &[OLD]), node("b", &[OLD]));
        assert_eq!(accept_each_other(&a, &b), [true; 2]);
        assert_eq!(a.tls.expires_at(), None);
        assert_eq!(
            accept_each_other(&a, &node("b", &[NEW])),
            [false; 2],
            "another secret"
        );
        let (_folder, files) = folder(2090);
        let given = FleetTls::load(files).expect("valid");
        assert!(connect(&a.tls, &given, "b").is_err());
        assert!(connect(&given, &a.tls, "a").is_err());
    }

    #[test]
    fn another_node_at_the_address_is_noticed_whatever_the_names_are() {
        for name in ["7", "a_b.", "-", &"x".repeat(253)] {
            let (a, b) = (node("a", &[OLD]), node(name, &[OLD]));
            connect(&a.tls, &b.tls, name).expect("it is that node");
            let error = connect(&a.tls, &b.tls, "b").expect_err("another one");
            let error = error.to_string();
            assert!(error.contains("not valid for name"), "{error}");
        }
    }

    #[test]
    fn a_secret_is_replaced_without_a_moment_at_which_nodes_refuse_each_other() {
        let (a, b) = (node("a", &[OLD]), node("b", &[OLD]));
        let before = node("c", &[OLD]);
        for step in [&[OLD, NEW][..], &[NEW, OLD], &[NEW]] {
            a.replace(step);
            assert_eq!(accept_each_other(&a, &b), [true; 2], "{step:?}");
            b.replace(step);
            assert_eq!(accept_each_other(&a, &b), [true; 2], "{step:?}");
        }
        assert_eq!(accept_each_other(&a, &before), [false; 2], "removed");
    }

    #[test]
    fn a_derived_certificate_is_valid_at_every_time() {
        let keys = node("a", &[OLD]).secret.derive(derived::PURPOSE);
        let identity = derived::identity(&keys, "a").expect("derived");
        let parsed = x509_cert::Certificate::from_der(&identity.chain[0]).expect("parsed");
        let validity = parsed.tbs_certificate.validity;
        assert_eq!(validity.not_before.to_unix_duration().as_secs(), 0);
        assert_eq!(validity.not_after.to_string(), "9999-12-31T00:00:00Z");
    }

    #[test]
    fn a_given_certificate_that_has_expired_is_refused_by_both_sides() {
        let authority = Authority::new();
        let load = |year| {
            let (folder, files) = folder(2090);
            issue(&authority, &files, year);
            let tls = FleetTls::load(files).expect("readable");
            (folder, tls)
        };
        let ((_one, valid), (_other, expired)) = (load(2090), load(2001));
        for (from, to) in [(&valid, &expired), (&expired, &valid)] {
            let error = connect(from, to, "a").expect_err("expired").to_string();
            assert!(error.contains("expired"), "{error}");
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
