//! Reads the journal as it grows.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use anyhow::{Context as _, Result};

use super::{Checker, Report};

/// A journal that is read on where it ended.
#[derive(Debug)]
pub struct Tail {
    file: File,
    checker: Checker,
}

impl Tail {
    /// From the beginning.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn open(journal: &Path) -> Result<Self> {
        let file =
            File::open(journal).with_context(|| format!("cannot open {}", journal.display()))?;
        Ok(Self {
            file,
            checker: Checker::default(),
        })
    }

    /// Judges all that was written so far.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn catch_up(&mut self) -> Result<Report> {
        /// A few hundred lines.
        const PIECE: usize = 64 << 10;
        let mut piece = vec![0; PIECE];
        loop {
            match self
                .file
                .read(&mut piece)
                .context("cannot read the journal")?
            {
                0 => return Ok(self.checker.report()),
                length => self.checker.read(&piece[..length]),
            }
        }
    }

    /// What is known of each life.
    #[must_use]
    pub fn checker(&self) -> &Checker {
        &self.checker
    }
}
