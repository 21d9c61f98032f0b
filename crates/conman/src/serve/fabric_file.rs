//! The latest contents of the fabric's sets, for the next daemon.
//!
//! A daemon replaces the host's rules before it has joined its fleet. Sessions that still run must reach each other
//! meanwhile. Routes and entries need no file: the kernel keeps them.

use std::path::Path;

use conman_core::ownership::FabricRecord;
use conman_linux::StateFile;
use conman_net::FabricElements;
use serde::{Deserialize, Serialize};

/// File in the state directory.
const FILE: &str = "fabric-elements.json";

/// A part takes some hundred bytes, and the usual pool has 4,096.
const MAX_BYTES: u64 = 4 << 20;

#[derive(Debug, Serialize, Deserialize)]
struct Stored {
    fabric: FabricRecord,
    elements: FabricElements,
}

/// The file of this node's fabric. All methods block on the disk.
#[derive(Debug, Clone)]
pub(super) struct FabricFile {
    file: StateFile,
    fabric: FabricRecord,
}

impl FabricFile {
    pub(super) fn new(state_dir: &Path, fabric: FabricRecord) -> Self {
        Self {
            file: StateFile::with_limit(state_dir.join(FILE), MAX_BYTES),
            fabric,
        }
    }

    /// Returns what was written last; nothing if the file cannot be read or is of another fabric.
    pub(super) fn read(&self) -> FabricElements {
        let path = self.file.path().display();
        match self.file.read::<Stored>() {
            Ok(Some(stored)) if stored.fabric == self.fabric => return stored.elements,
            Ok(None) => {}
            Ok(Some(_)) => tracing::warn!(%path, "ignored the stored elements of another fabric"),
            Err(error) => {
                tracing::warn!(%path, %error, "cannot read the fabric's stored elements");
            }
        }
        FabricElements::default()
    }

    /// Replaces the file. Sessions do not outlive the machine, so the file need not either.
    pub(super) fn write(&self, elements: &FabricElements) {
        let stored = Stored {
            fabric: self.fabric.clone(),
            elements: elements.clone(),
        };
        if let Err(error) = self.file.write_unsynced(&stored) {
            let path = self.file.path().display();
            tracing::warn!(%path, %error, "cannot store the fabric's elements");
        }
    }
}

#[cfg(test)]
mod tests {
    use ipnet::IpNet;

    use super::*;

    fn record(part: u8) -> FabricRecord {
        FabricRecord {
            kind: "vxlan 7704 on port 7704".to_owned(),
            pool: vec!["10.96.0.0/12".to_owned()],
            part,
        }
    }

    #[test]
    fn the_next_daemon_begins_with_the_elements_of_the_same_fabric_alone() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = FabricFile::new(dir.path(), record(24));
        assert_eq!(file.read(), FabricElements::default(), "there is no file");
        let networks = ["10.96.1.0/24", "fd00:96::100/120"];
        let networks: [IpNet; 2] = networks.map(|network| network.parse().expect("a network"));
        let elements = FabricElements {
            origins: networks
                .map(|network| ([2, 99, 10, 0, 0, 2], network))
                .into(),
            groups: [("team".to_owned(), networks.into())].into(),
            nodes: [[10, 0, 0, 2].into()].into(),
        };
        file.write(&elements);
        assert_eq!(file.read(), elements);
        let other = FabricFile::new(dir.path(), record(26));
        assert_eq!(other.read(), FabricElements::default());
        std::fs::write(dir.path().join(FILE), "{\"version\":").expect("written");
        assert_eq!(file.read(), FabricElements::default(), "damaged");
    }
}
