//! Signals that request a session's program to end: which ones are allowed, and their names.

/// Allowed signals other than real-time ones, with their numbers: those that programs usually handle as a request to
/// end or to save. The numbers are the same on every
/// architecture that conman runs on.
const SIGNALS: [(&str, u8); 10] = [
    ("SIGHUP", 1),
    ("SIGINT", 2),
    ("SIGQUIT", 3),
    ("SIGUSR1", 10),
    ("SIGUSR2", 12),
    ("SIGALRM", 14),
    ("SIGTERM", 15),
    ("SIGCONT", 18),
    ("SIGWINCH", 28),
    ("SIGPWR", 30),
];

/// The first real-time signal for programs, as glibc and Docker count them, and the last one.
const REAL_TIME: (u8, u8) = (34, 64);

/// The full name of a signal given as `SIGTERM`, `TERM` or `15`, `SIGRTMIN+3` or `37`, in either case.
#[must_use]
pub fn canonical(text: &str) -> Option<String> {
    let number = text.parse::<u8>().ok();
    let named = SIGNALS.iter().find(|(name, known)| match number {
        Some(number) => *known == number,
        None => name.eq_ignore_ascii_case(text) || name[3..].eq_ignore_ascii_case(text),
    });
    if let Some((name, _)) = named {
        return Some((*name).to_owned());
    }
    let (first, last) = REAL_TIME;
    let number = number.or_else(|| real_time(&text.to_ascii_uppercase()))?;
    match number.checked_sub(first)? {
        0 => Some("SIGRTMIN".to_owned()),
        offset if number <= last => Some(format!("SIGRTMIN+{offset}")),
        _ => None,
    }
}

/// The number of `RTMIN`, `RTMIN+N`, `RTMAX` or `RTMAX-N`, with or without `SIG`.
fn real_time(upper: &str) -> Option<u8> {
    let short = upper.strip_prefix("SIG").unwrap_or(upper);
    let offset = |text: &str, sign: char| match text.strip_prefix(sign) {
        Some(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => {
            digits.parse::<u8>().ok()
        }
        None if text.is_empty() => Some(0),
        Some(_) | None => None,
    };
    let (first, last) = REAL_TIME;
    if let Some(rest) = short.strip_prefix("RTMIN") {
        return first.checked_add(offset(rest, '+')?);
    }
    let rest = short.strip_prefix("RTMAX")?;
    last.checked_sub(offset(rest, '-')?)
}

/// The names that [`canonical`] accepts, for messages.
#[must_use]
pub fn allowed() -> String {
    format!(
        "{}, SIGRTMIN+0 to SIGRTMIN+30",
        SIGNALS.map(|(name, _)| name).join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_leads_to_the_full_name() {
        for (name, number) in SIGNALS {
            for text in [name, &name[3..], &name.to_lowercase(), &number.to_string()] {
                assert_eq!(canonical(text).as_deref(), Some(name), "{text}");
            }
        }
        for (text, name) in [
            ("SIGRTMIN+3", "SIGRTMIN+3"),
            ("rtmin+3", "SIGRTMIN+3"),
            ("37", "SIGRTMIN+3"),
            ("SIGRTMIN", "SIGRTMIN"),
            ("SIGRTMAX", "SIGRTMIN+30"),
            ("RTMAX-1", "SIGRTMIN+29"),
        ] {
            assert_eq!(canonical(text).as_deref(), Some(name), "{text}");
        }
        for text in [
            "", "SIG", "SIGKILL", "9", "SIGSTOP", "TERM ", "256", "33", "65", "RTMIN+31",
            "RTMIN++1", "RTMAX-31", "RTMIN-1", "RTMIN+", "RTMIN3", "RTMAX1",
        ] {
            assert_eq!(canonical(text), None, "{text}");
        }
    }
}
