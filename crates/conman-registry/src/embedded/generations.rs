//! Assigns generations.

use std::path::PathBuf;
use std::sync::Arc;

use conman_proto::Generation;

use crate::high_water::HighWater;
use crate::{GREATEST_GENERATION, RegistryError};

/// How many generations one write of the file reserves. Larger blocks waste more numbers at every
/// start of the daemon, smaller ones sync the file more often. At one start a millisecond, 2^53
/// generations last 285,000 years.
const BLOCK: u64 = 1000;

/// Assigns generations from a block that is first reserved in the `generations` file.
///
/// Whatever is lost later, an assigned number is below the mark in the file, and a new daemon
/// begins above the mark. The registry file holds a copy of the mark, written by the commit that
/// acknowledges the first number of a block.
#[derive(Debug)]
pub(super) struct Generations {
    file: HighWater,
    path: PathBuf,
    /// Greatest number assigned or skipped.
    used: u64,
}

impl Generations {
    /// Continues above everything that the file covers.
    pub(super) fn new(file: HighWater, path: PathBuf) -> Self {
        let used = file.through();
        Self { file, path, used }
    }

    /// Every number up to this may have been used.
    pub(super) fn reserved_through(&self) -> u64 {
        self.file.through()
    }

    /// The next number, greater than every earlier one; it is never assigned again.
    pub(super) fn take(&mut self) -> Result<Generation, RegistryError> {
        let greatest = GREATEST_GENERATION.get();
        if self.used >= greatest {
            return Err(RegistryError::Exhausted);
        }
        let next = self.used + 1;
        if next > self.file.through() {
            let through = self.used.saturating_add(BLOCK).min(greatest);
            self.file
                .raise(through)
                .map_err(|source| RegistryError::Io {
                    action: "reserve generations in",
                    path: self.path.clone(),
                    source: Arc::new(source),
                })?;
        }
        self.used = next;
        Generation::new(next).ok_or(RegistryError::Exhausted)
    }
}
