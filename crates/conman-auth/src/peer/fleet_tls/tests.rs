//! Tests of how a fleet's certificates are read and replaced.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
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
