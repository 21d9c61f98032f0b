//! Commands that outlive their connection.

use std::fmt;
use std::str::FromStr;

use jiff::Timestamp;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use utoipa::ToSchema;

/// Name of a kept command: twelve digits of base sixteen, unique on its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, ToSchema)]
#[schema(value_type = String, pattern = "^[0-9a-f]{12}$")]
pub struct ExecId(u64);

/// Digits of an [`ExecId`].
const DIGITS: usize = 12;

impl ExecId {
    /// Of any number; what twelve digits cannot hold is left out.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self(number & 0xffff_ffff_ffff)
    }
}

impl fmt::Display for ExecId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:012x}", self.0)
    }
}

impl FromStr for ExecId {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let plain = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        let number = (text.len() == DIGITS && text.bytes().all(plain))
            .then(|| u64::from_str_radix(text, 16).ok())
            .flatten();
        number.map(Self).ok_or_else(|| {
            let shown: String = text.chars().take(2 * DIGITS).collect();
            format!(
                "`{}` is not the id of a command: twelve digits, 0-9 and a-f",
                shown.escape_default()
            )
        })
    }
}

impl Serialize for ExecId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ExecId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// A command in a session that needs no attached client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KeptExec {
    pub id: ExecId,
    /// Program and arguments. Long ones are cut, which `…` at their end shows.
    pub command: Vec<String>,
    /// The container's own when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Whether it has a terminal; otherwise its two outputs are separate.
    #[serde(default)]
    pub tty: bool,
    #[schema(value_type = String, format = DateTime)]
    pub started_at: Timestamp,
    /// Of its first process, as the session's programs see it; absent if it died at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// Whether it has not ended.
    pub running: bool,
    /// How it ended, where that is known: 128 + N by signal N.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// Whether it was killed because its `timeout_ms` was over.
    #[serde(default)]
    pub timed_out: bool,
    /// Bytes that it has written so far. The last 64 KiB are kept; none, and absent, if the node's shim died.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_bytes: Option<u64>,
}

/// The kept commands of a session, the oldest first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KeptExecList {
    pub execs: Vec<KeptExec>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_has_one_spelling() {
        let id = ExecId::new(u64::MAX - 0x0f);
        assert_eq!(id.to_string(), "fffffffffff0");
        assert_eq!("fffffffffff0".parse(), Ok(id));
        for other in ["", "fff", "FFFFFFFFFFF0", "+ffffffffff0", "fffffffffff00"] {
            assert!(other.parse::<ExecId>().is_err(), "{other}");
        }
    }
}
