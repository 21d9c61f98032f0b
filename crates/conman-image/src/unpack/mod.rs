//! Unpacks one layer's archive into one directory, in overlayfs's format.
//!
//! The entries of an archive are handled as follows:
//! - Regular files, directories, symbolic links (with any target), FIFOs, and hard links to files
//!   of the same layer are unpacked with numeric owner, time and mode. Set-user-id and
//!   set-group-id bits are kept: only root can enter the store, and the launcher limits their
//!   effect in a session (`no_new_privs`, user namespace).
//! - `.wh.NAME` becomes a character device 0:0, `.wh..wh..opq` the attribute
//!   `trusted.overlay.opaque`, or a note next to the layer if it is in the root. Other `.wh..wh.`
//!   names are leftovers of an obsolete union file system and are dropped.
//! - Of the extended attributes only `security.capability` is kept; above all, those that would
//!   forge overlayfs's marks are dropped.
//! - Directories that the archive does not mention belong to root, 0755.
//! - Device nodes are skipped and counted: sessions have their own /dev.
//!
//! Everything else is refused: see [`Refusal`]. A later entry of the same name replaces an
//! earlier one, unless the earlier one is a directory and the later is not.

mod entry_path;
mod error;
mod pax;
mod tree;

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::rc::Rc;

use rustix::fs::Timespec;
use tar::{Archive, Entry, EntryType};

pub use error::{EntryName, Refusal, UnpackError};
#[cfg(test)]
pub(crate) use tree::OPAQUE_XATTR;
pub(crate) use tree::{is_opaque, is_whiteout};

use crate::compression;
use crate::digest::LayerId;
use crate::limits::{Allowance, ImageLimits};
use crate::meter::{Gauge, Limit, Packed, Unpacked};
use crate::owners::RANGE_SIZE;
use entry_path::EntryPath;
use pax::PaxRecords;
use tree::{Attributes, Problem, Tree, finish_file};

const WHITEOUT_PREFIX: &[u8] = b".wh.";
const WHITEOUT_OPAQUE: &[u8] = b".wh..wh..opq";
const WHITEOUT_META_PREFIX: &[u8] = b".wh..wh.";

/// Memory for the times of directories, which are set at the end. Directories beyond it, some
/// 500,000, keep the time of their last change.
const MAX_DIRECTORY_TIME_BYTES: usize = 64 << 20;

/// Memory for one of them in addition to its path.
const DIRECTORY_TIME_OVERHEAD_BYTES: usize = 64;

/// Bytes copied at a time.
const COPY_BYTES: usize = 128 << 10;

/// The result of unpacking an archive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UnpackedLayer {
    pub(crate) id: LayerId,
    pub(crate) file_bytes: u64,
    /// Device nodes, which are not unpacked.
    pub(crate) skipped_devices: u64,
    /// Entries whose owner or group no session can have; sessions see nobody there.
    pub(crate) owners_out_of_range: u64,
    /// Whether it hides all layers below.
    pub(crate) hides_all_below: bool,
}

/// Unpacks `source`, with any supported compression, into the empty directory `root`.
///
/// The archive's end is reached and its digest, if it is known, is verified before this returns `Ok`.
pub(crate) fn unpack(
    source: impl Read,
    root: OwnedFd,
    expected: Option<LayerId>,
    allowance: &mut Allowance,
) -> Result<UnpackedLayer, UnpackError> {
    let (stream, gauge) = decoded(source, &allowance.limits, true)?;
    let mut unpacking = Unpacking {
        tree: Tree::new(root),
        gauge: gauge.clone(),
        allowance,
        directory_times: Vec::new(),
        directory_time_bytes: 0,
        file_bytes: 0,
        skipped_devices: 0,
        owners_out_of_range: 0,
        buffer: vec![0; COPY_BYTES],
    };
    let mut stream = unpacking.all(stream)?;
    let marked_end = !gauge.ended();
    // The bytes after the archive's end marker belong to the digest.
    io::copy(&mut stream, &mut io::sink()).map_err(|error| stream_error(&gauge, error))?;
    let id = gauge.take_digest().expect("was asked for");
    match expected {
        Some(expected) if expected != id => {
            return Err(UnpackError::DigestMismatch {
                expected,
                actual: id,
            });
        }
        // There is no other sign of an archive that was cut between two entries.
        None if !marked_end => {
            return Err(UnpackError::Truncated {
                bytes: gauge.stream_bytes(),
            });
        }
        _ => {}
    }
    Ok(UnpackedLayer {
        id,
        file_bytes: unpacking.file_bytes,
        skipped_devices: unpacking.skipped_devices,
        owners_out_of_range: unpacking.owners_out_of_range,
        hides_all_below: unpacking.tree.root_is_opaque,
    })
}

type Decoded<'a> = Unpacked<Box<dyn Read + 'a>>;

/// Decodes `source` by its first bytes, within the limits. `hashed`: the gauge computes the digest of what comes
/// out.
pub(crate) fn decoded<'a>(
    source: impl Read + 'a,
    limits: &ImageLimits,
    hashed: bool,
) -> Result<(Decoded<'a>, Rc<Gauge>), UnpackError> {
    let gauge = Gauge::new(limits, hashed);
    let packed = Packed {
        source,
        gauge: gauge.clone(),
    };
    let stream = Unpacked {
        source: compression::decode(packed).map_err(|error| stream_error(&gauge, error))?,
        gauge: gauge.clone(),
    };
    Ok((stream, gauge))
}

/// The meaning of an error of the archive's stream.
pub(crate) fn stream_error(gauge: &Gauge, error: io::Error) -> UnpackError {
    let bytes = gauge.stream_bytes();
    if let Some(limit) = gauge.hit() {
        return UnpackError::Limit(limit);
    }
    if error.raw_os_error().is_some() {
        return UnpackError::Read(error);
    }
    if error.kind() == io::ErrorKind::UnexpectedEof || gauge.ended() {
        return UnpackError::Truncated { bytes };
    }
    UnpackError::Corrupt {
        bytes,
        source: error,
    }
}

struct Unpacking<'a> {
    tree: Tree,
    gauge: Rc<Gauge>,
    allowance: &'a mut Allowance,
    /// The times of directories, which are set once they are filled.
    directory_times: Vec<(Vec<u8>, Timespec)>,
    directory_time_bytes: usize,
    file_bytes: u64,
    skipped_devices: u64,
    owners_out_of_range: u64,
    buffer: Vec<u8>,
}

impl Unpacking<'_> {
    fn all<R: Read>(&mut self, stream: R) -> Result<R, UnpackError> {
        let mut archive = Archive::new(stream);
        let gauge = self.gauge.clone();
        let failed = |error| stream_error(&gauge, error);
        let mut entries = archive.entries().map_err(failed)?;
        loop {
            gauge.expect_header();
            let Some(entry) = entries.next() else { break };
            let mut entry = entry.map_err(failed)?;
            gauge.expect_data();
            self.count_entry()?;
            self.entry(&mut entry)
                .map_err(|problem| problem.at(&entry.path_bytes()))?;
            // The data of a directory or a link is skipped here, so that it counts as data and not
            // as the next entry's header.
            io::copy(&mut entry, &mut io::sink()).map_err(failed)?;
        }
        gauge.expect_data();
        for (raw, modified) in std::mem::take(&mut self.directory_times).iter().rev() {
            EntryPath::parse(raw, &self.allowance.limits)
                .map_err(Problem::from)
                .and_then(|path| self.tree.set_directory_time(&path, *modified))
                .map_err(|problem| problem.at(raw))?;
        }
        Ok(archive.into_inner())
    }

    fn count_entry(&mut self) -> Result<(), UnpackError> {
        match self.allowance.entries_left.checked_sub(1) {
            Some(left) => {
                self.allowance.entries_left = left;
                Ok(())
            }
            None => Err(UnpackError::Limit(Limit::Entries(
                self.allowance.limits.max_entries,
            ))),
        }
    }

    /// The data of every entry is read, and a sparse one may contain only a hole.
    fn charge(&mut self, size: u64) -> Result<(), UnpackError> {
        let limits = &self.allowance.limits;
        if size > limits.max_file_bytes {
            return Err(UnpackError::Limit(Limit::FileBytes(limits.max_file_bytes)));
        }
        self.allowance.bytes_left =
            self.allowance
                .bytes_left
                .checked_sub(size)
                .ok_or(UnpackError::Limit(Limit::UnpackedBytes(
                    limits.max_unpacked_bytes,
                )))?;
        Ok(())
    }

    fn entry<R: Read>(&mut self, entry: &mut Entry<'_, R>) -> Result<(), Problem> {
        self.charge(entry.size())?;
        let kind = entry.header().entry_type();
        if kind.is_pax_global_extensions() {
            return Ok(());
        }
        let raw = entry.path_bytes().into_owned();
        let records = PaxRecords::read(&self.gauge.headers(), entry)?;
        let path = EntryPath::parse(&raw, &self.allowance.limits)?;
        let attributes = attributes(entry.header(), &records)?;
        if attributes.uid.max(attributes.gid) >= RANGE_SIZE {
            self.owners_out_of_range += 1;
        }

        if let Some((parents, name)) = path.split() {
            // Every reader of the format ignores entries in a directory of that name, since the
            // name alone makes a whiteout.
            if parents.iter().any(|name| name.starts_with(WHITEOUT_PREFIX)) {
                return Err(Refusal::WhiteoutName.into());
            }
            if name.starts_with(WHITEOUT_PREFIX) {
                return self.whiteout(parents, name);
            }
        }
        match kind {
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                if is_old_directory(entry.header(), &raw) {
                    return self.directory(&path, &attributes, raw);
                }
                self.file(entry, &path, &attributes, &records)
            }
            EntryType::Directory => self.directory(&path, &attributes, raw),
            EntryType::Symlink => {
                let target = entry.link_name_bytes().ok_or(Refusal::BadLink)?;
                self.tree.symlink(&path, &target, &attributes)
            }
            EntryType::Link => {
                let target = entry.link_name_bytes().ok_or(Refusal::BadLink)?;
                let target = EntryPath::parse(&target, &self.allowance.limits)
                    .map_err(|why| Refusal::LinkTarget(Box::new(why)))?;
                self.tree.hard_link(&path, &target)
            }
            EntryType::Fifo => self.tree.fifo(&path, &attributes),
            EntryType::Char | EntryType::Block => {
                self.skipped_devices += 1;
                Ok(())
            }
            other => Err(Refusal::UnknownKind(other.as_byte()).into()),
        }
    }

    fn whiteout(&mut self, parents: &[Vec<u8>], name: &[u8]) -> Result<(), Problem> {
        if name == WHITEOUT_OPAQUE {
            return self.tree.opaque(parents);
        }
        if name.starts_with(WHITEOUT_META_PREFIX) {
            return Ok(());
        }
        match &name[WHITEOUT_PREFIX.len()..] {
            b"" | b"." | b".." => Err(Refusal::WhiteoutName.into()),
            hidden => self.tree.whiteout(parents, hidden),
        }
    }

    fn directory(
        &mut self,
        path: &EntryPath,
        attributes: &Attributes,
        raw: Vec<u8>,
    ) -> Result<(), Problem> {
        self.tree.directory(path, attributes)?;
        self.directory_time_bytes += raw.len() + DIRECTORY_TIME_OVERHEAD_BYTES;
        if self.directory_time_bytes <= MAX_DIRECTORY_TIME_BYTES {
            self.directory_times.push((raw, attributes.modified));
        }
        Ok(())
    }

    fn file<R: Read>(
        &mut self,
        entry: &mut Entry<'_, R>,
        path: &EntryPath,
        attributes: &Attributes,
        records: &PaxRecords,
    ) -> Result<(), Problem> {
        let size = entry.size();
        let mut file = std::fs::File::from(self.tree.file(path)?);
        let mut written = 0_u64;
        loop {
            let count = match entry.read(&mut self.buffer) {
                Ok(0) => break,
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(stream_error(&self.gauge, error).into()),
            };
            written += count as u64;
            // The stream's check does not count holes.
            self.gauge
                .check_ratio(self.file_bytes + written)
                .map_err(UnpackError::Limit)?;
            file.write_all(&self.buffer[..count])
                .map_err(|source| Problem::System("write", source))?;
        }
        if written < size {
            let bytes = self.gauge.stream_bytes();
            return Err(UnpackError::Truncated { bytes }.into());
        }
        self.file_bytes += written;
        finish_file(&file.into(), attributes, records.capability.as_deref())
    }
}

/// Archives older than POSIX mark directories only by a slash.
fn is_old_directory(header: &tar::Header, raw: &[u8]) -> bool {
    raw.ends_with(b"/") && header.as_ustar().is_none() && header.as_gnu().is_none()
}

fn attributes(header: &tar::Header, records: &PaxRecords) -> Result<Attributes, Refusal> {
    // The greatest id means "no change" to the kernel.
    let id = |value: io::Result<u64>, field| match value.ok().map(u32::try_from) {
        Some(Ok(id)) if id != u32::MAX => Ok(id),
        _ => Err(Refusal::BadHeader(field)),
    };
    let seconds = header.mtime().map_err(|_| Refusal::BadHeader("time"))?;
    Ok(Attributes {
        mode: header.mode().map_err(|_| Refusal::BadHeader("mode"))?,
        uid: id(header.uid(), "owner")?,
        gid: id(header.gid(), "group")?,
        modified: records.modified.unwrap_or(Timespec {
            tv_sec: i64::try_from(seconds).map_err(|_| Refusal::BadHeader("time"))?,
            tv_nsec: 0,
        }),
    })
}
