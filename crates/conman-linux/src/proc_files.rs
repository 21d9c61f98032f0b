//! Files of `/proc` in the formats that `procfs` knows.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

pub(crate) use procfs::process::Stat;
pub use procfs::process::{LimitValue, Limits, Status};
pub use procfs::{
    CGroupControllers, FromRead, LoadAverage, Meminfo, PressureRecord, ProcessCGroups,
    parse_pressure_record,
};

/// Longest file that is read: a mount table of a host with a hundred thousand mounts.
const MAX_BYTES: u64 = 32 << 20;

/// Reads and parses a file. The errors of a process that has ended are those of the kernel.
pub fn read_proc<T: FromRead>(path: impl AsRef<Path>) -> io::Result<T> {
    let path = path.as_ref();
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_BYTES).read_to_end(&mut bytes)?;
    parse_proc(&bytes).map_err(|error| {
        let malformed = format!("{} is malformed: {error}", path.display());
        io::Error::new(io::ErrorKind::InvalidData, malformed)
    })
}

/// Parses the text of a file. The name of a process, which it chooses, may be any bytes: `procfs` refuses what is
/// not UTF-8, so that is replaced before.
fn parse_proc<T: FromRead>(bytes: &[u8]) -> io::Result<T> {
    let text = String::from_utf8_lossy(bytes);
    T::from_read(text.as_bytes()).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The kernel writes the other fields.
        #[test]
        fn no_name_shifts_the_fields_of_a_process(name in proptest::collection::vec(any::<u8>(), 0..16)) {
            let tail = ") S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20 21 22 23 24 25 26 27 28 29 30 31 \
                        32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49\n";
            let line = [b"17 (".as_slice(), &name, tail.as_bytes()].concat();
            let stat: Stat = parse_proc(&line).expect("well-formed");
            prop_assert_eq!((stat.pid, stat.state, stat.ppid, stat.session), (17, 'S', 1, 3));
            prop_assert_eq!((stat.flags, stat.starttime, stat.exit_code), (6, 4711, Some(49)));
        }
    }

    #[test]
    fn a_process_with_a_name_that_is_not_text_can_be_read() {
        let own = std::fs::read("/proc/self/status").expect("readable");
        let rest = own.iter().position(|byte| *byte == b'\n').expect("lines");
        let named = [b"Name:\t\xff:\xfe".as_slice(), &own[rest..]].concat();
        let status: Status = parse_proc(&named).expect("well-formed");
        assert_eq!(status.pid.cast_unsigned(), std::process::id());
        assert_eq!(status.name, "\u{fffd}");
    }

    #[test]
    fn a_process_that_has_ended_is_told_from_a_file_that_is_malformed() {
        let gone =
            read_proc::<Stat>(format!("/proc/{}/stat", i32::MAX)).expect_err("nobody has it");
        assert_eq!(gone.kind(), io::ErrorKind::NotFound);
        let malformed = read_proc::<LoadAverage>("/proc/self/comm").expect_err("a name");
        assert_eq!(malformed.kind(), io::ErrorKind::InvalidData);
    }
}
