//! The signals that may announce a preemption to a session's program.

/// Signals that may announce a preemption to a session's program, with their numbers: those that
/// programs usually handle as a request to end or to save. The numbers are the same on every
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

/// The full name of a signal given as `SIGTERM`, `TERM` or `15`, in either case.
#[must_use]
pub fn canonical(text: &str) -> Option<&'static str> {
    if let Ok(number) = text.parse::<u8>() {
        return SIGNALS
            .iter()
            .find(|(_, known)| *known == number)
            .map(|(name, _)| *name);
    }
    SIGNALS
        .iter()
        .map(|(name, _)| *name)
        .find(|name| name.eq_ignore_ascii_case(text) || name[3..].eq_ignore_ascii_case(text))
}

/// The names that [`canonical`] accepts, for messages.
#[must_use]
pub fn allowed() -> String {
    SIGNALS.map(|(name, _)| name).join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_leads_to_the_full_name() {
        for (name, number) in SIGNALS {
            for text in [name, &name[3..], &name.to_lowercase(), &number.to_string()] {
                assert_eq!(canonical(text), Some(name), "{text}");
            }
        }
        for text in ["", "SIG", "SIGKILL", "9", "SIGSTOP", "TERM ", "256"] {
            assert_eq!(canonical(text), None, "{text}");
        }
    }
}
