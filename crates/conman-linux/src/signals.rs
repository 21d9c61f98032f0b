//! Names of signals, and signals to processes that are known by a number.

use std::io;

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;

/// `SIGTERM`, `TERM` or `15`, in either case; no real-time signal.
#[must_use]
pub fn parse_signal(name: &str) -> Option<Signal> {
    if let Ok(number) = name.parse::<u8>() {
        return Signal::try_from(i32::from(number)).ok();
    }
    let upper = name.to_ascii_uppercase();
    let short = upper.strip_prefix("SIG").unwrap_or(&upper);
    format!("SIG{short}").parse().ok()
}

/// Sends a signal to one process whose PID cannot have been reused, such as a child that is not reaped. Any other
/// is held by a [`crate::PidFd`].
///
/// # Errors
/// There is no such process, or the number names none: 0 and -1 would signal many.
pub fn signal_process(pid: i32, signal: Signal) -> io::Result<()> {
    Ok(kill(one(pid)?, signal)?)
}

/// Sends a signal to the process group that such a process leads.
///
/// # Errors
/// As [`signal_process`].
pub fn signal_group(leader: i32, signal: Signal) -> io::Result<()> {
    Ok(killpg(one(leader)?, signal)?)
}

/// nix accepts every number, and kill(2) gives a meaning to each.
fn one(pid: i32) -> Result<Pid, Errno> {
    match pid {
        1.. => Ok(Pid::from_raw(pid)),
        _ => Err(Errno::ESRCH),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_is_known_by_its_name_its_short_name_and_its_number() {
        for text in ["SIGTERM", "TERM", "15", "sigterm", "term"] {
            assert_eq!(parse_signal(text), Some(Signal::SIGTERM), "{text}");
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
        assert_eq!(Signal::iterator().count(), 31);
        for signal in Signal::iterator() {
            let number = (signal as i32).to_string();
            for text in [signal.as_str(), &number] {
                assert_eq!(parse_signal(text), Some(signal), "{text}");
            }
        }
    }

    #[test]
    fn no_number_signals_more_than_one_process() {
        for pid in [0, -1, i32::MIN] {
            let error = signal_process(pid, Signal::SIGCONT).expect_err("it names many");
            assert_eq!(error.raw_os_error(), Some(Errno::ESRCH as i32));
            assert!(signal_group(pid, Signal::SIGCONT).is_err());
        }
        let own = nix::unistd::getpid().as_raw();
        signal_process(own, Signal::SIGCONT).expect("sent");
    }
}
