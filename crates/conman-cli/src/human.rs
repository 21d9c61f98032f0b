//! Numbers and untrusted text for users.

use std::borrow::Cow;
use std::time::Duration;

use jiff::Timestamp;

/// `812 ms`, `1.24 s`, `2 min 5 s`, `3 h 20 min`: three digits are enough to compare.
pub(crate) fn milliseconds(ms: f64) -> String {
    if !ms.is_finite() || ms < 0.0 {
        return "?".to_owned();
    }
    if ms < 9.95 {
        format!("{ms:.1} ms")
    } else if ms < 999.5 {
        format!("{ms:.0} ms")
    } else if ms < 9_995.0 {
        format!("{:.2} s", ms / 1e3)
    } else if ms < 59_950.0 {
        format!("{:.1} s", ms / 1e3)
    } else {
        duration(Duration::try_from_secs_f64(ms / 1e3).unwrap_or(Duration::MAX))
    }
}

/// A duration in its two greatest units.
pub(crate) fn duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let two = |first: u64, first_unit: &str, second: u64, second_unit: &str| {
        if second == 0 {
            format!("{first} {first_unit}")
        } else {
            format!("{first} {first_unit} {second} {second_unit}")
        }
    };
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3_600 => two(seconds / 60, "min", seconds % 60, "s"),
        3_600..86_400 => two(seconds / 3_600, "h", seconds % 3_600 / 60, "min"),
        _ => two(seconds / 86_400, "d", seconds % 86_400 / 3_600, "h"),
    }
}

/// How long ago `at` was. Clocks of two machines may differ, so the future is `just now` too.
pub(crate) fn ago(now: Timestamp, at: Timestamp) -> String {
    match since(now, at).as_secs() {
        0 => "just now".to_owned(),
        _ => format!("{} ago", duration(since(now, at))),
    }
}

/// The time from `at` to `now`, zero when the clocks disagree.
pub(crate) fn since(now: Timestamp, at: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(at)).unwrap_or_default()
}

/// A time of day to the millisecond with its date: exact, but shorter than RFC 3339.
pub(crate) fn clock(at: Timestamp) -> String {
    at.strftime("%Y-%m-%d %H:%M:%S%.3f UTC").to_string()
}

/// `256 MiB`, `1.5 GiB`, `100 B`.
pub(crate) fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    #[expect(clippy::cast_precision_loss, reason = "shown with two digits")]
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if (value - value.round()).abs() < 0.05 {
        format!("{value:.0} {}", UNITS[unit])
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}

/// `1 session`, `2 sessions`.
pub(crate) fn count(number: u64, noun: &str) -> String {
    if number == 1 {
        format!("1 {noun}")
    } else {
        format!("{number} {noun}s")
    }
}

/// Text from the network, safe on a terminal: output of a session's program or an image's author
/// must not move the cursor, change the title or hide other lines.
pub(crate) fn printable(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_unsafe) {
        return Cow::Borrowed(text);
    }
    text.chars()
        .flat_map(|c| {
            let escaped = is_unsafe(c).then(|| c.escape_default());
            let plain = escaped.is_none().then_some(c);
            escaped.into_iter().flatten().chain(plain)
        })
        .collect::<String>()
        .into()
}

/// One line of a program's output, safe on a terminal. Tabs stay, and the carriage return that a terminal puts
/// before the end of a line is left out.
pub(crate) fn printable_line(text: &str) -> Cow<'_, str> {
    let text = text.strip_suffix('\r').unwrap_or(text);
    if !text.contains('\t') {
        return printable(text);
    }
    let parts: Vec<_> = text.split('\t').map(printable).collect();
    parts.join("\t").into()
}

/// Control characters, and the marks that reverse the order of text.
fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn milliseconds_keep_about_three_digits_at_every_size() {
        for (ms, text) in [
            (0.0, "0.0 ms"),
            (0.42, "0.4 ms"),
            (9.96, "10 ms"),
            (812.4, "812 ms"),
            (999.6, "1.00 s"),
            (1_240.0, "1.24 s"),
            (12_340.0, "12.3 s"),
            (59_960.0, "59 s"),
            (125_000.0, "2 min 5 s"),
            (7_200_000.0, "2 h"),
            (f64::NAN, "?"),
            (-1.0, "?"),
        ] {
            assert_eq!(milliseconds(ms), text, "{ms}");
        }
    }

    #[test]
    fn durations_show_their_two_greatest_units() {
        for (seconds, text) in [
            (0, "0 s"),
            (59, "59 s"),
            (61, "1 min 1 s"),
            (3_600, "1 h"),
            (90_061, "1 d 1 h"),
            (864_000, "10 d"),
        ] {
            assert_eq!(duration(Duration::from_secs(seconds)), text);
        }
    }

    #[test]
    fn a_time_in_the_future_is_just_now() {
        let now: Timestamp = "2026-01-01T00:00:00Z".parse().expect("a time");
        let later: Timestamp = "2026-01-01T00:05:00Z".parse().expect("a time");
        assert_eq!(ago(now, later), "just now");
        assert_eq!(ago(later, now), "5 min ago");
    }

    #[test]
    fn sizes_use_powers_of_1024() {
        for (size, text) in [
            (100, "100 B"),
            (268_435_456, "256 MiB"),
            (1_610_612_736, "1.5 GiB"),
            (u64::MAX, "16 EiB"),
        ] {
            assert_eq!(bytes(size), text);
        }
    }

    #[test]
    fn foreign_text_cannot_drive_the_terminal() {
        assert_eq!(printable("plain – ü"), "plain – ü");
        assert_eq!(
            printable("a\u{1b}]0;x\u{7}b\r\nc"),
            "a\\u{1b}]0;x\\u{7}b\\r\\nc"
        );
        assert_eq!(printable_line("a\tb\u{1b}[2J\r"), "a\tb\\u{1b}[2J");
        assert_eq!(printable_line("5%\r10%\r"), "5%\\r10%");
        assert_eq!(printable("x\u{202e}y\u{9b}"), "x\\u{202e}y\\u{9b}");
    }
}
