//! Names of signals, and signals to processes that are known by a number.

use std::fmt;
use std::io;

use nix::sys::signal::Signal;
use rustix::io::Errno;
use rustix::process::{Pid, kill_process, kill_process_group};

/// The first real-time signal for programs, as glibc and Docker count them: the kernel's first two are libc's own.
const SIGRTMIN: i32 = 34;
const SIGRTMAX: i32 = 64;

/// A signal that programs of sessions are sent. nix knows no real-time signals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SignalNumber(i32);

impl SignalNumber {
    /// Real-time signals included, but for those of libc.
    #[must_use]
    pub fn new(number: i32) -> Option<Self> {
        let is_real_time = (SIGRTMIN..=SIGRTMAX).contains(&number);
        (is_real_time || Signal::try_from(number).is_ok()).then_some(Self(number))
    }

    #[must_use]
    pub fn get(self) -> i32 {
        self.0
    }

    /// For the calls that nix lacks.
    pub(crate) fn to_rustix(self) -> rustix::process::Signal {
        rustix::process::Signal::from_named_raw(self.0).unwrap_or_else(|| {
            #[expect(
                unsafe_code,
                reason = "rustix has no safe constructor for real-time signals"
            )]
            // SAFETY: the number is a valid signal and not zero. libc reserves it for the program that it is part of,
            // which neither handles nor blocks it here: it is only sent, to programs of sessions.
            unsafe {
                rustix::process::Signal::from_raw_unchecked(self.0)
            }
        })
    }
}

impl From<Signal> for SignalNumber {
    fn from(signal: Signal) -> Self {
        Self(signal as i32)
    }
}

/// The name that [`parse_signal`] reads back, for example `SIGTERM` or `SIGRTMIN+3`.
impl fmt::Display for SignalNumber {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (Signal::try_from(self.0), self.0 - SIGRTMIN) {
            (Ok(named), _) => formatter.write_str(named.as_str()),
            (Err(_), 0) => formatter.write_str("SIGRTMIN"),
            (Err(_), above) => write!(formatter, "SIGRTMIN+{above}"),
        }
    }
}

/// `SIGTERM`, `TERM` or `15`, `SIGRTMIN+3`, `RTMAX-1` or `37`, in either case.
#[must_use]
pub fn parse_signal(name: &str) -> Option<SignalNumber> {
    if let Ok(number) = name.parse::<u8>() {
        return SignalNumber::new(number.into());
    }
    let upper = name.to_ascii_uppercase();
    let short = upper.strip_prefix("SIG").unwrap_or(&upper);
    if let Some(number) = real_time(short) {
        return SignalNumber::new(number);
    }
    let named: Signal = format!("SIG{short}").parse().ok()?;
    Some(named.into())
}

/// The number of `RTMIN`, `RTMIN+N`, `RTMAX` or `RTMAX-N`.
fn real_time(short: &str) -> Option<i32> {
    let offset = |text: &str, sign: char| match text.strip_prefix(sign) {
        Some(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => digits.parse().ok(),
        None if text.is_empty() => Some(0),
        Some(_) | None => None,
    };
    let number = match (short.strip_prefix("RTMIN"), short.strip_prefix("RTMAX")) {
        (Some(rest), _) => SIGRTMIN.checked_add(offset(rest, '+')?)?,
        (_, Some(rest)) => SIGRTMAX.checked_sub(offset(rest, '-')?)?,
        (None, None) => return None,
    };
    (SIGRTMIN..=SIGRTMAX).contains(&number).then_some(number)
}

/// Sends a signal to one process whose PID cannot have been reused, such as a child that is not reaped. Any other
/// is held by a [`crate::PidFd`].
///
/// # Errors
/// There is no such process, or the number names none: 0 and -1 would signal many.
pub fn signal_process(pid: i32, signal: impl Into<SignalNumber>) -> io::Result<()> {
    Ok(kill_process(one(pid)?, signal.into().to_rustix())?)
}

/// Sends a signal to the process group that such a process leads.
///
/// # Errors
/// As [`signal_process`].
pub fn signal_group(leader: i32, signal: Signal) -> io::Result<()> {
    Ok(kill_process_group(
        one(leader)?,
        SignalNumber::from(signal).to_rustix(),
    )?)
}

/// kill(2) gives a meaning to numbers below 1.
fn one(pid: i32) -> Result<Pid, Errno> {
    let positive = Some(pid).filter(|pid| *pid > 0);
    positive.and_then(Pid::from_raw).ok_or(Errno::SRCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_is_known_by_its_name_its_short_name_and_its_number() {
        for text in ["SIGTERM", "TERM", "15", "sigterm", "term"] {
            assert_eq!(parse_signal(text), Some(Signal::SIGTERM.into()), "{text}");
        }
        for text in [
            "",
            "SIG",
            "0",
            "32",
            "33",
            "65",
            "-15",
            "999",
            "SIGSIGTERM",
            "TERM ",
            "SIGNOPE",
            "RTMIN-1",
            "RTMAX+1",
            "RTMIN+31",
            "RTMIN+",
            "RTMIN+-1",
            "RTMIN+ 1",
        ] {
            assert_eq!(parse_signal(text), None, "{text}");
        }
    }

    #[test]
    fn a_real_time_signal_has_the_number_that_glibc_gives_it() {
        for (text, number, name) in [
            ("SIGRTMIN", 34, "SIGRTMIN"),
            ("rtmin+3", 37, "SIGRTMIN+3"),
            ("37", 37, "SIGRTMIN+3"),
            ("SIGRTMAX", 64, "SIGRTMIN+30"),
            ("RTMAX-1", 63, "SIGRTMIN+29"),
        ] {
            let signal = parse_signal(text).expect(text);
            assert_eq!((signal.get(), signal.to_string().as_str()), (number, name));
            assert_eq!(parse_signal(name), Some(signal));
            assert_eq!(signal.to_rustix().as_raw(), number);
        }
    }

    #[test]
    fn every_name_reads_back() {
        assert_eq!(Signal::iterator().count(), 31);
        for signal in Signal::iterator() {
            let number = (signal as i32).to_string();
            for text in [signal.as_str(), &number] {
                let read = parse_signal(text).expect(text);
                assert_eq!(read, signal.into(), "{text}");
                assert_eq!(read.to_string(), signal.as_str());
            }
        }
    }

    #[test]
    fn no_number_signals_more_than_one_process() {
        for pid in [0, -1, i32::MIN] {
            let error = signal_process(pid, Signal::SIGCONT).expect_err("it names many");
            assert_eq!(error.raw_os_error(), Some(Errno::SRCH.raw_os_error()));
            assert!(signal_group(pid, Signal::SIGCONT).is_err());
        }
        let own = nix::unistd::getpid().as_raw();
        signal_process(own, Signal::SIGCONT).expect("sent");
    }
}
