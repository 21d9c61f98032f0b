//! Limits of what a session sends and receives.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, Schema, Type};
use utoipa::{PartialSchema, ToSchema};

/// Units of a rate, the largest first, in bits a second.
const UNITS: [(&str, u64); 3] = [
    ("gbit", 1_000_000_000),
    ("mbit", 1_000_000),
    ("kbit", 1_000),
];

/// Fastest rate in bits a second: no interface is faster.
const MAX_BITS: u64 = 1_000_000_000_000;

/// Slowest rate in bits a second. A full-size packet takes 94 ms with it.
const MIN_BITS: u64 = 128_000;

/// Limits of what a session sends and receives: of conman's proxies together, and of each of its links.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Bandwidth {
    /// To the session; no limit when absent.
    #[serde(rename = "in", skip_serializing_if = "Option::is_none")]
    pub inward: Option<Rate>,
    /// From the session; no limit when absent.
    #[serde(rename = "out", skip_serializing_if = "Option::is_none")]
    pub outward: Option<Rate>,
}

impl Bandwidth {
    /// Whether it limits nothing.
    #[must_use]
    pub fn is_unlimited(&self) -> bool {
        *self == Self::default()
    }
}

/// Bits a second, in text as `512kbit`, `100mbit` or `10gbit`, with powers of 1,000.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Rate(u64);

impl Rate {
    /// The values, for messages.
    pub const ALLOWED: &str = "a rate from 128kbit to 1000gbit, such as \"100mbit\"";

    /// The same in bytes.
    #[must_use]
    pub fn bytes_per_s(self) -> u64 {
        self.0 / 8
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = UNITS.iter().find(|(_, bits)| self.0.is_multiple_of(*bits));
        let (unit, bits) = whole.copied().unwrap_or(UNITS[UNITS.len() - 1]);
        write!(formatter, "{}{unit}", self.0 / bits)
    }
}

impl FromStr for Rate {
    type Err = RateError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parsed = UNITS.iter().find_map(|(unit, bits)| {
            let number = text.strip_suffix(unit)?;
            let plain = number.bytes().all(|byte| byte.is_ascii_digit());
            let number: u64 = number.parse().ok().filter(|_| plain)?;
            number.checked_mul(*bits)
        });
        let within = parsed.filter(|bits| (MIN_BITS..=MAX_BITS).contains(bits));
        within.map(Self).ok_or_else(|| {
            let shown = text.chars().take(64).flat_map(char::escape_default);
            RateError {
                given: shown.collect(),
            }
        })
    }
}

impl TryFrom<String> for Rate {
    type Error = RateError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Rate> for String {
    fn from(rate: Rate) -> Self {
        rate.to_string()
    }
}

impl PartialSchema for Rate {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new()
            .schema_type(Type::String)
            .description(Some(
                "Bits a second, from 128kbit to 1000gbit, with powers of 1,000.",
            ))
            .pattern(Some("^[0-9]+(k|m|g)bit$"))
            .examples(["100mbit"])
            .into()
    }
}

impl ToSchema for Rate {}

/// A text is no rate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{given}` is not {}", Rate::ALLOWED)]
pub struct RateError {
    /// The refused text, cut to a length that is safe to print.
    given: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_written_with_its_largest_whole_unit() {
        for (text, shown, bytes_per_s) in [
            ("128kbit", "128kbit", 16_000),
            ("1500kbit", "1500kbit", 187_500),
            ("1000kbit", "1mbit", 125_000),
            ("100mbit", "100mbit", 12_500_000),
            ("1000gbit", "1000gbit", 125_000_000_000),
        ] {
            let rate: Rate = text.parse().expect("a rate");
            assert_eq!(rate.to_string(), shown);
            assert_eq!(rate.bytes_per_s(), bytes_per_s);
        }
        for text in [
            "",
            "100",
            "mbit",
            "-1mbit",
            "+1mbit",
            "1 mbit",
            "1.5mbit",
            "127kbit",
            "1001gbit",
            "99999999999999999999gbit",
            "100Mbit",
            "100mbps",
        ] {
            text.parse::<Rate>().expect_err(text);
        }
    }

    #[test]
    fn the_directions_are_in_and_out() {
        let read: Bandwidth = serde_json::from_str(r#"{"in":"100mbit"}"#).expect("valid");
        assert_eq!(read.inward, "100mbit".parse().ok());
        assert_eq!(read.outward, None);
        let written = serde_json::to_string(&read).expect("it serializes");
        assert_eq!(written, r#"{"in":"100mbit"}"#);
        serde_json::from_str::<Bandwidth>(r#"{"up":"1mbit"}"#).expect_err("unknown");
    }
}
