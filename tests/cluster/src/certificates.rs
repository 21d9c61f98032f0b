//! Who signs the certificates that nodes know each other by, where they have no common secret, and
//! that etcd and nodes know each other by, where etcd asks for some.

use std::fmt;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

use crate::layout::{Host, Layout};

/// Whom to trust, an own certificate and its key, for connections between nodes.
const FLEET: [&str; 3] = ["fleet-ca.pem", "fleet-cert.pem", "fleet-key.pem"];
/// The same for those between nodes and etcd.
const ETCD: [&str; 3] = ["etcd-ca.pem", "etcd-cert.pem", "etcd-key.pem"];

/// Signs the certificates of one fleet.
pub struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl fmt::Debug for Authority {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Authority").finish_non_exhaustive()
    }
}

impl Authority {
    /// # Errors
    /// When there are no random numbers.
    pub fn new(name: &str) -> Result<Self> {
        let mut params = CertificateParams::new(Vec::new())?;
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate()?;
        let pem = params.self_signed(&key)?.pem();
        let issuer = Issuer::new(params, key);
        Ok(Self { pem, issuer })
    }

    /// Has a node take those for nodes that this authority has signed.
    pub(crate) fn trusted_by(&self, layout: &Layout, host: &Host) -> Result<()> {
        replace(&files(layout, host, FLEET)[0], &self.pem)
    }

    /// Gives a node a certificate that ends with the year before.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn certify(&self, layout: &Layout, host: &Host, year: i32) -> Result<()> {
        self.sign(files(layout, host, FLEET), host, year)
    }

    /// The same for connections between nodes and etcd.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn certify_for_etcd(&self, layout: &Layout, host: &Host, year: i32) -> Result<()> {
        self.sign(etcd_files(layout, host), host, year)
    }

    fn sign(&self, [_, cert_file, key_file]: [PathBuf; 3], host: &Host, year: i32) -> Result<()> {
        let mut params = CertificateParams::new(vec![host.address.to_string()])?;
        params.not_after = rcgen::date_time_ymd(year, 1, 1);
        let key = KeyPair::generate()?;
        let cert = params.signed_by(&key, &self.issuer)?;
        replace(&key_file, &key.serialize_pem())?;
        replace(&cert_file, &cert.pem())
    }
}

/// Has a node or a member of etcd trust these authorities, the member once it is started again.
///
/// # Errors
/// When it cannot be written.
pub fn trust_for_etcd(layout: &Layout, host: &Host, these: &[&Authority]) -> Result<()> {
    let pem: String = these.iter().map(|one| one.pem.as_str()).collect();
    replace(&etcd_files(layout, host)[0], &pem)
}

/// Whom a host trusts in connections with etcd, its certificate and its key.
#[must_use]
pub fn etcd_files(layout: &Layout, host: &Host) -> [PathBuf; 3] {
    files(layout, host, ETCD)
}

/// As a node's configuration has them, in `[fleet]`.
pub(crate) fn line(layout: &Layout, host: &Host) -> String {
    let [ca, cert, key] = files(layout, host, FLEET).map(|path| path.display().to_string());
    format!("tls = {{ ca = \"{ca}\", cert = \"{cert}\", key = \"{key}\" }}\n")
}

/// The same in `[registry]`.
pub(crate) fn etcd_lines(layout: &Layout, host: &Host) -> String {
    let [ca, cert, key] = etcd_files(layout, host).map(|path| path.display().to_string());
    format!("ca_file = \"{ca}\"\ncert_file = \"{cert}\"\nkey_file = \"{key}\"\n")
}

/// Has a member ask nodes for certificates. What the tests themselves ask goes without.
pub(crate) fn etcd_arguments(layout: &Layout, host: &Host) -> Vec<String> {
    let [ca, cert, key] = etcd_files(layout, host).map(|path| path.display().to_string());
    let urls = format!("http://{},{}", host.etcd(), host.etcd_url_with_tls());
    let arguments = [
        ["--listen-client-urls", &urls],
        ["--trusted-ca-file", &ca],
        ["--cert-file", &cert],
        ["--key-file", &key],
    ];
    let mut all: Vec<String> = arguments.concat().into_iter().map(str::to_owned).collect();
    all.push("--client-cert-auth".to_owned());
    all
}

fn files(layout: &Layout, host: &Host, names: [&str; 3]) -> [PathBuf; 3] {
    names.map(|name| layout.host_directory(&host.name).join(name))
}

/// Whole or not at all.
fn replace(path: &Path, text: &str) -> Result<()> {
    let new = path.with_extension("new");
    let file = File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&new);
    file.and_then(|mut file| file.write_all(text.as_bytes()))
        .and_then(|()| fs::rename(&new, path))
        .with_context(|| format!("cannot write {}", path.display()))
}
