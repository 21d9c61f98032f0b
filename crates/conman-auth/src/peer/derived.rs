//! The certificates that a node derives from the fleet's secret.
//!
//! Each secret yields the key of a CA, the same on every node. A node trusts the CAs of all secrets,
//! and signs its own certificate with the key of the first one, for a random key that never leaves
//! its memory. The certificates are valid at every time, so clocks do not matter.

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, Error, ExtendedKeyUsagePurpose,
    IsCa, Issuer, KeyPair, KeyUsagePurpose, PKCS_ED25519, date_time_ymd,
};
use rustls::RootCertStore;
use rustls::pki_types::PrivatePkcs8KeyDer;
use sha2::{Digest as _, Sha256};

use super::fleet_tls::Identity;

/// Purpose for which the CA's key is derived from a secret.
pub(super) const PURPOSE: &[u8] = b"conman-fleet-ca-v1";
/// Start of an Ed25519 private key in PKCS#8 (RFC 8410, section 7); the 32 bytes of the key follow.
const PKCS8_ED25519: [u8; 16] = [
    0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20,
];
/// Bytes of a node name's hash that stand for it in its certificate.
const NAME_BYTES: usize = 16;

/// The name in the certificate of the node `node`: a hash, because a node's name need not be valid
/// in a certificate, and because the certificate is shown before the other end is authenticated.
pub(super) fn certificate_name(node: &str) -> String {
    let hash = Sha256::digest(node.as_bytes());
    let hexadecimal: String = hash[..NAME_BYTES]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!("node-{hexadecimal}")
}

/// A certificate for `node` by the CA of the first of these keys, and the CAs of all.
pub(super) fn identity(ca_keys: &[Vec<u8>], node: &str) -> Result<Identity, Error> {
    let mut roots = RootCertStore::empty();
    let mut issuers = Vec::new();
    for ca_key in ca_keys {
        let (issuer, certificate) = authority(ca_key)?;
        roots
            .add(certificate)
            .map_err(|_| Error::CouldNotParseCertificate)?;
        issuers.push(issuer);
    }
    let issuer = issuers.first().ok_or(Error::CouldNotParseKeyPair)?;
    let mut params = params(vec![certificate_name(node)], "conman node")?;
    params.extended_key_usages = vec![
        ExtendedKeyUsagePurpose::ServerAuth,
        ExtendedKeyUsagePurpose::ClientAuth,
    ];
    let key = KeyPair::generate()?;
    let certificate = params.signed_by(&key, issuer)?;
    Ok(Identity {
        roots,
        chain: vec![certificate.der().clone()],
        key: key.into(),
    })
}

fn authority(
    key: &[u8],
) -> Result<
    (
        Issuer<'static, KeyPair>,
        rustls::pki_types::CertificateDer<'static>,
    ),
    Error,
> {
    let pkcs8 = PrivatePkcs8KeyDer::from([&PKCS8_ED25519, key].concat());
    let key = KeyPair::from_pkcs8_der_and_sign_algo(&pkcs8, &PKCS_ED25519)?;
    let mut params = params(Vec::new(), "conman fleet")?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let certificate = params.self_signed(&key)?.der().clone();
    Ok((Issuer::new(params, key), certificate))
}

fn params(names: Vec<String>, common_name: &str) -> Result<CertificateParams, Error> {
    let mut params = CertificateParams::new(names)?;
    params.distinguished_name = DistinguishedName::new();
    params
        .distinguished_name
        .push(DnType::CommonName, common_name);
    params.not_before = date_time_ymd(1970, 1, 1);
    // No well-defined end: RFC 5280, section 4.1.2.5.
    params.not_after = date_time_ymd(9999, 12, 31);
    Ok(params)
}
