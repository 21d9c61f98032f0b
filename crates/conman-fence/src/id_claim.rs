//! No two conmans of a host use the same user and group ids: a shim locks its pool's ids in a file of the host.
//!
//! Byte N of the file stands for id N. Record locks belong to a process and end with it (fcntl_locking(2)), so
//! that nothing has to be removed after a crash. The kernel reports which process has a conflicting lock.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use conman_shim_protocol::IdPool;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

/// The file, on hosts that are not a test's.
pub const IDS_FILE: &str = "/run/conman.ids";

/// How long a shim that is ending may keep its lock: on a loaded host the kernel needs seconds to remove what
/// it had.
pub const ENDING_TIMEOUT: Duration = Duration::from_secs(10);
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// Another conman of this host uses some of the same ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdsTaken {
    wanted: IdPool,
    /// The process that has them.
    holder: i32,
    free: Option<IdPool>,
}

impl IdsTaken {
    fn find(file: &File, wanted: IdPool, holder: i32) -> io::Result<Self> {
        let mut free: Vec<IdPool> = Vec::new();
        for range in IdPool::all_ranges() {
            if self::holder(file, range)?.is_some() {
                continue;
            }
            let is_smaller = |last: &&mut IdPool| last.ranges() < wanted.ranges();
            let mut last = free.last_mut().filter(is_smaller);
            if !last.as_mut().is_some_and(|last| last.append(range)) {
                free.push(range);
            }
        }
        Ok(Self {
            wanted,
            holder,
            // The first of the largest.
            free: free.into_iter().rev().max_by_key(IdPool::ranges),
        })
    }
}

impl std::error::Error for IdsTaken {}

impl fmt::Display for IdsTaken {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { wanted, holder, .. } = self;
        write!(
            formatter,
            "`node.id_range`, {wanted}, overlaps the user ids of another conman on this host: those of \
             process {holder}"
        )?;
        let line = std::fs::read(format!("/proc/{holder}/cmdline")).unwrap_or_default();
        let words: Vec<_> = line
            .split(|byte| *byte == 0)
            .filter(|word| !word.is_empty())
            .map(|word| String::from_utf8_lossy(word).escape_debug().to_string())
            .collect();
        if !words.is_empty() {
            write!(formatter, " (`{}`)", words.join(" "))?;
        }
        match self.free {
            Some(free) => write!(formatter, ". The next free range: id_range = \"{free}\""),
            None => formatter.write_str(". No range is free; make the other conman's smaller"),
        }
    }
}

/// Locks the ids as long as the file is open. It must be the only one of this process for this path: closing
/// any other one ends the lock.
pub(crate) fn claim(
    path: &Path,
    pool: IdPool,
    patience: Duration,
) -> io::Result<Result<File, IdsTaken>> {
    let file = open(path)?;
    let try_lock = || match fcntl(&file, FcntlArg::F_SETLK(&record(pool))) {
        Ok(_) => Ok(None),
        // Its lock may have ended since; then the next attempt succeeds.
        Err(Errno::EACCES | Errno::EAGAIN) => holder(&file, pool).map(|holder| holder.or(Some(0))),
        Err(errno) => Err(errno.into()),
    };
    Ok(match retry(patience, try_lock)? {
        None => Ok(file),
        Some(holder) => Err(IdsTaken::find(&file, pool, holder)?),
    })
}

/// Looks for another process that has locked some of the ids, and keeps them locked for `patience`. The calling
/// process has no lock.
///
/// # Errors
/// When the file cannot be opened or the kernel does not answer.
pub fn ids_taken(path: &Path, pool: IdPool, patience: Duration) -> io::Result<Option<IdsTaken>> {
    let file = open(path)?;
    let holder = retry(patience, || holder(&file, pool))?;
    holder
        .map(|holder| IdsTaken::find(&file, pool, holder))
        .transpose()
}

fn open(path: &Path) -> io::Result<File> {
    File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)
        .map_err(|error| {
            let what = format!("cannot open {}: {error}", path.display());
            io::Error::new(error.kind(), what)
        })
}

/// Repeats until no process has the ids, for at most `patience`.
#[expect(
    clippy::disallowed_methods,
    reason = "the shim has no runtime, and serves no client yet"
)]
fn retry(
    patience: Duration,
    mut attempt: impl FnMut() -> io::Result<Option<i32>>,
) -> io::Result<Option<i32>> {
    let until = Instant::now() + patience;
    loop {
        match attempt()? {
            Some(_) if Instant::now() < until => std::thread::sleep(RETRY_INTERVAL),
            holder => return Ok(holder),
        }
    }
}

/// The process that has locked one of the ids, if it is not this one.
fn holder(file: &File, pool: IdPool) -> io::Result<Option<i32>> {
    let mut found = record(pool);
    fcntl(file, FcntlArg::F_GETLK(&mut found))?;
    let is_free = found.l_type == lock_type(libc::F_UNLCK);
    Ok((!is_free).then_some(found.l_pid))
}

fn record(pool: IdPool) -> libc::flock {
    libc::flock {
        l_type: lock_type(libc::F_WRLCK),
        l_whence: lock_type(libc::SEEK_SET),
        l_start: pool.first().into(),
        l_len: pool.ids().cast_signed(),
        l_pid: 0,
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "the kernel's constants fit"
)]
fn lock_type(constant: libc::c_int) -> libc::c_short {
    constant as libc::c_short
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(text: &str) -> IdPool {
        text.parse().expect("a pool")
    }

    /// A test's own locks are no conflict for it; `flock` of util-linux has no record locks.
    #[test]
    fn ids_that_another_process_has_locked_are_refused_with_the_next_free_range() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("ids");
        let program = "import fcntl, sys\n\
                       file = open(sys.argv[1], 'r+')\n\
                       fcntl.lockf(file, fcntl.LOCK_EX, 65536 * 4, 2147483648)\n\
                       print('locked', flush=True)\n\
                       sys.stdin.read()";
        assert_eq!(
            ids_taken(&path, IdPool::default(), Duration::ZERO).expect("a file"),
            None
        );
        let mut other = std::process::Command::new("python3")
            .args(["-c", program])
            .arg(&path)
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("python3 runs");
        let mut line = String::new();
        let output = other.stdout.take().expect("a pipe");
        std::io::BufRead::read_line(&mut std::io::BufReader::new(output), &mut line).expect("read");
        assert_eq!(line, "locked\n");

        let wanted = pool("2147549184-2147680255");
        let taken = ids_taken(&path, wanted, Duration::ZERO).expect("a file");
        let text = taken.expect("a conflict").to_string();
        assert!(
            text.contains(&format!("process {} (`", other.id())),
            "{text}"
        );
        let free = "1073741824-1073872895";
        assert!(text.ends_with(&format!("id_range = \"{free}\"")), "{text}");
        assert_eq!(
            ids_taken(&path, pool(free), Duration::ZERO).expect("a file"),
            None
        );
        let largest = ids_taken(&path, IdPool::default(), Duration::ZERO).expect("a file");
        let text = largest.expect("a conflict").to_string();
        assert!(
            text.ends_with("id_range = \"2147745792-3221487615\""),
            "{text}"
        );

        drop(other.stdin.take());
        other.wait().expect("it ends");
        claim(&path, wanted, Duration::ZERO)
            .expect("a file")
            .expect("nobody has them");
    }
}
