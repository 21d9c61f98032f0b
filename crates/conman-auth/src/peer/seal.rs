//! The headers that one node adds to a request to another.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use http::header::{HOST, HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use jiff::Timestamp;

use super::cluster_secret::ClusterSecret;
use super::replay::Nonce;

/// The node that sends the request.
pub const X_CONMAN_PEER: HeaderName = HeaderName::from_static("x-conman-fleet");
/// `1`: the request has been forwarded once.
pub const X_CONMAN_HOP: HeaderName = HeaderName::from_static("x-conman-hop");
/// `v1 TIME NONCE NUMBER MAC`: milliseconds since 1970, hexadecimal, a count, hexadecimal.
pub const X_CONMAN_SEAL: HeaderName = HeaderName::from_static("x-conman-seal");

/// Number of a connection's first request.
pub(super) const FIRST_NUMBER: u64 = 1;

/// Maximum difference between the clocks of two nodes, in milliseconds.
pub const MAX_SKEW_MS: u64 = 30_000;

/// Prefix of the fields that a seal covers, except the seal itself.
const COVERED_PREFIX: &str = "x-conman-";
/// Start of the signed data, so that a seal cannot be used for anything else.
const PURPOSE: &[u8] = b"conman-fleet-v1";
const VERSION: &str = "v1";
/// Bytes of an HMAC-SHA256.
const MAC_BYTES: usize = 32;

/// Seals the requests of one connection to another node.
#[derive(Debug)]
pub struct Sealer {
    secret: Option<Arc<ClusterSecret>>,
    me: HeaderValue,
    to: String,
    nonce: Nonce,
    next: AtomicU64,
    binding: Vec<u8>,
}

impl Sealer {
    /// For a new connection from the node `me` to the node `to`. Without `secret`, requests are
    /// named but not sealed: TLS authenticates the connection. `binding` is key material of the TLS
    /// connection, or empty.
    ///
    /// # Errors
    /// The kernel returns no random bytes, or a node's name is not valid in a header.
    pub fn new(
        secret: Option<Arc<ClusterSecret>>,
        me: &str,
        to: &str,
        binding: Vec<u8>,
    ) -> std::io::Result<Self> {
        let mut nonce = Nonce::default();
        getrandom::fill(&mut nonce).map_err(std::io::Error::other)?;
        Ok(Self {
            secret,
            me: HeaderValue::from_str(me).map_err(std::io::Error::other)?,
            to: to.to_owned(),
            nonce,
            next: AtomicU64::new(FIRST_NUMBER),
            binding,
        })
    }

    /// Adds the sender and the seal to a request that is complete otherwise. Requests must be sent
    /// in the order in which they are sealed.
    pub fn seal(&self, parts: &mut Parts) {
        self.seal_at(parts, now_ms());
    }

    pub(super) fn seal_at(&self, parts: &mut Parts, at_ms: u64) {
        parts.headers.insert(X_CONMAN_PEER, self.me.clone());
        parts
            .headers
            .insert(X_CONMAN_HOP, HeaderValue::from_static("1"));
        parts.headers.remove(X_CONMAN_SEAL);
        let Some(secret) = &self.secret else {
            return;
        };
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let stamp = Stamp {
            at_ms,
            nonce: self.nonce,
            number,
        };
        let message = message(parts, &self.to, &stamp, &self.binding);
        let mac = secret.sign(&message);
        let text = format!(
            "{VERSION} {at_ms} {} {number} {}",
            hex(&self.nonce),
            hex(mac.as_ref())
        );
        // Digits and letters are always a valid value.
        if let Ok(value) = HeaderValue::from_str(&text) {
            parts.headers.insert(X_CONMAN_SEAL, value);
        }
    }
}

/// When and on which connection a request was sealed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamp {
    pub(super) at_ms: u64,
    pub(super) nonce: Nonce,
    pub(super) number: u64,
}

/// A received seal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Seal {
    pub(super) stamp: Stamp,
    pub(super) mac: [u8; MAC_BYTES],
}

impl Seal {
    /// Parses the one seal of a request.
    pub(super) fn read(headers: &HeaderMap) -> Result<Self, SealFault> {
        let mut values = headers.get_all(X_CONMAN_SEAL).iter();
        let (Some(value), None) = (values.next(), values.next()) else {
            return Err(SealFault::None);
        };
        let text = value.to_str().map_err(|_| SealFault::None)?;
        match text.split_once(' ') {
            Some((VERSION, words)) => Self::parse(words).ok_or(SealFault::None),
            Some((version, _)) if is_version(version) => Err(SealFault::OtherVersion),
            _ => Err(SealFault::None),
        }
    }

    fn parse(words: &str) -> Option<Self> {
        let mut words = words.split(' ');
        let mut next = || words.next();
        let seal = Self {
            stamp: Stamp {
                at_ms: next()?.parse().ok()?,
                nonce: unhex(next()?)?,
                number: next()?.parse().ok()?,
            },
            mac: unhex(next()?)?,
        };
        next().is_none().then_some(seal)
    }
}

/// Why a request has no valid seal to check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SealFault {
    None,
    OtherVersion,
}

fn is_version(word: &str) -> bool {
    let digits = word.strip_prefix('v').unwrap_or_default();
    !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
}

/// The data that a seal signs: every part with its length, so that two different requests never
/// sign the same data.
pub(super) fn message(parts: &Parts, to: &str, stamp: &Stamp, binding: &[u8]) -> Vec<u8> {
    let target = parts
        .uri
        .path_and_query()
        .map_or("", |target| target.as_str());
    let host = parts
        .headers
        .get(HOST)
        .map_or(&b""[..], HeaderValue::as_bytes);
    let mut message = Vec::with_capacity(512);
    let mut add = |part: &[u8]| {
        message.extend_from_slice(&(part.len() as u64).to_be_bytes());
        message.extend_from_slice(part);
    };
    add(PURPOSE);
    add(to.as_bytes());
    add(&stamp.at_ms.to_be_bytes());
    add(&stamp.nonce);
    add(&stamp.number.to_be_bytes());
    add(binding);
    add(parts.method.as_str().as_bytes());
    add(target.as_bytes());
    add(host);
    for (name, value) in covered(&parts.headers) {
        add(name.as_bytes());
        add(value);
    }
    message
}

fn covered(headers: &HeaderMap) -> Vec<(&str, &[u8])> {
    let own =
        |name: &HeaderName| name.as_str().starts_with(COVERED_PREFIX) && *name != X_CONMAN_SEAL;
    let mut fields: Vec<(&str, &[u8])> = headers
        .iter()
        .filter(|(name, _)| own(name))
        .map(|(name, value)| (name.as_str(), value.as_bytes()))
        .collect();
    fields.sort_unstable();
    fields
}

pub(super) fn now_ms() -> u64 {
    u64::try_from(Timestamp::now().as_millisecond()).unwrap_or_default()
}

fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digit = |nibble: u8| char::from(DIGITS[usize::from(nibble & 15)]);
    let both = |byte: &u8| [digit(byte >> 4), digit(*byte)];
    bytes.iter().flat_map(both).collect()
}

fn unhex<const SIZE: usize>(text: &str) -> Option<[u8; SIZE]> {
    let digits = text.as_bytes();
    let mut bytes = [0; SIZE];
    if digits.len() != 2 * SIZE {
        return None;
    }
    let value = |digit: u8| char::from(digit).to_digit(16);
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = u8::try_from(value(pair[0])? * 16 + value(pair[1])?).ok()?;
    }
    Some(bytes)
}
