//! A number that never falls, in a separate file: "everything up to this may have been used".
//!
//! Layout: magic (8 bytes), version (4 bytes), zeros (4 bytes), the number (8 bytes), zeros, and in
//! the last four of 512 bytes the CRC-32 of all before; integers are little-endian. The file is
//! replaced, never written in place, so a crash leaves a whole one.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use conman_linux::{FORMAT, replace_file};

use crate::files::open_options;

const BYTES: usize = 512;
const MAGIC: &[u8; 8] = b"conmanHW";

/// Content of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    Missing,
    Through(u64),
    Damaged,
    /// Written by another conman. The number is at the same place in every format so far.
    OtherFormat {
        format: u32,
        through: u64,
    },
}

/// The file, for raising.
#[derive(Debug)]
pub(crate) struct HighWater {
    path: PathBuf,
    through: u64,
}

impl HighWater {
    /// Reads the file without changing it.
    pub(crate) fn inspect(path: &Path) -> io::Result<Found> {
        let file = match open_options().open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::Missing),
            Err(error) => return Err(error),
        };
        match read(file) {
            Ok(content) => Ok(decode(&content)),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(Found::Damaged),
            // The disk can no longer read the sector.
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error()) => {
                Ok(Found::Damaged)
            }
            Err(error) => Err(error),
        }
    }

    /// Opens the file with the number `through`; creates or repairs it if needed. `found` must be
    /// the latest result of [`Self::inspect`], and `through` not below it.
    pub(crate) fn open(path: &Path, found: Found, through: u64) -> io::Result<Self> {
        if found != Found::Through(through) {
            replace_file(path, &encode(through))?;
        }
        Ok(Self {
            path: path.to_owned(),
            through,
        })
    }

    /// The number in the file.
    pub(crate) fn through(&self) -> u64 {
        self.through
    }

    /// Raises the number durably. After an error the number counts as not raised, although the file
    /// may already hold it; raising again is safe.
    pub(crate) fn raise(&mut self, through: u64) -> io::Result<()> {
        if through > self.through {
            replace_file(&self.path, &encode(through))?;
            self.through = through;
        }
        Ok(())
    }
}

fn encode(through: u64) -> [u8; BYTES] {
    let mut content = [0; BYTES];
    content[..8].copy_from_slice(MAGIC);
    content[8..12].copy_from_slice(&FORMAT.to_le_bytes());
    content[16..24].copy_from_slice(&through.to_le_bytes());
    let (covered, checksum) = content.split_at_mut(BYTES - 4);
    checksum.copy_from_slice(&crc32fast::hash(covered).to_le_bytes());
    content
}

fn read(mut file: File) -> io::Result<[u8; BYTES]> {
    let mut content = [0; BYTES];
    file.read_exact(&mut content)?;
    Ok(content)
}

fn decode(content: &[u8; BYTES]) -> Found {
    let (covered, checksum) = content.split_at(BYTES - 4);
    if !covered.starts_with(MAGIC) || crc32fast::hash(covered).to_le_bytes() != *checksum {
        return Found::Damaged;
    }
    let format = u32::from_le_bytes([content[8], content[9], content[10], content[11]]);
    let mut number = [0; 8];
    number.copy_from_slice(&content[16..24]);
    let through = u64::from_le_bytes(number);
    match format {
        FORMAT => Found::Through(through),
        _ => Found::OtherFormat { format, through },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_raised_and_never_lowered() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("mark");
        let inspect = || HighWater::inspect(&path).expect("read");
        assert_eq!(inspect(), Found::Missing);
        let mut mark = HighWater::open(&path, Found::Missing, 10).expect("made");
        assert_eq!(inspect(), Found::Through(10));
        mark.raise(1000).expect("raised");
        mark.raise(7).expect("nothing to raise");
        assert_eq!((mark.through(), inspect()), (1000, Found::Through(1000)));

        std::fs::write(&path, &encode(2000)[..BYTES - 1]).expect("cut");
        assert_eq!(inspect(), Found::Damaged);
        let mut flipped = encode(2000);
        flipped[16] ^= 1;
        std::fs::write(&path, flipped).expect("damaged");
        assert_eq!(inspect(), Found::Damaged);
        HighWater::open(&path, Found::Damaged, 2000).expect("repaired");
        assert_eq!(inspect(), Found::Through(2000));
    }

    #[test]
    fn a_file_of_another_format_still_tells_its_number() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("mark");
        for format in [FORMAT - 1, FORMAT + 1] {
            let mut other = encode(20);
            other[8..12].copy_from_slice(&format.to_le_bytes());
            let (covered, checksum) = other.split_at_mut(BYTES - 4);
            checksum.copy_from_slice(&crc32fast::hash(covered).to_le_bytes());
            std::fs::write(&path, other).expect("written");
            let through = 20;
            assert_eq!(
                HighWater::inspect(&path).expect("read"),
                Found::OtherFormat { format, through }
            );
        }
    }
}
