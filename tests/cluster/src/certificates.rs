//! Who signs the certificates that nodes know each other by, where they have no common secret.

use std::fmt;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

use crate::layout::{Host, Layout};

const CA: &str = "fleet-ca.pem";
const CERT: &str = "fleet-cert.pem";
const KEY: &str = "fleet-key.pem";

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
        replace(&path(layout, host, CA), &self.pem)
    }

    /// Gives a node a certificate that ends with the year before.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn certify(&self, layout: &Layout, host: &Host, year: i32) -> Result<()> {
        let mut params = CertificateParams::new(vec![host.address.to_string()])?;
        params.not_after = rcgen::date_time_ymd(year, 1, 1);
        let key = KeyPair::generate()?;
        let cert = params.signed_by(&key, &self.issuer)?;
        replace(&path(layout, host, KEY), &key.serialize_pem())?;
        replace(&path(layout, host, CERT), &cert.pem())
    }
}

/// As a node's configuration has them, in `[fleet]`.
pub(crate) fn line(layout: &Layout, host: &Host) -> String {
    let path = |file| path(layout, host, file).display().to_string();
    let (ca, cert, key) = (path(CA), path(CERT), path(KEY));
    format!("tls = {{ ca = \"{ca}\", cert = \"{cert}\", key = \"{key}\" }}\n")
}

fn path(layout: &Layout, host: &Host, file: &str) -> PathBuf {
    layout.host_directory(&host.name).join(file)
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
