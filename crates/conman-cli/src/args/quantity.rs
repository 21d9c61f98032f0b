//! Sizes, durations and core counts as users type them.

use std::time::Duration;

use jiff::SpanRelativeTo;
use jiff::fmt::friendly::SpanParser;

use crate::args::CpuCount;

/// Units of a size in bytes: powers of 1024, as in Docker's `--memory`.
const SIZE_UNITS: [(&str, f64); 5] = [
    ("k", 1024.0),
    ("m", 1_048_576.0),
    ("g", 1_073_741_824.0),
    ("t", 1_099_511_627_776.0),
    ("b", 1.0),
];

/// Greatest whole number that a double represents exactly; more than any real input.
const MAX_EXACT: f64 = 9_007_199_254_740_991.0;

/// `500ms`, `10s`, `5m`, `2h`, `1d`, with fractions (`1.5h`) and combined (`1h30m`); a bare `0` is zero.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(format!(
            "`{text}` has no unit: write {text}s for seconds; other examples are 500ms, 10s, 5m or 2h"
        ));
    }
    let span = SpanParser::new().parse_span(text).ok();
    let days = SpanRelativeTo::days_are_24_hours();
    let duration = span.and_then(|span| span.to_duration(days).ok()?.try_into().ok());
    duration.ok_or_else(|| {
        format!(
            "`{}` is not a duration: write a number and a unit, for example 500ms, 10s, 5m or 2h",
            text.escape_default()
        )
    })
}

/// `512`, `256M`, `256MiB`, `1.5g`: bytes, or powers of 1024.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let refused = || {
        format!(
            "`{}` is not a size: write bytes or a number and a unit, for example 268435456, 256M or 1.5G (powers of 1024)",
            text.escape_default()
        )
    };
    let (number, unit) = split_number(text).ok_or_else(refused)?;
    let unit = unit.to_ascii_lowercase();
    let stem = unit
        .strip_suffix("ib")
        .unwrap_or_else(|| match unit.strip_suffix('b') {
            Some(stem) if !stem.is_empty() => stem,
            _ => &unit,
        });
    let factor = match stem {
        "" if unit.is_empty() => 1.0,
        stem => factor_of(stem, &SIZE_UNITS).ok_or_else(refused)?,
    };
    whole(number * factor).ok_or_else(refused)
}

/// `0.5`, `2`: processor cores.
pub(crate) fn parse_cpus(text: &str) -> Result<CpuCount, String> {
    match text.parse::<f64>() {
        Ok(cpus) if cpus.is_finite() && cpus > 0.0 => Ok(CpuCount(cpus)),
        _ => Err(format!(
            "`{}` is not a number of cores: write for example 0.5 or 2",
            text.escape_default()
        )),
    }
}

/// A duration in whole seconds, for fields without a finer unit.
pub(crate) fn parse_duration_s(text: &str) -> Result<u32, String> {
    let duration = parse_duration(text)?;
    if duration.subsec_nanos() != 0 {
        return Err(format!("`{text}` is not a whole number of seconds"));
    }
    u32::try_from(duration.as_secs()).map_err(|_| format!("`{text}` is too long"))
}

/// A duration in milliseconds that fits the API's fields.
pub(crate) fn parse_duration_ms(text: &str) -> Result<u32, String> {
    u32::try_from(parse_duration(text)?.as_millis()).map_err(|_| format!("`{text}` is too long"))
}

/// The leading decimal number and the rest; no sign, no exponent, no spaces.
fn split_number(text: &str) -> Option<(f64, &str)> {
    let end = text
        .find(|c: char| !(c.is_ascii_digit() || c == '.'))
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    if !number.starts_with(|c: char| c.is_ascii_digit()) {
        return None;
    }
    Some((number.parse().ok()?, unit))
}

fn factor_of(unit: &str, units: &[(&str, f64)]) -> Option<f64> {
    units
        .iter()
        .find(|(name, _)| *name == unit)
        .map(|(_, factor)| *factor)
}

fn whole(value: f64) -> Option<u64> {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "checked to be between 0 and 2^53 before the cast"
    )]
    (0.0..=MAX_EXACT)
        .contains(&value)
        .then(|| value.round() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_in_every_documented_unit() {
        for (text, ms) in [
            ("0", 0),
            ("500ms", 500),
            ("10s", 10_000),
            ("5m", 300_000),
            ("2h", 7_200_000),
            ("1d", 86_400_000),
            ("1.5s", 1_500),
            ("1h30m", 5_400_000),
        ] {
            assert_eq!(
                parse_duration(text),
                Ok(Duration::from_millis(ms)),
                "{text}"
            );
        }
    }

    #[test]
    fn what_is_no_duration_is_refused_with_examples() {
        for text in [
            "",
            "5",
            "s",
            "-1s",
            "1e3s",
            "5M",
            "PT5M",
            "1mo",
            "1.2.3s",
            "NaNs",
            "99999999999d",
        ] {
            let error = parse_duration(text).expect_err(text);
            assert!(error.contains("500ms, 10s, 5m or 2h"), "{error}");
        }
    }

    #[test]
    fn sizes_are_powers_of_1024_with_or_without_the_long_suffix() {
        for (text, bytes) in [
            ("512", 512),
            ("512b", 512),
            ("4k", 4_096),
            ("256M", 268_435_456),
            ("256MB", 268_435_456),
            ("256MiB", 268_435_456),
            ("1.5G", 1_610_612_736),
            ("1t", 1_099_511_627_776),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused_with_examples() {
        for text in [
            "",
            "M",
            "-1",
            "1x",
            "1iB",
            "1ib",
            "1 M",
            "1e9",
            "99999999999t",
        ] {
            let error = parse_size(text).expect_err(text);
            assert!(error.contains("256M"), "{error}");
        }
    }

    #[test]
    fn seconds_are_never_rounded_silently() {
        assert_eq!(parse_duration_s("10m"), Ok(600));
        assert!(parse_duration_s("1500ms").is_err());
    }

    #[test]
    fn only_a_positive_finite_number_is_a_core_count() {
        assert_eq!(parse_cpus("0.5"), Ok(CpuCount(0.5)));
        for text in ["0", "-1", "inf", "NaN", "two", ""] {
            assert!(parse_cpus(text).is_err(), "{text}");
        }
    }
}
