//! An etcd that shows a certificate and asks for one.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use conman_etcd::{AccessError, EtcdAccess, EtcdCredentials, EtcdTls};
use conman_registry::Registry;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

use crate::etcd::{Etcd, Files};
use crate::node::{Node, options, patient};

/// Whoever signs, and its certificate.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pub(crate) pem: String,
}

impl Authority {
    pub(crate) fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect("a key");
        let pem = params.self_signed(&key).expect("signed").pem();
        let issuer = Issuer::new(params, key);
        Self { issuer, pem }
    }

    /// A certificate that ends in this year, and its key.
    pub(crate) fn signs(&self, name: &str, until: i32) -> (Vec<u8>, Vec<u8>) {
        let mut params = CertificateParams::new(vec![name.to_owned()]).expect("a name");
        // etcd takes a common name for a user's.
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.not_after = rcgen::date_time_ymd(until, 1, 1);
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.issuer).expect("signed");
        (
            certificate.pem().into_bytes(),
            key.serialize_pem().into_bytes(),
        )
    }

    pub(crate) fn writes(&self, dir: &Path, name: &str) -> (PathBuf, PathBuf) {
        let (certificate, key) = self.signs(name, 2090);
        let path = |suffix: &str| dir.join(format!("{name}.{suffix}"));
        let files = (path("pem"), path("key"));
        fs::write(&files.0, certificate).expect("written");
        fs::write(&files.1, key).expect("written");
        files
    }

    fn etcd(&self) -> Option<Etcd> {
        Etcd::start_with(|dir: &Path, address: Ipv4Addr| {
            let ca = dir.join("ca.pem");
            fs::write(&ca, &self.pem).expect("written");
            Some(Files {
                ca,
                server: self.writes(dir, &address.to_string()),
                client: self.writes(dir, "client"),
            })
        })
    }
}

fn node(etcd: &Etcd, tls: Option<EtcdTls>, login: Option<(&str, &str)>) -> Node {
    let dir = tempfile::tempdir().expect("a directory");
    Node::in_dir(dir, Vec::new(), |dir| {
        let mut options = options(&etcd.url(), "a", patient(), dir);
        options.access.tls = tls;
        options.access.credentials = login.map(|(user, password)| EtcdCredentials {
            user: user.to_owned(),
            password: password.to_owned(),
        });
        options
    })
}

#[tokio::test]
async fn a_node_joins_by_its_certificate_its_user_and_its_password() {
    let authority = Authority::new("one");
    let Some(etcd) = authority.etcd() else { return };
    etcd.asks_for_password_of_root("secret");
    let tls = || {
        Some(EtcdTls {
            ca: authority.pem.clone().into_bytes(),
            identity: Some(authority.signs("node", 2090)),
        })
    };
    let wrong = node(&etcd, tls(), Some(("root", "wrong")));
    let reason = wrong.waits_since("cannot sign in").await;
    assert!(reason.contains("registry.password_file"), "{reason}");
    let right = node(&etcd, tls(), Some(("root", "secret")));
    right.live().await;
    right.claim("s").await.expect("free");
    assert_eq!(right.registry.list().await.expect("listed").len(), 1);
}

#[tokio::test]
async fn an_etcd_of_another_authority_is_not_trusted_and_the_file_to_look_at_is_named() {
    let authority = Authority::new("one");
    let Some(etcd) = authority.etcd() else { return };
    let identity = || Some(authority.signs("node", 2090));
    let other = Authority::new("two").pem.into_bytes();
    for ca in [Some(other), None] {
        let tls = ca.map(|ca| EtcdTls {
            ca,
            identity: identity(),
        });
        let node = node(&etcd, tls, None);
        let reason = node.waits_since("registry.ca_file").await;
        assert!(reason.contains(&etcd.url()), "{reason}");
        assert!(node.claim("s").await.is_err());
    }
}

#[tokio::test]
async fn a_certificate_that_etcd_does_not_take_is_named_with_its_fields() {
    let authority = Authority::new("one");
    let Some(etcd) = authority.etcd() else { return };
    for (what, identity) in [
        ("none", None),
        ("expired", Some(authority.signs("node", 2020))),
        ("foreign", Some(Authority::new("two").signs("node", 2090))),
    ] {
        let tls = EtcdTls {
            ca: authority.pem.clone().into_bytes(),
            identity,
        };
        let node = node(&etcd, Some(tls), None);
        let reason = node.waits_since("registry.cert_file").await;
        assert!(reason.contains("registry.key_file"), "{what}: {reason}");
        assert!(node.claim("s").await.is_err(), "{what}");
    }
}

#[tokio::test]
async fn files_that_hold_no_certificates_are_refused_at_once() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut options = options("https://127.0.0.1:2379", "a", patient(), dir.path());
    options.access.tls = Some(EtcdTls {
        ca: b"no certificate".to_vec(),
        identity: None,
    });
    let fence = std::sync::Arc::new(conman_testkit::MemoryFence::holding(Vec::new()));
    let refused = conman_etcd::EtcdRegistry::start(options, fence);
    let error = refused.expect_err("there is nothing to trust").to_string();
    assert!(error.contains("registry.ca_file"), "{error}");
}

#[tokio::test]
async fn a_certificate_is_replaced_while_the_node_runs() {
    let authority = Authority::new("one");
    let Some(etcd) = authority.etcd() else { return };
    let tls = |until| EtcdTls {
        ca: authority.pem.clone().into_bytes(),
        identity: Some(authority.signs("node", until)),
    };
    let node = node(&etcd, Some(tls(2020)), None);
    node.waits_since("registry.cert_file").await;
    let access = |tls| EtcdAccess {
        endpoints: vec![etcd.url()],
        credentials: None,
        tls: Some(tls),
    };
    let unusable = EtcdTls {
        ca: b"no certificate".to_vec(),
        identity: None,
    };
    let refused = node.registry.renew_access(&access(unusable));
    assert!(matches!(refused, Err(AccessError::NoAuthority)));
    let renewed = node.registry.renew_access(&access(tls(2090)));
    renewed.expect("usable");
    node.live().await;
    node.claim("s").await.expect("free");
}
