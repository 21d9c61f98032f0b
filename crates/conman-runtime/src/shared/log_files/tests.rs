//! Tests of how log files are read and followed.

use std::os::fd::AsFd;

use rustix::fs::{FallocateFlags, fallocate};

use super::*;

const BLOCK: usize = 4_096;

/// A log of numbered lines whose first two blocks are a hole.
fn holed(directory: &Path) -> Option<PathBuf> {
    let path = directory.join("log");
    let text: String = (0..1_200).map(|n| format!("line {n:05}\n")).collect();
    std::fs::write(&path, text).expect("written");
    let file = File::options().write(true).open(&path).expect("opened");
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    match fallocate(file.as_fd(), flags, 0, 2 * BLOCK as u64) {
        Ok(()) => Some(path),
        Err(errno) => {
            #[expect(clippy::print_stderr, reason = "a skipped test says so there")]
            {
                eprintln!("skipped: no holes here: {errno}");
            }
            None
        }
    }
}

async fn all(path: PathBuf, options: LogOptions) -> String {
    let files = vec![LogFile::new(OutputStream::Stdout, path)];
    let mut log = read(files, options, || true).await.expect("a log");
    let mut text = String::new();
    while let Some(chunk) = log.next().await {
        text.push_str(&String::from_utf8_lossy(&chunk.expect("readable").bytes));
    }
    text
}

#[test]
fn a_quiet_log_is_looked_at_ever_less_often_until_something_comes() {
    let mut pauses = Pauses(FIRST_PAUSE);
    let first: Vec<Duration> = (0..8).map(|_| pauses.next()).collect();
    assert!(first.is_sorted() && first[0] == FIRST_PAUSE, "{first:?}");
    assert_eq!(first.last(), Some(&LAST_PAUSE));
    pauses.begin_anew();
    assert_eq!(pauses.next(), FIRST_PAUSE);
}

#[tokio::test]
async fn a_log_that_grows_while_it_is_read_has_an_end_all_the_same() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("log");
    std::fs::write(&path, "first\n".repeat(10_000)).expect("written");
    let files = vec![LogFile::new(OutputStream::Stdout, path.clone())];
    let log = read(files, LogOptions::default(), || true).await;
    let mut log = log.expect("a log");
    let mut file = File::options().append(true).open(&path).expect("opened");
    let mut bytes = 0;
    while let Some(chunk) = log.next().await {
        bytes += chunk.expect("readable").bytes.len();
        io::Write::write_all(&mut file, &b"later\n".repeat(10_000)).expect("written");
    }
    assert_eq!(bytes, 60_000);
}

#[tokio::test]
async fn a_followed_log_that_is_cut_is_read_on_from_its_beginning() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("log");
    std::fs::write(&path, "one\ntwo\nthr").expect("written");
    let ended = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let (options, seen) = (
        LogOptions {
            follow: true,
            ..LogOptions::default()
        },
        Arc::clone(&ended),
    );
    let files = vec![LogFile::new(OutputStream::Stdout, path.clone())];
    let has_ended = move || seen.load(std::sync::atomic::Ordering::SeqCst);
    let mut log = read(files, options, has_ended).await.expect("a log");
    let first = log.next().await.expect("there is more").expect("readable");
    assert_eq!(first.bytes, "one\ntwo\nthr");
    std::fs::write(&path, "new\n").expect("rewritten");
    let second = log.next().await.expect("there is more").expect("readable");
    assert_eq!(second.bytes, "new\n");
    ended.store(true, std::sync::atomic::Ordering::SeqCst);
    assert!(log.next().await.is_none());
}

#[tokio::test]
async fn a_log_whose_beginning_was_given_up_begins_with_a_whole_line() {
    let directory = tempfile::tempdir().expect("a directory");
    let Some(path) = holed(directory.path()) else {
        return;
    };
    let text = all(path.clone(), LogOptions::default()).await;
    let lines: Vec<&str> = text.lines().collect();
    // The line that the hole's end cuts is the 745th of 11 bytes each.
    assert_eq!(
        (lines.first(), lines.last()),
        (Some(&"line 00745"), Some(&"line 01199"))
    );
    assert_eq!(lines.len(), 1_200 - 745);
    let tail = |lines| LogOptions {
        tail: Some(lines),
        ..LogOptions::default()
    };
    assert_eq!(all(path.clone(), tail(1)).await, "line 01199\n");
    assert_eq!(all(path, tail(5_000)).await, text);
}
