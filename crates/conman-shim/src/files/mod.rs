//! Reads and writes files of a container, from inside it.
//!
//! The process is made like a command's: a copy of the launcher's memory in the container's namespaces
//! and cgroups, with the rights of a user of the container and its system call filter. Instead of
//! executing a program it carries out one [`FilesOrder`] and exits. So paths and links lead only where they
//! lead for the container's own programs, what it writes counts against the container's limits, and it
//! is frozen and killed with the container.
//!
//! ```text
//! standard input    the content, in frames: length (4 bytes, big endian), bytes; a length of 0 ends it
//! standard output   a FilesReply as one line of JSON, then the content that it announces
//! exit status       0 if the content is complete
//! ```
//! Paths are resolved without the links of procfs to open files, and files of procfs are refused: those of
//! `/proc/self` would show the launcher's memory. Nothing blocks on a FIFO or a device: files are opened with
//! `O_NONBLOCK`, and only regular ones are used.

mod frames;
mod tree;
mod watch;

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::fd::{AsFd, OwnedFd};

use conman_archive::{BUFFER_BYTES, SpecialBits, UnpackError, entries, pack, unpack};
use conman_linux::{Resource, lower_limit};
use conman_shim_protocol::{ByteRange, FilesFailure, FilesOrder, FilesReply};
use rustix::io::Errno;

use frames::Frames;
use tree::Tree;

/// Address space of the process: its small copy of the launcher, and buffers. A hostile archive cannot make
/// it grow beyond that, even in a container without a limit of memory.
const ADDRESS_SPACE_BYTES: u64 = 512 << 20;

/// An error, with what it concerns.
#[derive(Debug)]
struct Failed {
    failure: FilesFailure,
    detail: String,
}

impl Failed {
    fn new(failure: FilesFailure, detail: impl Into<String>) -> Self {
        let detail = detail.into();
        Self { failure, detail }
    }
}

impl From<UnpackError> for Failed {
    fn from(error: UnpackError) -> Self {
        match error {
            UnpackError::Entry { path, source } => failed(&path.display().to_string())(source),
            error => Self::new(FilesFailure::Archive, error.to_string()),
        }
    }
}

/// The failure of an action on a path.
fn failed(path: &str) -> impl Fn(io::Error) -> Failed {
    move |error| {
        let errno = error.raw_os_error().map(Errno::from_raw_os_error);
        let failure = match errno {
            Some(Errno::NOENT) => FilesFailure::Missing,
            Some(Errno::ISDIR) => FilesFailure::IsDirectory,
            Some(
                Errno::NOTDIR
                | Errno::EXIST
                | Errno::NOTEMPTY
                | Errno::BUSY
                | Errno::XDEV
                | Errno::NAMETOOLONG,
            ) => FilesFailure::Conflict,
            Some(Errno::ACCESS | Errno::PERM | Errno::ROFS | Errno::LOOP) => FilesFailure::Refused,
            Some(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => FilesFailure::Full,
            _ => match error.kind() {
                io::ErrorKind::UnexpectedEof => FilesFailure::Interrupted,
                io::ErrorKind::PermissionDenied => FilesFailure::Refused,
                io::ErrorKind::InvalidInput => FilesFailure::Conflict,
                _ => FilesFailure::Other,
            },
        };
        Failed::new(failure, format!("{path}: {error}"))
    }
}

/// Carries out an order with these streams. Returns the exit status.
pub(crate) fn serve(order: &FilesOrder, input: &OwnedFd, output: &OwnedFd) -> i32 {
    match carry_out(order, input, output) {
        Ok(()) => 0,
        // Part of the content may have been sent; then the exit status shows that it is incomplete.
        Err(Failed { failure, detail }) => {
            let _ = reply(output, &FilesReply::Failed { failure, detail });
            1
        }
    }
}

fn carry_out(order: &FilesOrder, input: &OwnedFd, output: &OwnedFd) -> Result<(), Failed> {
    let other = failed("/");
    lower_limit(Resource::RLIMIT_AS, ADDRESS_SPACE_BYTES).map_err(&other)?;
    let tree = Tree::whole().map_err(&other)?;
    let done = match order {
        FilesOrder::Stat { path } => {
            let (_, entry) = tree.file(path)?;
            let length = 0;
            FilesReply::File {
                entry,
                start: 0,
                length,
            }
        }
        FilesOrder::Read { path, range } => return read(&tree, path, *range, output),
        FilesOrder::List { path } => return list(&tree, path, output),
        FilesOrder::Watch { path } => return watch::watch(&tree, path, output),
        FilesOrder::Pack { path } => {
            let directory = tree.directory(path)?;
            reply(output, &FilesReply::Content)?;
            return pack(&directory, buffered(output)?).map_err(failed(path));
        }
        FilesOrder::Write {
            path,
            parents,
            mode,
        } => {
            let mut frames = Frames::new(file(input)?);
            tree.write(path, *parents, *mode, &mut frames)?;
            FilesReply::Done
        }
        FilesOrder::Unpack { path, parents } => {
            let directory = match parents {
                true => tree.make_directories(path)?,
                false => tree.directory(path)?,
            };
            let unpacked = unpack(directory, Frames::new(file(input)?), SpecialBits::Keep)?;
            FilesReply::Unpacked {
                entries: unpacked.written,
                skipped: unpacked.skipped.saturating_add(unpacked.not_packed),
            }
        }
        FilesOrder::MakeDirectory { path, parents } => {
            match parents {
                true => drop(tree.make_directories(path)?),
                false => tree.make_directory(path)?,
            }
            FilesReply::Done
        }
        FilesOrder::Move {
            from,
            to,
            overwrite,
        } => {
            tree.rename(from, to, *overwrite)?;
            FilesReply::Done
        }
        FilesOrder::Remove { path, recursive } => {
            tree.remove(path, *recursive)?;
            FilesReply::Done
        }
    };
    reply(output, &done)
}

fn read(tree: &Tree, path: &str, range: Option<ByteRange>, output: &OwnedFd) -> Result<(), Failed> {
    let (mut file, entry) = tree.file(path)?;
    let size = entry.size;
    let unsatisfiable = || Failed::new(FilesFailure::Range, format!("{path} has {size} bytes"));
    let (start, length) = match range {
        None => (0, size),
        Some(ByteRange::From { first, .. }) if first >= size => return Err(unsatisfiable()),
        Some(ByteRange::From { first, last }) => {
            let end = last.map_or(size, |last| last.saturating_add(1).min(size));
            (first, end.saturating_sub(first))
        }
        Some(ByteRange::Suffix { bytes }) => {
            let length = bytes.min(size);
            (size - length, length)
        }
    };
    if range.is_some() && length == 0 {
        return Err(unsatisfiable());
    }
    let failed = failed(path);
    io::Seek::seek(&mut file, io::SeekFrom::Start(start)).map_err(&failed)?;
    reply(
        output,
        &FilesReply::File {
            entry,
            start,
            length,
        },
    )?;
    let mut output = self::file(output)?;
    let copied = io::copy(&mut io::Read::take(file, length), &mut output).map_err(&failed)?;
    match copied == length {
        true => Ok(()),
        false => Err(Failed::new(FilesFailure::Other, "the file became shorter")),
    }
}

fn list(tree: &Tree, path: &str, output: &OwnedFd) -> Result<(), Failed> {
    let directory = tree.directory(path)?;
    reply(output, &FilesReply::Content)?;
    let failed = failed(path);
    let mut output = buffered(output)?;
    output.write_all(br#"{"entries":["#).map_err(&failed)?;
    let mut first = true;
    entries(directory.as_fd(), |name| {
        // Removed meanwhile.
        let Some(entry) = tree::describe(&directory, name)? else {
            return Ok(());
        };
        if !std::mem::take(&mut first) {
            output.write_all(b",")?;
        }
        Ok(serde_json::to_writer(&mut output, &entry)?)
    })
    .map_err(&failed)?;
    output.write_all(b"]}").map_err(&failed)?;
    output.flush().map_err(&failed)
}

fn reply(output: &OwnedFd, reply: &FilesReply) -> Result<(), Failed> {
    let failed = failed("answer");
    let mut line = serde_json::to_vec(reply).map_err(|error| failed(error.into()))?;
    line.push(b'\n');
    file(output)?.write_all(&line).map_err(failed)
}

fn file(stream: &OwnedFd) -> Result<File, Failed> {
    let copy = stream.try_clone().map_err(failed("streams"))?;
    Ok(File::from(copy))
}

fn buffered(output: &OwnedFd) -> Result<BufWriter<File>, Failed> {
    Ok(BufWriter::with_capacity(BUFFER_BYTES, file(output)?))
}
