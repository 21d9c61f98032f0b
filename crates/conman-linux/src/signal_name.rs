//! Names of signals.

use nix::sys::signal::Signal as NixSignal;
use rustix::process::Signal;

/// `SIGTERM`, `TERM` or `15`, in either case; no real-time signal.
#[must_use]
pub fn parse_signal(name: &str) -> Option<Signal> {
    let named = if let Ok(number) = name.parse::<u8>() {
        NixSignal::try_from(i32::from(number)).ok()?
    } else {
        let upper = name.to_ascii_uppercase();
        let short = upper.strip_prefix("SIG").unwrap_or(&upper);
        format!("SIG{short}").parse().ok()?
    };
    Signal::from_named_raw(named as i32)
}

/// The name that [`parse_signal`] reads back, for example `SIGTERM`; `None` for a real-time
/// signal.
#[must_use]
pub fn signal_name(signal: Signal) -> Option<&'static str> {
    NixSignal::try_from(signal.as_raw())
        .ok()
        .map(NixSignal::as_str)
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
        let names: Vec<&str> = NixSignal::iterator().map(NixSignal::as_str).collect();
        assert_eq!(names.len(), 31);
        for name in names {
            let signal = parse_signal(name).unwrap_or_else(|| panic!("{name}"));
            assert_eq!(signal_name(signal), Some(name));
            assert_eq!(
                parse_signal(&signal.as_raw().to_string()),
                Some(signal),
                "{name}"
            );
        }
    }
}
