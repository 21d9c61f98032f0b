//! Whom a drain has told to go, in a file: what obeys while no daemon looks has not ended by itself.
//!
//! Lines of JSON, each written before its signal is sent. A line that was cut by the daemon's death
//! is passed over: nothing was sent yet. Nothing is synced, since a machine that goes down has lost
//! its sessions anyway.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use conman_runtime::ContainerKey;
use serde::{Deserialize, Serialize};

/// Longest file that is read, of lines of some hundred bytes.
const MAX_BYTES: u64 = 64 << 20;

#[derive(Debug, Serialize, Deserialize)]
struct Line {
    session: conman_proto::SessionId,
    generation: conman_proto::Generation,
    why: String,
}

#[derive(Debug, Clone)]
pub(crate) struct Told {
    file: PathBuf,
}

impl Told {
    pub(crate) fn new(state_dir: &Path) -> Self {
        Self {
            file: state_dir.join("drain-told.jsonl"),
        }
    }

    /// It is about to be told to go. Blocks on the disk.
    pub(crate) fn note(&self, key: &ContainerKey, why: &str) -> io::Result<()> {
        let line = Line {
            session: key.session.clone(),
            generation: key.generation,
            why: why.to_owned(),
        };
        let text = serde_json::to_string(&line).map_err(io::Error::other)?;
        let mut file = File::options()
            .append(true)
            .create(true)
            .mode(0o600)
            .open(&self.file)?;
        // Its own line, even after one that was cut.
        file.write_all(format!("\n{text}\n").as_bytes())
    }

    /// Everybody who was told, and why. Blocks on the disk.
    pub(crate) fn read(&self) -> io::Result<HashMap<ContainerKey, String>> {
        let file = match File::open(&self.file) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(HashMap::new()),
            file => file?,
        };
        let mut text = Vec::new();
        file.take(MAX_BYTES).read_to_end(&mut text)?;
        let lines = text.split(|byte| *byte == b'\n');
        Ok(lines
            .filter_map(|line| serde_json::from_slice::<Line>(line).ok())
            .map(|line| {
                let key = ContainerKey {
                    session: line.session,
                    generation: line.generation,
                };
                (key, line.why)
            })
            .collect())
    }

    /// Once everybody who was told is known to have ended.
    pub(crate) fn clear(&self) -> io::Result<()> {
        match fs::remove_file(&self.file) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_was_cut_costs_only_itself() {
        let dir = tempfile::tempdir().expect("a directory");
        let told = Told::new(dir.path());
        assert!(told.read().expect("none yet").is_empty());
        let key = |id: &str| ContainerKey {
            session: id.parse().expect("an id"),
            generation: conman_proto::Generation::FIRST,
        };
        told.note(&key("ann"), "drained: new kernel")
            .expect("noted");
        let whole = fs::read(&told.file).expect("read");
        let cut = &whole[..whole.len() - 5];
        fs::write(&told.file, [&whole[..], cut].concat()).expect("cut");
        told.note(&key("ben"), "drained: new kernel")
            .expect("noted");
        let all = told.read().expect("read");
        assert_eq!(all.len(), 2, "{all:?}");
        assert_eq!(all[&key("ben")], "drained: new kernel");
        told.clear().expect("cleared");
        assert!(told.read().expect("none").is_empty());
    }
}
