use rustix::process::Signal;

/// The signals of signal(7) that have the same number on every Linux, by name.
const NAMES: [(&str, Signal); 31] = [
    ("SIGHUP", Signal::HUP),
    ("SIGINT", Signal::INT),
    ("SIGQUIT", Signal::QUIT),
    ("SIGILL", Signal::ILL),
    ("SIGTRAP", Signal::TRAP),
    ("SIGABRT", Signal::ABORT),
    ("SIGBUS", Signal::BUS),
    ("SIGFPE", Signal::FPE),
    ("SIGKILL", Signal::KILL),
    ("SIGUSR1", Signal::USR1),
    ("SIGSEGV", Signal::SEGV),
    ("SIGUSR2", Signal::USR2),
    ("SIGPIPE", Signal::PIPE),
    ("SIGALRM", Signal::ALARM),
    ("SIGTERM", Signal::TERM),
    ("SIGSTKFLT", Signal::STKFLT),
    ("SIGCHLD", Signal::CHILD),
    ("SIGCONT", Signal::CONT),
    ("SIGSTOP", Signal::STOP),
    ("SIGTSTP", Signal::TSTP),
    ("SIGTTIN", Signal::TTIN),
    ("SIGTTOU", Signal::TTOU),
    ("SIGURG", Signal::URG),
    ("SIGXCPU", Signal::XCPU),
    ("SIGXFSZ", Signal::XFSZ),
    ("SIGVTALRM", Signal::VTALARM),
    ("SIGPROF", Signal::PROF),
    ("SIGWINCH", Signal::WINCH),
    ("SIGIO", Signal::IO),
    ("SIGPWR", Signal::POWER),
    ("SIGSYS", Signal::SYS),
];

/// `SIGTERM`, `TERM` or `15`, in either case.
#[must_use]
pub fn parse_signal(name: &str) -> Option<Signal> {
    if let Ok(number) = name.parse::<u8>() {
        return NAMES
            .iter()
            .map(|(_, signal)| *signal)
            .find(|s| s.as_raw() == i32::from(number));
    }
    let upper = name.to_ascii_uppercase();
    let short = upper.strip_prefix("SIG").unwrap_or(&upper);
    NAMES
        .iter()
        .find(|(full, _)| &full[3..] == short)
        .map(|(_, signal)| *signal)
}

/// The name that [`parse_signal`] reads back, for example `SIGTERM`; `None` for a real-time
/// signal.
#[must_use]
pub fn signal_name(signal: Signal) -> Option<&'static str> {
    NAMES
        .iter()
        .find(|(_, known)| *known == signal)
        .map(|(name, _)| *name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_is_known_by_its_name_its_short_name_and_its_number() {
        for text in ["SIGTERM", "TERM", "15", "sigterm", "term"] {
            assert_eq!(parse_signal(text), Some(Signal::TERM), "{text}");
        }
        for text in [
            "",
            "SIG",
            "0",
            "32",
            "-15",
            "999",
            "SIGSIGTERM",
            "TERM ",
            "SIGNOPE",
        ] {
            assert_eq!(parse_signal(text), None, "{text}");
        }
    }

    #[test]
    fn every_name_reads_back() {
        for (name, signal) in NAMES {
            assert_eq!(parse_signal(name), Some(signal), "{name}");
            assert_eq!(signal_name(signal), Some(name));
            assert_eq!(
                parse_signal(&signal.as_raw().to_string()),
                Some(signal),
                "{name}"
            );
        }
    }
}
