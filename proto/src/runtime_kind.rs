//! What makes containers, by name.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use crate::network::text_schema;

/// Longest name of a configured runtime in bytes.
const MAX_NAME_BYTES: usize = 16;

/// What makes containers: `native`, `gvisor`, `docker`, `process`, or the name of an OCI runtime that the node's
/// configuration has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum RuntimeKind {
    /// conman's own containers, with no other daemon.
    Native,
    /// conman's own containers, each with gVisor as its kernel.
    Gvisor,
    /// Docker Engine, or Podman's Docker-compatible API.
    Docker,
    /// Plain namespaced processes without an image, for conman's own tests.
    Process,
    /// conman's own containers, each with an OCI runtime of this name that makes the session's in it.
    Oci(RuntimeName),
}

/// The name of an OCI runtime that a configuration has.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RuntimeName {
    /// Zeros follow the name.
    bytes: [u8; MAX_NAME_BYTES],
}

/// Why a string is no name of a runtime.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a runtime's name must be 1 to 16 characters of a-z, 0-9 and '-'")]
pub struct RuntimeNameError;

impl RuntimeName {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        let end = self.bytes.iter().position(|byte| *byte == 0);
        let name = self.bytes.get(..end.unwrap_or(MAX_NAME_BYTES));
        // All of them are ASCII.
        str::from_utf8(name.unwrap_or_default()).unwrap_or_default()
    }
}

impl FromStr for RuntimeKind {
    type Err = RuntimeNameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_plain =
            |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || *byte == b'-';
        match text {
            "native" => Ok(Self::Native),
            "gvisor" => Ok(Self::Gvisor),
            "docker" => Ok(Self::Docker),
            "process" => Ok(Self::Process),
            name if !name.is_empty() && name.as_bytes().iter().all(is_plain) => {
                let mut bytes = [0; MAX_NAME_BYTES];
                let place = bytes.get_mut(..name.len()).ok_or(RuntimeNameError)?;
                place.copy_from_slice(name.as_bytes());
                Ok(Self::Oci(RuntimeName { bytes }))
            }
            _ => Err(RuntimeNameError),
        }
    }
}

impl TryFrom<String> for RuntimeKind {
    type Error = RuntimeNameError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<RuntimeKind> for String {
    fn from(kind: RuntimeKind) -> Self {
        kind.to_string()
    }
}

impl fmt::Display for RuntimeKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Native => "native",
            Self::Gvisor => "gvisor",
            Self::Docker => "docker",
            Self::Process => "process",
            Self::Oci(name) => name.as_str(),
        })
    }
}

impl PartialSchema for RuntimeKind {
    fn schema() -> RefOr<Schema> {
        text_schema(
            "What makes containers: `native`, `gvisor`, `docker`, `process`, or the name of an OCI runtime of the \
             node's configuration.",
            "^[a-z0-9-]{1,16}$",
            "native",
        )
    }
}

impl ToSchema for RuntimeKind {}

impl fmt::Debug for RuntimeName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runtime_is_written_as_its_name() {
        for name in [
            "native",
            "gvisor",
            "docker",
            "process",
            "crun",
            "a-runtime-of-16c",
        ] {
            let json = format!("\"{name}\"");
            let kind: RuntimeKind = serde_json::from_str(&json).expect(name);
            assert_eq!(serde_json::to_string(&kind).expect("written"), json);
            assert_eq!(
                matches!(kind, RuntimeKind::Oci(_)),
                name == "crun" || name.len() == MAX_NAME_BYTES
            );
        }
        for name in [
            "",
            "Crun",
            "a/b",
            "cr\u{fc}n",
            "a-runtime-of-17-c",
            "crun\0",
        ] {
            name.parse::<RuntimeKind>().expect_err(name);
        }
    }
}
