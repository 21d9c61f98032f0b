//! A number that never falls, in a separate file: "everything up to this may have been used".
//!
//! Layout: two slots of 512 bytes in different 4 KiB pages. A slot is magic (8 bytes), version
//! (4 bytes), zeros (4 bytes), the number (8 bytes), zeros, and in its last four bytes the CRC-32
//! of all before; integers are little-endian.
//!
//! [`HighWater::raise`] writes and syncs one slot and then the other, and returns only when both
//! hold the number. If one slot is destroyed, for example by a torn write, the other still covers
//! every number used after an earlier `raise`.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use conman_linux::{FORMAT, replace_file};

use crate::files::open_options;

const SLOT_BYTES: usize = 512;
const SLOT_OFFSETS: [u64; 2] = [0, 4096];
const FILE_BYTES: usize = 8192;
const MAGIC: &[u8; 8] = b"conmanHW";

/// Content of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    Missing,
    /// At least one slot is intact; `complete` when both are and agree.
    Through {
        through: u64,
        complete: bool,
    },
    /// No slot is intact.
    Damaged,
    /// Written by another conman. The number is at the same place in every format so far.
    OtherFormat {
        format: u32,
        through: u64,
    },
}

/// The file, open for raising.
#[derive(Debug)]
pub(crate) struct HighWater {
    file: File,
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
        let mut numbers = [None; 2];
        let mut other = None;
        for (number, offset) in numbers.iter_mut().zip(SLOT_OFFSETS) {
            match read_slot(&file, offset)? {
                Slot::Intact(through) => *number = Some(through),
                Slot::OtherFormat { format, through } => other = other.max(Some((format, through))),
                Slot::Damaged => {}
            }
        }
        Ok(match (other, numbers) {
            (Some((format, through)), _) => Found::OtherFormat { format, through },
            (None, [Some(one), Some(other)]) => Found::Through {
                through: one.max(other),
                complete: one == other,
            },
            (None, [Some(through), None] | [None, Some(through)]) => Found::Through {
                through,
                complete: false,
            },
            (None, [None, None]) => Found::Damaged,
        })
    }

    /// Opens the file with both slots at `through`; creates or repairs it if needed. `found` must
    /// be the latest result of [`Self::inspect`], and `through` not below it.
    pub(crate) fn open(path: &Path, found: Found, through: u64) -> io::Result<Self> {
        if found
            == (Found::Through {
                through,
                complete: true,
            })
        {
            return Ok(Self {
                file: open_options().open(path)?,
                through,
            });
        }
        // Writes a new file under another name. Whatever is wrong with the old one, its length and
        // blocks included, the number is always held by at least as many files as before.
        let mut content = vec![0; FILE_BYTES];
        for offset in SLOT_OFFSETS {
            let start = usize::try_from(offset).map_err(io::Error::other)?;
            content[start..start + SLOT_BYTES].copy_from_slice(&encode(through));
        }
        replace_file(path, &content)?;
        Ok(Self {
            file: open_options().open(path)?,
            through,
        })
    }

    /// The number that both slots hold.
    pub(crate) fn through(&self) -> u64 {
        self.through
    }

    /// Raises the number in both slots, durably. After an error the number counts as not raised,
    /// although a slot may already hold it; raising again is safe.
    pub(crate) fn raise(&mut self, through: u64) -> io::Result<()> {
        if through <= self.through {
            return Ok(());
        }
        let slot = encode(through);
        for offset in SLOT_OFFSETS {
            self.file.write_all_at(&slot, offset)?;
            self.file.sync_data()?;
        }
        self.through = through;
        Ok(())
    }
}

enum Slot {
    Intact(u64),
    OtherFormat { format: u32, through: u64 },
    Damaged,
}

fn encode(through: u64) -> [u8; SLOT_BYTES] {
    let mut slot = [0; SLOT_BYTES];
    slot[..8].copy_from_slice(MAGIC);
    slot[8..12].copy_from_slice(&FORMAT.to_le_bytes());
    slot[16..24].copy_from_slice(&through.to_le_bytes());
    let (content, checksum) = slot.split_at_mut(SLOT_BYTES - 4);
    checksum.copy_from_slice(&crc32fast::hash(content).to_le_bytes());
    slot
}

fn read_slot(file: &File, offset: u64) -> io::Result<Slot> {
    let mut slot = [0; SLOT_BYTES];
    match file.read_exact_at(&mut slot, offset) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(Slot::Damaged),
        // A sector that the disk can no longer read is a damaged slot; the other slot decides.
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error()) => {
            return Ok(Slot::Damaged);
        }
        Err(error) => return Err(error),
    }
    let (content, checksum) = slot.split_at(SLOT_BYTES - 4);
    if !content.starts_with(MAGIC) || crc32fast::hash(content).to_le_bytes() != *checksum {
        return Ok(Slot::Damaged);
    }
    let format = u32::from_le_bytes([slot[8], slot[9], slot[10], slot[11]]);
    let mut number = [0; 8];
    number.copy_from_slice(&slot[16..24]);
    let through = u64::from_le_bytes(number);
    Ok(match format {
        FORMAT => Slot::Intact(through),
        _ => Slot::OtherFormat { format, through },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_only_one_slot_holds_counts_and_is_made_whole() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("mark");
        let mut mark = HighWater::open(&path, Found::Missing, 10).expect("made");
        mark.raise(1000).expect("raised");
        assert_eq!(mark.through(), 1000);
        mark.raise(7).expect("nothing to raise");
        let whole = Found::Through {
            through: 1000,
            complete: true,
        };
        assert_eq!(HighWater::inspect(&path).expect("read"), whole);

        // The state after a crash between the two writes.
        mark.file
            .write_all_at(&encode(2000), SLOT_OFFSETS[0])
            .expect("written");
        let found = HighWater::inspect(&path).expect("read");
        assert_eq!(
            found,
            Found::Through {
                through: 2000,
                complete: false
            }
        );
        HighWater::open(&path, found, 2000).expect("made whole");
        mark.file
            .write_all_at(&[0; SLOT_BYTES], SLOT_OFFSETS[0])
            .expect("the old file is gone");
        let whole = Found::Through {
            through: 2000,
            complete: true,
        };
        assert_eq!(HighWater::inspect(&path).expect("read"), whole);
    }

    #[test]
    fn a_slot_of_another_version_is_not_overruled_by_one_of_this_version() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("mark");
        let mark = HighWater::open(&path, Found::Missing, 10).expect("made");
        for format in [FORMAT - 1, FORMAT + 1] {
            let mut other = encode(20);
            other[8..12].copy_from_slice(&format.to_le_bytes());
            let (content, checksum) = other.split_at_mut(SLOT_BYTES - 4);
            checksum.copy_from_slice(&crc32fast::hash(content).to_le_bytes());
            mark.file
                .write_all_at(&other, SLOT_OFFSETS[1])
                .expect("written");
            let through = 20;
            assert_eq!(
                HighWater::inspect(&path).expect("read"),
                Found::OtherFormat { format, through }
            );
        }
    }
}
