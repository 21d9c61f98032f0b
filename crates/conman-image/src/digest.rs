//! SHA-256 digests, which name layers and images.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

const PREFIX: &str = "sha256:";

/// A SHA-256 digest, written `sha256:` and 64 lower-case hexadecimal digits.
///
/// The only algorithm that the store supports: images use no other in practice, and a second one
/// would give a layer two names.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest([u8; 32]);

/// Names a layer: the digest of its uncompressed archive (OCI's "diff id").
pub type LayerId = Digest;

/// Names an image: the digest of its configuration.
pub type ImageId = Digest;

#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not a SHA-256 digest: expected sha256: and 64 hexadecimal digits in lower case")]
pub struct DigestError(String);

/// Most characters of a bad digest that an error quotes.
const QUOTED_CHARS: usize = 100;

impl Digest {
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// Only the 64 digits, which name files.
    pub fn hex(&self) -> String {
        hex::encode(self.0)
    }

    /// Reads 64 digits without the algorithm's name.
    pub fn from_hex(digits: &str) -> Result<Self, DigestError> {
        let mut bytes = [0; 32];
        let read = hex::decode_to_slice(digits, &mut bytes);
        // Upper case would give a digest two names.
        if read.is_err() || digits.bytes().any(|digit| digit.is_ascii_uppercase()) {
            return Err(DigestError(digits.chars().take(QUOTED_CHARS).collect()));
        }
        Ok(Self(bytes))
    }
}

/// Computes a digest piece by piece.
#[derive(Debug, Default)]
pub(crate) struct Hasher(Sha256);

impl Hasher {
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(crate) fn finish(self) -> Digest {
        Digest(self.0.finalize().into())
    }
}

impl FromStr for Digest {
    type Err = DigestError;

    fn from_str(text: &str) -> Result<Self, DigestError> {
        match text.strip_prefix(PREFIX) {
            Some(hex) => Self::from_hex(hex),
            None => Err(DigestError(text.chars().take(QUOTED_CHARS).collect())),
        }
    }
}

impl TryFrom<String> for Digest {
    type Error = DigestError;

    fn try_from(text: String) -> Result<Self, DigestError> {
        text.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(PREFIX)?;
        formatter.write_str(&self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_reads_back_what_it_writes() {
        let digest = Digest::of(b"");
        let text = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(digest.to_string(), text);
        assert_eq!(text.parse::<Digest>().expect("well formed"), digest);
    }

    #[test]
    fn anything_that_could_name_another_file_is_no_digest() {
        let hex = Digest::of(b"").hex();
        for bad in [
            hex.clone(),
            format!("sha512:{hex}"),
            format!("sha256:{}", hex.to_uppercase()),
            format!("sha256:../{}", &hex[3..]),
            format!("sha256:{}é", &hex[2..]),
            "sha256:".to_owned(),
        ] {
            assert!(bad.parse::<Digest>().is_err(), "{bad}");
        }
    }
}
