//! The ports of a session.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Ports that a session serves besides its main one: `8080`, `"3000-3010"`, or
/// `{"port": 8080, "public": true}`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "PortEntry", into = "PortEntry")]
pub struct PortRange {
    pub first: u16,
    /// Not below `first`.
    pub last: u16,
    /// Whether callers without a token may connect to them.
    pub public: bool,
}

/// Text that is no port and no range of ports.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("ports are a number from 1 to 65535, or two with a dash between them such as `3000-3010`")]
pub struct PortRangeError;

/// A port or a range of ports as it is written.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(
    untagged,
    expecting = "ports are a number, a range such as \"3000-3010\", or {port, public}"
)]
pub enum PortEntry {
    Port(u16),
    Range(String),
    Full(FullPort),
}

/// A port or a range of ports with its access.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FullPort {
    port: PortText,
    /// Whether callers without a token may connect to it.
    #[serde(default)]
    public: bool,
}

/// A port as a number, or a range of ports as text.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum PortText {
    Port(u16),
    Range(String),
}

impl PortRange {
    #[must_use]
    pub fn contains(&self, port: u16) -> bool {
        (self.first..=self.last).contains(&port)
    }

    fn new(first: u16, last: u16) -> Result<Self, PortRangeError> {
        if first == 0 || first > last {
            return Err(PortRangeError);
        }
        Ok(Self {
            first,
            last,
            public: false,
        })
    }
}

impl FromStr for PortRange {
    type Err = PortRangeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let port = |text: &str| text.parse().map_err(|_| PortRangeError);
        Self::new(port(first)?, port(last)?)
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.first)?;
        if self.last > self.first {
            write!(formatter, "-{}", self.last)?;
        }
        Ok(())
    }
}

impl TryFrom<PortEntry> for PortRange {
    type Error = PortRangeError;

    fn try_from(entry: PortEntry) -> Result<Self, Self::Error> {
        let (text, public) = match entry {
            PortEntry::Port(port) => (PortText::Port(port), false),
            PortEntry::Range(range) => (PortText::Range(range), false),
            PortEntry::Full(FullPort { port, public }) => (port, public),
        };
        let ports = match text {
            PortText::Port(port) => Self::new(port, port)?,
            PortText::Range(range) => range.parse()?,
        };
        Ok(Self { public, ..ports })
    }
}

impl From<PortRange> for PortEntry {
    fn from(ports: PortRange) -> Self {
        let PortRange {
            first,
            last,
            public,
        } = ports;
        match (first == last, public) {
            (true, false) => Self::Port(first),
            (false, false) => Self::Range(ports.to_string()),
            (true, true) => Self::Full(FullPort {
                port: PortText::Port(first),
                public,
            }),
            (false, true) => Self::Full(FullPort {
                port: PortText::Range(ports.to_string()),
                public,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_written_as_numbers_ranges_and_tables() {
        let text = r#"[8080,"3000-3010",{"port":5173,"public":true}]"#;
        let ports: Vec<PortRange> = serde_json::from_str(text).expect("three");
        let shown: Vec<_> = ports
            .iter()
            .map(|ports| (ports.to_string(), ports.public))
            .collect();
        let expected = [("8080", false), ("3000-3010", false), ("5173", true)];
        assert_eq!(
            shown,
            expected.map(|(text, public)| (text.to_owned(), public))
        );
        assert_eq!(serde_json::to_string(&ports).expect("written"), text);
        assert!(ports[1].contains(3_000) && ports[1].contains(3_010) && !ports[1].contains(3_011));
    }

    #[test]
    fn what_is_no_port_is_refused() {
        for text in [
            "0",
            "\"0-5\"",
            "\"5-4\"",
            "\"a\"",
            "70000",
            "\"1-\"",
            "{\"port\":1,\"x\":1}",
        ] {
            assert!(serde_json::from_str::<PortRange>(text).is_err(), "{text}");
        }
    }
}
