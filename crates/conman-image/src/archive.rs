//! Archives as files: their kind, and their members by name.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Seek as _, SeekFrom, Write};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;

use tar::{Archive, EntryType};

use crate::compression::{Compression, SNIFFED_BYTES, foreign_format};
use crate::import::ImportError;
use crate::limits::ImageLimits;
use crate::unpack::{UnpackError, decoded, stream_error};

/// Most members of an image archive: three for each layer, and some. With more it is taken for a
/// root file system.
const MAX_MEMBERS: usize = 10_000;

/// Longest name of a member in an image archive; most are digests.
const MAX_MEMBER_NAME_BYTES: usize = 512;

/// Most links from member to member that are followed: older Docker shares layers by one.
const MAX_LINKS: usize = 4;

/// Directories that identify a root file system at once, which saves reading it twice.
const ROOT_DIRECTORIES: [&str; 12] = [
    "bin", "dev", "etc", "home", "lib", "opt", "proc", "root", "sbin", "tmp", "usr", "var",
];

/// The kind of a file.
pub(crate) enum Kind {
    OciLayout(Members),
    DockerSave(Members),
    RootFileSystem,
}

/// The members of an uncompressed archive.
#[derive(Debug)]
pub(crate) struct Members {
    file: Arc<File>,
    members: HashMap<String, Member>,
}

#[derive(Debug)]
enum Member {
    File { offset: u64, size: u64 },
    Link { target: String },
}

/// Detects the kind of `file` from its content. A compressed image archive is unpacked into
/// `scratch` first, since its members are read out of order.
pub(crate) fn classify(
    file: &File,
    scratch: &Path,
    limits: &ImageLimits,
) -> Result<Kind, ImportError> {
    let mut head = [0; SNIFFED_BYTES];
    let length = file.read_at(&mut head, 0).map_err(ImportError::Read)?;
    if length == 0 {
        return Err(ImportError::Empty);
    }
    if let Some(format) = foreign_format(&head[..length]) {
        return Err(ImportError::ForeignFormat { format });
    }
    let Some(members) = list(rewound(file)?, limits)? else {
        return Ok(Kind::RootFileSystem);
    };
    let oci = members.contains_key("oci-layout") && members.contains_key("index.json");
    if !oci && !members.contains_key("manifest.json") {
        return Ok(Kind::RootFileSystem);
    }
    let members = if Compression::detect(&head[..length]) == Compression::Plain {
        Members {
            file: Arc::new(file.try_clone().map_err(ImportError::Read)?),
            members,
        }
    } else {
        let plain = spool(rewound(file)?, scratch, limits)?;
        Members {
            members: list(rewound(&plain)?, limits)?.unwrap_or_default(),
            file: Arc::new(plain),
        }
    };
    Ok(if oci {
        Kind::OciLayout(members)
    } else {
        Kind::DockerSave(members)
    })
}

/// Copies a stream into a file without a name, so that nothing is left in any case.
pub(crate) fn keep(
    mut source: impl Read,
    scratch: &Path,
    limits: &ImageLimits,
) -> Result<File, ImportError> {
    let mut file = tempfile::tempfile_in(scratch).map_err(ImportError::Spool)?;
    let mut buffer = vec![0; 128 << 10];
    let mut total = 0_u64;
    loop {
        let count = match source.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(ImportError::Read(error)),
        };
        total += count as u64;
        if total > limits.max_blob_bytes {
            return Err(ImportError::TooLarge {
                what: "the archive".to_owned(),
                limit: limits.max_blob_bytes,
            });
        }
        file.write_all(&buffer[..count])
            .map_err(ImportError::Spool)?;
    }
    Ok(file)
}

fn spool(source: File, scratch: &Path, limits: &ImageLimits) -> Result<File, ImportError> {
    let unreadable = |error| ImportError::Archive(Box::new(error));
    let (stream, gauge) = decoded(source, limits, false).map_err(unreadable)?;
    keep(stream, scratch, limits).map_err(|error| match error {
        ImportError::Read(error) => unreadable(stream_error(&gauge, error)),
        other => other,
    })
}

fn rewound(file: &File) -> Result<File, ImportError> {
    let mut file = file.try_clone().map_err(ImportError::Read)?;
    file.seek(SeekFrom::Start(0)).map_err(ImportError::Read)?;
    Ok(file)
}

/// The members by name; `None` if it must be a root file system.
fn list(
    source: File,
    limits: &ImageLimits,
) -> Result<Option<HashMap<String, Member>>, ImportError> {
    let unreadable = |error| ImportError::Archive(Box::new(error));
    let (stream, gauge) = decoded(source, limits, false).map_err(unreadable)?;
    let failed = |error| unreadable(stream_error(&gauge, error));
    let mut archive = Archive::new(stream);
    let mut members = HashMap::new();
    let mut entries = archive.entries().map_err(failed)?;
    loop {
        gauge.expect_header();
        let Some(entry) = entries.next() else { break };
        let mut entry = match entry.map_err(failed) {
            // The text of the error repeats bytes of what is no archive.
            Err(ImportError::Archive(error))
                if members.is_empty() && matches!(*error, UnpackError::Corrupt { .. }) =>
            {
                return Err(ImportError::NoArchive);
            }
            entry => entry?,
        };
        gauge.expect_data();
        let raw = entry.path_bytes().into_owned();
        let Some(name) = member_name(&raw) else {
            return Ok(None);
        };
        let top = name.split('/').next().unwrap_or_default();
        if ROOT_DIRECTORIES.contains(&top) || members.len() >= MAX_MEMBERS {
            return Ok(None);
        }
        let member = match entry.header().entry_type() {
            EntryType::Regular | EntryType::Continuous => Some(Member::File {
                offset: entry.raw_file_position(),
                size: entry.size(),
            }),
            // Its hole would have to be read through; no tool writes images like that.
            EntryType::GNUSparse => return Ok(None),
            EntryType::Symlink => link(&entry, name.rsplit_once('/').map_or("", |(dir, _)| dir)),
            EntryType::Link => link(&entry, ""),
            _ => None,
        };
        if let Some(member) = member {
            members.insert(name, member);
        }
        io::copy(&mut entry, &mut io::sink()).map_err(failed)?;
    }
    Ok(Some(members))
}

fn link<R: Read>(entry: &tar::Entry<'_, R>, directory: &str) -> Option<Member> {
    let target = entry.link_name_bytes()?;
    let target = std::str::from_utf8(&target).ok()?;
    let mut names: Vec<&str> = directory
        .split('/')
        .filter(|name| !name.is_empty())
        .collect();
    for name in target.split('/') {
        match name {
            "" | "." => {}
            ".." => {
                names.pop()?;
            }
            name => names.push(name),
        }
    }
    Some(Member::Link {
        target: names.join("/"),
    })
}

/// A name without `./` and trailing slashes.
fn member_name(raw: &[u8]) -> Option<String> {
    if raw.len() > MAX_MEMBER_NAME_BYTES {
        return None;
    }
    let text = std::str::from_utf8(raw).ok()?;
    let names: Vec<&str> = text
        .split('/')
        .filter(|name| !name.is_empty() && *name != ".")
        .collect();
    Some(names.join("/"))
}

impl Members {
    /// The content of a member, by its name in the archive.
    pub(crate) fn open(&self, name: &str) -> Option<Section> {
        let mut name = name;
        for _ in 0..=MAX_LINKS {
            match self.members.get(name)? {
                Member::File { offset, size } => {
                    return Some(Section {
                        file: self.file.clone(),
                        at: *offset,
                        left: *size,
                    });
                }
                Member::Link { target } => name = target,
            }
        }
        None
    }
}

/// A part of a file, read without moving a shared position.
#[derive(Debug)]
pub(crate) struct Section {
    file: Arc<File>,
    at: u64,
    left: u64,
}

impl Section {
    pub(crate) fn size(&self) -> u64 {
        self.left
    }
}

impl Read for Section {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let wanted = usize::try_from(self.left).map_or(buffer.len(), |left| left.min(buffer.len()));
        let count = self.file.read_at(&mut buffer[..wanted], self.at)?;
        self.at += count as u64;
        self.left -= count as u64;
        Ok(count)
    }
}
