//! A target as a client names it: a name, or an address in any notation.

use std::net::IpAddr;

/// Maximum length of a name, and of one of its labels.
const MAX_NAME_BYTES: usize = 253;
const MAX_LABEL_BYTES: usize = 63;

/// A host as a client names it: an address, or a name in lower case without a final dot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TargetHost {
    Name(String),
    Address(IpAddr),
}

/// Text that is neither.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HostError {
    #[error(
        "it is not a host name: a name has 1 to 253 characters, in labels of at most 63 letters, \
         digits, `-` and `_`"
    )]
    NotAName,
    #[error(
        "it ends in a number, but is not an address: write IPv4 addresses as four decimal numbers"
    )]
    NotAnAddress,
}

impl TargetHost {
    /// Parses a host, with an IPv6 address in brackets or without.
    ///
    /// A name that ends in a number is refused: resolvers read the older notations of IPv4 in it
    /// (`0x7f.1`, `2130706433`).
    pub fn parse(text: &str) -> Result<Self, HostError> {
        let bare = text
            .strip_prefix('[')
            .and_then(|text| text.strip_suffix(']'));
        if let Ok(address) = bare.unwrap_or(text).parse::<IpAddr>() {
            return Ok(Self::Address(address.to_canonical()));
        }
        let name = text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase();
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
        let is_label =
            |label: &str| (1..=MAX_LABEL_BYTES).contains(&label.len()) && label.bytes().all(plain);
        if name.len() > MAX_NAME_BYTES || !name.split('.').all(is_label) {
            return Err(HostError::NotAName);
        }
        let last = name.rsplit('.').next().unwrap_or_default();
        let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        let hexadecimal = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
        if digits(last) || last.strip_prefix("0x").is_some_and(hexadecimal) {
            return Err(HostError::NotAnAddress);
        }
        Ok(Self::Name(name))
    }
}
