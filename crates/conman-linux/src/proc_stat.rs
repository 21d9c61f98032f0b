//! Reads `/proc/PID/stat`.

use std::io;

/// The used fields of `/proc/PID/stat` (proc_pid_stat(5)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ProcStat {
    /// Field 3: `R`, `S`, `D`, `Z`, …
    pub(crate) state: char,
    /// Field 4.
    pub(crate) parent: i32,
    /// Field 6.
    pub(crate) session: i32,
    /// Field 9: the kernel's `PF_` flags.
    pub(crate) flags: u32,
    /// Field 22, in clock ticks since boot.
    pub(crate) start_time_ticks: u64,
    /// Field 52, the status as in wait(2); 0 if the caller may not trace the process.
    pub(crate) exit_status: i32,
}

/// In [`ProcStat::flags`]: it has begun to exit, and never returns to user mode.
const PF_EXITING: u32 = 0x4;

impl ProcStat {
    /// Whether this thread has begun to exit. The other threads of a process may run when its leader has.
    pub(crate) fn is_exiting(&self) -> bool {
        self.flags & PF_EXITING != 0
    }

    /// Like [`Self::read`], for one thread.
    pub(crate) fn read_thread(pid: i32, thread: i32) -> io::Result<Self> {
        Self::read_from(format!("/proc/{pid}/task/{thread}/stat"))
    }

    /// Reads it for one process. Returns `NotFound` for a dead process, or ESRCH if it died between the open
    /// and the read.
    pub(crate) fn read(pid: i32) -> io::Result<Self> {
        Self::read_from(format!("/proc/{pid}/stat"))
    }

    fn read_from(path: String) -> io::Result<Self> {
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
        let state = fields.next()?;
        let parent = fields.next()?.parse().ok()?;
        let session = fields.nth(1)?.parse().ok()?;
        let flags = fields.nth(2)?.parse().ok()?;
        let start_time_ticks = fields.nth(12)?.parse().ok()?;
        // Absent before Linux 3.5.
        let exit_status = fields.nth(29).and_then(|field| field.parse().ok());
        let mut letters = state.chars();
        match (letters.next(), letters.next()) {
            (Some(state), None) => Some(Self {
                state,
                parent,
                session,
                flags,
                start_time_ticks,
                exit_status: exit_status.unwrap_or(0),
            }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TAIL: &str = " S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20 21 22\n";

    #[test]
    fn a_process_can_read_itself() {
        let pid = i32::try_from(std::process::id()).expect("a pid");
        let stat = ProcStat::read(pid).expect("own stat");
        assert!(stat.start_time_ticks > 0);
        assert!("RSD".contains(stat.state), "{stat:?}");
    }

    #[test]
    fn a_cut_or_empty_line_is_refused() {
        for text in ["", "1 (a", "1 (a)", "1 (a) S 1 2", "1 (a) SS 1 2 3"] {
            assert_eq!(ProcStat::parse(text.as_bytes()), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_command_name_shifts_the_fields(name in proptest::collection::vec(any::<u8>(), 0..16)) {
            let line = [b"17 (".as_slice(), &name, b")", TAIL.as_bytes()].concat();
            prop_assert_eq!(
                ProcStat::parse(&line),
                Some(ProcStat {
                    state: 'S',
                    parent: 1,
                    session: 3,
                    flags: 6,
                    start_time_ticks: 4711,
                    exit_status: 0,
                })
            );
        }

        #[test]
        fn no_input_panics(line in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = ProcStat::parse(&line);
        }
    }
}
