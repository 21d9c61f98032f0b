//! Reports changes in a directory of the container, by inotify.
//!
//! The directory is resolved like that of every order, and watched as the process's working directory: inotify takes a
//! path and no descriptor, and `.` cannot be exchanged. A file is watched through its directory, so that a program may
//! replace it. What its reader does not take stays in the kernel's queue, which is bounded.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;

use conman_archive::refuse_procfs;
use conman_proto::{FileChange, FileChangeKind};
use conman_shim_protocol::FilesReply;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::inotify::{self, CreateFlags, Event, ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;
use rustix::process::{chdir, fchdir};

use super::tree::Tree;
use super::{Failed, FilesFailure, failed, file, reply};

/// Many events, and at least one with the longest name.
const EVENTS_BYTES: usize = 16 * 1024;

const CHANGES: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::MODIFY)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MOVE)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVE_SELF)
    .union(WatchFlags::ONLYDIR);

/// Writes changes until the directory is gone, or nobody reads them.
pub(super) fn watch(tree: &Tree, path: &str, output: &OwnedFd) -> Result<(), Failed> {
    let (directory, only) = watched(tree, path)?;
    let failed = failed(path);
    let changes = begin(&directory).map_err(&failed)?;
    drop(directory);
    reply(output, &FilesReply::Content)?;
    let mut output = file(output)?;
    report(&changes, only.as_deref(), &mut output).map_err(failed)
}

/// The directory to watch, and the only name in it to report.
fn watched(tree: &Tree, path: &str) -> Result<(OwnedFd, Option<OsString>), Failed> {
    match tree.directory(path) {
        Err(error) if error.failure != FilesFailure::Conflict => Err(error),
        // It is a file, or a link to one.
        Err(_) => {
            let failed = failed(path);
            let (directory, name) = tree.parent(path).map_err(&failed)?;
            refuse_procfs(&directory).map_err(failed)?;
            Ok((directory, Some(name.to_owned())))
        }
        Ok(directory) => Ok((directory, None)),
    }
}

fn begin(directory: &OwnedFd) -> io::Result<OwnedFd> {
    let changes = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
    fchdir(directory)?;
    inotify::add_watch(&changes, c".", CHANGES)?;
    // The end of a directory is reported once no process is in it.
    chdir("/")?;
    Ok(changes)
}

fn report(changes: &OwnedFd, only: Option<&OsStr>, output: &mut File) -> io::Result<()> {
    let mut space = [const { MaybeUninit::uninit() }; EVENTS_BYTES];
    let mut events = Reader::new(changes, &mut space);
    let mut lines = Vec::new();
    loop {
        let is_gone = match events.next() {
            Ok(event) => {
                let change = change(&event).filter(|_| is_wanted(&event, only));
                if let Some(change) = &change {
                    serde_json::to_writer(&mut lines, change)?;
                    lines.push(b'\n');
                }
                change.is_some_and(|change| change.kind == FileChangeKind::Gone)
            }
            Err(Errno::AGAIN | Errno::INTR) => false,
            Err(errno) => return Err(errno.into()),
        };
        if is_gone || events.is_buffer_empty() {
            output.write_all(&lines)?;
            lines.clear();
            if is_gone || !wait(changes, output)? {
                return Ok(());
            }
        }
    }
}

/// Waits for events. `false` when nobody reads them any more.
fn wait(changes: &OwnedFd, output: &File) -> io::Result<bool> {
    let mut fds = [
        PollFd::new(changes, PollFlags::IN),
        // The end of its reader is reported in any case.
        PollFd::from_borrowed_fd(output.as_fd(), PollFlags::empty()),
    ];
    rustix::io::retry_on_intr(|| poll(&mut fds, None))?;
    Ok(fds[1].revents().is_empty())
}

fn is_wanted(event: &Event<'_>, only: Option<&OsStr>) -> bool {
    let name = event
        .file_name()
        .map(|name| OsStr::from_bytes(name.to_bytes()));
    match (only, name) {
        (Some(only), Some(name)) => only == name,
        // Of the directory itself, the changes of its attributes do not concern its files.
        (Some(_), None) => !event.events().contains(ReadFlags::ATTRIB),
        (None, _) => true,
    }
}

/// `None` for the kernel's notice that a watch has ended.
fn change(event: &Event<'_>) -> Option<FileChange> {
    let kinds = [
        (ReadFlags::QUEUE_OVERFLOW, FileChangeKind::Overflow),
        (ReadFlags::DELETE_SELF, FileChangeKind::Gone),
        (ReadFlags::MOVE_SELF, FileChangeKind::Gone),
        (ReadFlags::UNMOUNT, FileChangeKind::Gone),
        (ReadFlags::CREATE, FileChangeKind::Created),
        (ReadFlags::MODIFY, FileChangeKind::Modified),
        (ReadFlags::ATTRIB, FileChangeKind::Attributes),
        (ReadFlags::DELETE, FileChangeKind::Removed),
        (ReadFlags::MOVED_FROM, FileChangeKind::MovedFrom),
        (ReadFlags::MOVED_TO, FileChangeKind::MovedTo),
    ];
    let flags = event.events();
    let (_, kind) = kinds.into_iter().find(|(flag, _)| flags.contains(*flag))?;
    let name = event.file_name();
    Some(FileChange {
        kind,
        name: name.map(|name| name.to_string_lossy().into_owned()),
        directory: name.is_none() || flags.contains(ReadFlags::ISDIR),
        cookie: Some(event.cookie()).filter(|cookie| *cookie != 0),
    })
}
