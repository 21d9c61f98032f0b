//! What a certificate needs of a thread's `/proc/PID/task/TID/stat` (proc_pid_stat(5)): two fields, and nothing
//! depends on the others.

use std::io;

/// The used fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ThreadStat {
    /// Field 9: the kernel's `PF_` flags.
    flags: u32,
    /// Field 22, in clock ticks since boot.
    pub(crate) start_time_ticks: u64,
}

/// In [`ThreadStat::flags`]: it has begun to exit, and never returns to user mode.
const PF_EXITING: u32 = 0x4;

impl ThreadStat {
    /// Whether this thread has begun to exit. The other threads of a process may run when its leader has.
    pub(crate) fn is_exiting(&self) -> bool {
        self.flags & PF_EXITING != 0
    }

    /// Returns `NotFound` for a dead thread, or ESRCH if it died between the open and the read.
    pub(crate) fn read(pid: i32, thread: i32) -> io::Result<Self> {
        let path = format!("/proc/{pid}/task/{thread}/stat");
        let text = std::fs::read(&path)?;
        Self::parse(&text).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, format!("{path} is malformed"))
        })
    }

    /// The command name in field 2 may contain anything, including spaces, parentheses, newlines and bytes that
    /// are not UTF-8; no later field has a parenthesis. So the fields are counted from the last one.
    fn parse(text: &[u8]) -> Option<Self> {
        let close = text.iter().rposition(|&byte| byte == b')')?;
        let rest = std::str::from_utf8(&text[close + 1..]).ok()?;
        let mut fields = rest.split_ascii_whitespace();
        Some(Self {
            flags: fields.nth(6)?.parse().ok()?,
            start_time_ticks: fields.nth(12)?.parse().ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TAIL: &str = " S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20 21 22\n";

    #[test]
    fn a_thread_can_read_itself() {
        let pid = i32::try_from(std::process::id()).expect("a pid");
        let stat = ThreadStat::read(pid, pid).expect("own stat");
        assert!(stat.start_time_ticks > 0 && !stat.is_exiting());
    }

    #[test]
    fn a_cut_or_empty_line_is_refused() {
        for text in ["", "1 (a", "1 (a)", "1 (a) S 1 2", "1 (a) S 1 2 3 4 5 x"] {
            assert_eq!(ThreadStat::parse(text.as_bytes()), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_command_name_shifts_the_fields(name in proptest::collection::vec(any::<u8>(), 0..16)) {
            let line = [b"17 (".as_slice(), &name, b")", TAIL.as_bytes()].concat();
            let expected = ThreadStat { flags: 6, start_time_ticks: 4711 };
            prop_assert_eq!(ThreadStat::parse(&line), Some(expected));
        }

        #[test]
        fn no_input_panics(line in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = ThreadStat::parse(&line);
        }
    }
}
