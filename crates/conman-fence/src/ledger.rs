//! What a later shim must know, in a file on an in-memory file system.
//!
//! A journal of lines of JSON: each names a container with all its data, or says that it is forgotten;
//! the last line of a name counts. A line is written before the shim relies on it. When most lines are
//! stale the file is rewritten and renamed into place. A line that was cut by the writer's death is
//! ignored. For an older shim an unknown kind of line counts as damage: it begins closed if anything
//! lives.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use conman_shim_protocol::VERSION;
use serde::{Deserialize, Serialize};

use crate::containers::Container;
use crate::fence::KeptFence;
use crate::forbidden_starts::ForbiddenStarts;
use crate::launching::StartRemains;

/// Largest file that is read: four times what 16,384 containers with long names take.
const MAX_BYTES: u64 = 64 << 20;

/// Stale lines that are tolerated, in addition to the number of names in use.
const SLACK: usize = 4_096;

/// Filesystems in memory, by their magic numbers: tmpfs and ramfs.
const IN_MEMORY: [i64; 2] = [0x0102_1994, 0x8584_58f6];

/// One line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Record<Name, Whole> {
    /// The first line.
    Head { version: u32, boot_id: String },
    /// All data of a container or command.
    Put { name: Name, container: Whole },
    /// A container or command is forgotten.
    Drop { name: Name },
    /// What a start may have left, to be removed.
    Sweep {
        ticket: u64,
        #[serde(flatten)]
        left: StartRemains,
    },
    /// The launcher, which may outlive its shim for a moment.
    Launcher { pid: i32, start_ticks: u64 },
    /// It is removed.
    Swept { ticket: u64 },
    /// Forbidden before its start was ordered.
    #[serde(rename = "condemned")]
    StartForbidden { name: Name },
    /// The fence's state; `None` when it is unarmed.
    Fence { state: Option<KeptFence> },
}

/// A line as it is read.
pub(crate) type Line = Record<String, Container>;

/// A line as it is written.
pub(crate) type LineRef<'a> = Record<&'a str, &'a Container>;

/// The combined content of the lines.
#[derive(Debug, Default)]
pub(crate) struct RecordedState {
    pub(crate) containers: BTreeMap<String, Container>,
    pub(crate) launcher: Option<(i32, u64)>,
    pub(crate) sweeps: BTreeMap<u64, StartRemains>,
    pub(crate) condemned: ForbiddenStarts,
    pub(crate) fence: Option<KeptFence>,
}

impl RecordedState {
    pub(crate) fn take(&mut self, line: Line) {
        match line {
            Record::Head { .. } => {}
            Record::Put { name, container } => {
                self.containers.insert(name, container);
            }
            Record::Drop { name } => {
                self.containers.remove(&name);
            }
            Record::Sweep { ticket, left } => {
                self.sweeps.insert(ticket, left);
            }
            Record::Launcher { pid, start_ticks } => self.launcher = Some((pid, start_ticks)),
            Record::Swept { ticket } => {
                self.sweeps.remove(&ticket);
            }
            Record::StartForbidden { name } => {
                self.condemned.add(name);
            }
            Record::Fence { state } => self.fence = state,
        }
    }
}

/// The file.
#[derive(Debug)]
pub(crate) struct Ledger {
    path: PathBuf,
    /// `None` until this program has written it: an earlier one's content stays until then.
    file: Option<File>,
    lines: usize,
    /// The last line may be cut: the next one begins with a newline.
    torn: bool,
    /// A line was cut, so that the file must be rewritten as soon as there is space.
    spoiled: bool,
}

impl Ledger {
    /// Reads the state of an earlier shim of this boot, and why it may be incomplete. Returns nothing where
    /// there was none, or one of another version, which are reasons for doubt, too, when containers live.
    pub(crate) fn read(path: &Path, boot_id: &str) -> (RecordedState, Option<String>) {
        let doubt = |reason: &str| {
            (
                RecordedState::default(),
                Some(format!("{} {reason}", path.display())),
            )
        };
        let mut text = Vec::new();
        let read =
            File::open(path).and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut text));
        match read {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return doubt("is missing");
            }
            Err(error) => return doubt(&format!("cannot be read: {error}")),
            Ok(_) if text.len() as u64 > MAX_BYTES => {
                return doubt("is larger than any that a shim writes");
            }
            Ok(_) => {}
        }
        let (kept, reason) = parse(&text, boot_id);
        let reason = reason.map(|reason| format!("{} {reason}", path.display()));
        (kept, reason)
    }

    /// A ledger that must be written before lines can be added.
    pub(crate) fn at(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            file: None,
            lines: 0,
            torn: false,
            spoiled: false,
        }
    }

    /// Rewrites the file.
    pub(crate) fn rewrite<'a>(
        &mut self,
        boot_id: &str,
        lines: impl Iterator<Item = LineRef<'a>>,
    ) -> io::Result<()> {
        let fresh = self.path.with_extension("new");
        let mut bytes = Vec::new();
        let head: LineRef<'_> = Record::Head {
            version: VERSION,
            boot_id: boot_id.to_owned(),
        };
        let mut count = 0;
        for line in std::iter::once(head).chain(lines) {
            write_line(&mut bytes, &line)?;
            count += 1;
        }
        match std::fs::remove_file(&fresh) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = File::options()
            .append(true)
            .create_new(true)
            .mode(0o600)
            .open(&fresh)?;
        if !is_in_memory(&file) {
            tracing::warn!(
                path = %self.path.display(),
                "the shim's state is on a disk, which may delay the fence; put it below /run"
            );
        }
        file.write_all(&bytes)?;
        std::fs::rename(&fresh, &self.path)?;
        self.file = Some(file);
        self.lines = count;
        self.torn = false;
        self.spoiled = false;
        Ok(())
    }

    /// Appends a line.
    pub(crate) fn append(&mut self, line: &LineRef<'_>) -> io::Result<()> {
        // A line from before the first rewrite is written with it.
        let Some(file) = self.file.as_mut() else {
            return Ok(());
        };
        let mut bytes = Vec::new();
        if self.torn {
            self.spoiled = true;
            bytes.push(b'\n');
        }
        write_line(&mut bytes, line)?;
        // Until the line is known to be complete.
        self.torn = true;
        file.write_all(&bytes)?;
        self.torn = false;
        self.lines += 1;
        Ok(())
    }

    /// Whether it should be rewritten, given the number of names in use.
    pub(crate) fn is_overgrown(&self, names: usize) -> bool {
        self.spoiled || self.lines > 2 * names + SLACK
    }
}

fn write_line(bytes: &mut Vec<u8>, line: &LineRef<'_>) -> io::Result<()> {
    serde_json::to_writer(&mut *bytes, line).map_err(io::Error::other)?;
    bytes.push(b'\n');
    Ok(())
}

/// Returns the content, and why it may be incomplete.
fn parse(text: &[u8], boot_id: &str) -> (RecordedState, Option<&'static str>) {
    let mut lines = text.split(|byte| *byte == b'\n');
    let head = lines.next().unwrap_or_default();
    match serde_json::from_slice::<Line>(head) {
        Ok(Record::Head { version, .. }) if version != VERSION => {
            // It is safer to freeze everything than to leave it unwatched.
            return (
                RecordedState::default(),
                Some("is of another version of conman"),
            );
        }
        // Nothing of an earlier boot is alive.
        Ok(Record::Head { boot_id: of, .. }) if of != boot_id => {
            return (RecordedState::default(), Some("is of an earlier boot"));
        }
        Ok(Record::Head { .. }) => {}
        _ => {
            return (
                RecordedState::default(),
                Some("does not begin as a shim writes it"),
            );
        }
    }
    let mut kept = RecordedState::default();
    // Only the last line may be cut: the shim did not rely on it yet.
    let (mut unreadable, mut doubtful) = (false, false);
    for line in lines.filter(|line| !line.is_empty()) {
        doubtful |= unreadable;
        match serde_json::from_slice(line) {
            Ok(line) => kept.take(line),
            Err(error) => {
                tracing::warn!(%error, "cannot parse a line of the shim's state");
                unreadable = true;
            }
        }
    }
    doubtful |= unreadable && text.last() == Some(&b'\n');
    (kept, doubtful.then_some("has lines that no shim wrote"))
}

fn is_in_memory(file: &File) -> bool {
    #[allow(clippy::unnecessary_cast, reason = "its width differs between targets")]
    rustix::fs::fstatfs(file).is_ok_and(|stat| IN_MEMORY.contains(&(stat.f_type as i64)))
}

#[cfg(test)]
mod tests {
    use conman_shim_protocol::ContainerState;
    use proptest::prelude::*;

    use super::*;

    fn container(pid: i32) -> Container {
        Container::starting("/conman-x/a", Some(0x4000_0000), None, None).begun(pid, 7)
    }

    fn written(path: &Path) -> Ledger {
        let one = container(1);
        let line = Record::Put {
            name: "a",
            container: &one,
        };
        let mut ledger = Ledger::at(path);
        ledger
            .rewrite("boot", std::iter::once(line))
            .expect("written");
        ledger
    }

    #[test]
    fn the_last_line_of_a_name_counts() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("state");
        let mut ledger = written(&path);
        let (one, mut two) = (container(1), container(2));
        two.state = ContainerState::Exited { code: 3 };
        for (name, container) in [("b", &one), ("b", &two), ("c", &one)] {
            let line = Record::Put { name, container };
            ledger.append(&line).expect("written");
        }
        ledger.append(&Record::Drop { name: "c" }).expect("written");
        let kept = Ledger::read(&path, "boot").0;
        let names: Vec<_> = kept.containers.keys().map(String::as_str).collect();
        assert_eq!(names, ["a", "b"]);
        assert_eq!(
            kept.containers["b"].state,
            ContainerState::Exited { code: 3 }
        );
        assert_eq!(kept.containers["a"].start_ticks, 7);
    }

    #[test]
    fn a_cut_line_costs_only_itself_and_another_boot_everything() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("state");
        let mut ledger = written(&path);
        std::fs::OpenOptions::new()
            .append(true)
            .open(&path)
            .and_then(|mut file| file.write_all(b"{\"put\":{\"name\":\"x"))
            .expect("cut");
        ledger.torn = true;
        let one = container(1);
        let line = Record::Put {
            name: "b",
            container: &one,
        };
        ledger.append(&line).expect("written");
        let kept = Ledger::read(&path, "boot").0;
        assert_eq!(kept.containers.len(), 2);
        let kept = Ledger::read(&path, "another").0;
        assert!(kept.containers.is_empty());
    }

    #[test]
    fn what_may_not_be_all_is_told_and_a_last_line_that_was_cut_is_none_of_that() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("state");
        let doubt = || Ledger::read(&path, "boot").1;
        assert!(doubt().expect("missing").contains("is missing"));
        let mut ledger = written(&path);
        assert_eq!(doubt(), None);
        let whole = std::fs::read(&path).expect("read");
        let with = |tail: &[u8]| {
            std::fs::write(&path, [&whole[..], tail].concat()).expect("written");
            doubt()
        };
        assert_eq!(with(b"{\"put\":{\"name\":\"x"), None);
        assert!(with(b"{\"put\":{\"name\":\"x\n").is_some());
        assert!(with(b"\0\0\0\n{\"drop\":{\"name\":\"x\"}}\n").is_some());
        std::fs::write(&path, &whole[1..]).expect("written");
        assert!(doubt().expect("no beginning").contains("does not begin"));
        // One that was cut by a failure, not by a death, does not stay.
        ledger.torn = true;
        ledger.append(&Record::Drop { name: "c" }).expect("written");
        assert!(ledger.is_overgrown(1));
    }

    #[test]
    fn fields_of_a_later_shim_are_ignored() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("state");
        written(&path);
        let (before, _) = Ledger::read(&path, "boot");
        let text = std::fs::read_to_string(&path).expect("read");
        let later = |line: &str| {
            let mut line: serde_json::Value = serde_json::from_str(line).expect("JSON");
            for kind in ["head", "put"] {
                if let Some(content) = line.get_mut(kind) {
                    content["later"] = true.into();
                }
            }
            if line.get("put").is_some() {
                line["put"]["container"]["later"] = true.into();
            }
            format!("{line}\n")
        };
        let text: String = text.lines().map(later).collect();
        std::fs::write(&path, text).expect("written");
        let (kept, doubt) = Ledger::read(&path, "boot");
        assert_eq!(doubt, None);
        let shown = |kept: &RecordedState| format!("{:?}", kept.containers);
        assert_eq!(shown(&kept), shown(&before));
    }

    #[test]
    fn another_form_is_a_reason_for_doubt() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("state");
        std::fs::write(&path, "{\"head\":{\"version\":1,\"boot_id\":\"boot\"}}\n")
            .expect("written");
        let doubt = Ledger::read(&path, "boot").1.expect("too old");
        assert!(doubt.contains("another version"), "{doubt}");
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..500)) {
            let _ = parse(&bytes, "boot");
            let head = format!("{{\"head\":{{\"version\":{VERSION},\"boot_id\":\"boot\"}}}}\n");
            let mut text = head.into_bytes();
            text.extend(bytes);
            let _ = parse(&text, "boot");
        }
    }
}
