//! A session's name.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Longest session id in bytes: one DNS label (RFC 1035, section 2.3.4).
const MAX_BYTES: usize = 63;

/// A session's name, chosen by the frontend: one DNS label in lower case, so that it can stand as
/// `{id}.<domain>` and in paths, container names and cgroup names without escaping.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String", into = "String")]
#[schema(
    value_type = String,
    pattern = "^(?![0-9]{1,5}-)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$",
    min_length = 1,
    max_length = 63,
    example = "alice-notebook"
)]
pub struct SessionId(Box<str>);

/// Why a string is no session id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{given}` is not a session id: use 1 to 63 characters of a-z, 0-9 and '-', \
     beginning and ending with a letter or digit, and not beginning with up to five digits and a '-', \
     which name a port"
)]
pub struct SessionIdError {
    /// The refused text, cut to a length that is safe to print.
    pub given: String,
}

impl SessionId {
    /// Longest id in bytes that has hosts for its ports: they need five digits and a dash more.
    pub const MAX_WITH_PORT: usize = MAX_BYTES - 6;

    /// An id made from a random number. It has no dash, so that it is never confused with a port and an id.
    #[must_use]
    pub fn generated(random: u64) -> Self {
        Self(format!("{random:016x}").into())
    }

    /// The id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for SessionId {
    type Err = SessionIdError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bytes = text.as_bytes();
        let alphanumeric = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        let valid = (1..=MAX_BYTES).contains(&bytes.len())
            && bytes.iter().all(|byte| alphanumeric(byte) || *byte == b'-')
            && bytes.first().is_some_and(alphanumeric)
            && bytes.last().is_some_and(alphanumeric)
            && !begins_like_a_port(text);
        if valid {
            Ok(Self(text.into()))
        } else {
            let given = text
                .chars()
                .take(MAX_BYTES)
                .flat_map(char::escape_default)
                .collect();
            Err(SessionIdError { given })
        }
    }
}

/// `3000-alice` is the host of port 3000 of session `alice`.
fn begins_like_a_port(text: &str) -> bool {
    let digits = text.split('-').next().unwrap_or_default();
    digits.len() < text.len()
        && (1..=5).contains(&digits.len())
        && digits.bytes().all(|byte| byte.is_ascii_digit())
}

impl TryFrom<String> for SessionId {
    type Error = SessionIdError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<SessionId> for String {
    fn from(id: SessionId) -> Self {
        id.0.into()
    }
}

impl AsRef<str> for SessionId {
    fn as_ref(&self) -> &str {
        self.as_str()
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl fmt::Debug for SessionId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn labels_at_both_ends_of_the_allowed_length_are_ids() {
        for text in [
            "a",
            "0",
            "a-b",
            "x--y",
            "12345",
            "123456-a",
            &"a".repeat(63),
        ] {
            assert!(text.parse::<SessionId>().is_ok(), "{text}");
        }
    }

    #[test]
    fn what_is_no_dns_label_is_refused_with_the_rule() {
        for text in [
            "",
            "-a",
            "a-",
            "A",
            "a_b",
            "8-a",
            "65535-a",
            "99999-",
            "a.b",
            "ä",
            "a/b",
            "a\n",
            &"a".repeat(64),
        ] {
            let error = text.parse::<SessionId>().expect_err(text);
            assert!(error.to_string().contains("1 to 63 characters"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn every_generated_id_is_one_without_a_dash(random: u64) {
            let id = SessionId::generated(random);
            prop_assert!(!id.as_str().contains('-'));
            prop_assert_eq!(id.as_str().parse(), Ok(id.clone()));
        }

        #[test]
        fn every_accepted_id_is_safe_in_a_path_and_a_host_name(text in "\\PC{0,70}") {
            if let Ok(id) = text.parse::<SessionId>() {
                prop_assert!(id.as_str().bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-'));
                prop_assert_eq!(id.as_str(), text);
            }
        }
    }
}
