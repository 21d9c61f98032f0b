//! Logs: bounded while they are written, and read by whoever may.

use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt};
use std::path::Path;

use conman_linux::PidFd;

use crate::support::{SOON, Shim, available, until, wait_dead};

const BOUND: u64 = 256 * 1_024;

/// Writes numbered lines as fast as it can.
const FLOOD: &str = "i=0; while :; do echo line $i of a long story; i=$((i+1)); done";

fn size(path: &Path) -> (u64, u64) {
    let data = std::fs::metadata(path).expect("it exists");
    (data.len(), data.blocks() * 512)
}

#[test]
fn a_log_stays_bounded_is_followed_and_outlives_the_shim() {
    if !available() {
        return;
    }
    let mut shim = Shim::start();
    let mut client = shim.client();
    let mut spec = shim.spec("loud.1", FLOOD);
    spec.log_bytes = Some(BOUND);
    let launched = client.launch(spec).expect("launched");
    let path = shim.path("logs/loud.1");
    let mut reader = Reader {
        file: File::open(&path).expect("opened"),
        offset: 0,
        mid_line: false,
    };
    let mut lines = Lines::default();
    let many = |path: &Path| {
        let (length, taken) = size(path);
        length > 4 * BOUND && taken <= BOUND
    };
    assert!(until(|| {
        lines.take(&mut reader);
        many(&path)
    }));
    // Killed in mid-story, and another one in its place bounds it further.
    shim.succeed();
    let mut client = shim.client();
    let (before, _) = size(&path);
    assert!(until(|| {
        lines.take(&mut reader);
        let (length, taken) = size(&path);
        length > before + 2 * BOUND && taken <= BOUND
    }));
    client.kill_all().expect("killed");
    wait_dead(&launched);
    assert!(until(|| size(&path).1 <= BOUND));
    while lines.take(&mut reader) {}
    assert!(lines.seen > 1_000, "{}", lines.seen);
}

/// Reads a log on from where it was last read.
struct Reader {
    file: File,
    offset: u64,
    /// The beginning of the present line was removed.
    mid_line: bool,
}

impl Reader {
    /// The next bytes, and whether some before them were removed; `None` at the end. Removed bytes are
    /// zeros.
    fn next(&mut self) -> Option<(bool, Vec<u8>)> {
        let mut bytes = vec![0; 64 << 10];
        let read = self.file.read_at(&mut bytes, self.offset).expect("read");
        bytes.truncate(read);
        self.offset += read as u64;
        let removed = bytes.iter().rposition(|byte| *byte == 0);
        if let Some(last) = removed {
            bytes.drain(..=last);
            self.mid_line = true;
        }
        if self.mid_line {
            let line = bytes.iter().position(|byte| *byte == b'\n');
            bytes.drain(..line.map_or(bytes.len(), |end| end + 1));
            self.mid_line = line.is_none();
        }
        (read > 0).then_some((removed.is_some(), bytes))
    }
}

/// Checks that lines are whole, and in order.
#[derive(Default)]
struct Lines {
    unfinished: String,
    last: Option<u64>,
    seen: u64,
}

impl Lines {
    /// `false` at the end.
    fn take(&mut self, reader: &mut Reader) -> bool {
        let Some((removed, bytes)) = reader.next() else {
            return false;
        };
        if removed {
            self.unfinished.clear();
        }
        self.unfinished
            .push_str(&String::from_utf8(bytes).expect("text"));
        while let Some(end) = self.unfinished.find('\n') {
            let line: String = self.unfinished.drain(..=end).collect();
            let words: Vec<&str> = line.split_ascii_whitespace().collect();
            assert_eq!(words.len(), 6, "{line:?} after {:?}", self.last);
            let number = words[1].parse().expect("a number");
            assert!(self.last.is_none_or(|last| last < number), "{line:?}");
            self.last = Some(number);
            self.seen += 1;
        }
        true
    }
}

#[test]
fn a_killed_sweeper_is_followed_by_another_that_knows_every_log() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    let script = format!("while [ ! -e /tmp/go ]; do sleep 0.05; done; {FLOOD}");
    let mut spec = shim.spec("loud.1", &script);
    spec.log_bytes = Some(BOUND);
    let launched = client.launch(spec).expect("launched");
    let pid = shim.process.id();
    let children = || -> Vec<i32> {
        let text = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        let text = text.expect("it lives");
        text.split_ascii_whitespace()
            .filter_map(|word| word.parse().ok())
            .filter(|child| *child != launched.pid)
            .collect()
    };
    let before = children();
    assert_eq!(before.len(), 2, "launcher and sweeper: {before:?}");
    for helper in &before {
        let helper = PidFd::open(*helper).expect("held");
        helper.kill().expect("killed");
        assert!(helper.wait_dead(SOON).expect("waited"));
    }
    assert!(until(|| {
        let now = children();
        now.len() == 2 && now.iter().all(|pid| !before.contains(pid))
    }));
    let path = shim.path("logs/loud.1");
    // Through the container's own root, since its layer is in use.
    let root = format!("/proc/{}/root/tmp/go", launched.pid);
    std::fs::write(root, "").expect("told");
    assert!(until(|| {
        let (length, taken) = size(&path);
        length > 2 * BOUND && taken <= BOUND
    }));
    client.kill_all().expect("killed");
    wait_dead(&launched);
}
