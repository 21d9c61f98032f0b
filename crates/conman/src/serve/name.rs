//! A node of a fleet keeps its name until the machine reboots, as long as anything of it may run.
//!
//! Running sessions are recorded under the node's name. A daemon with another name would not find
//! them in its records and would end them all; a daemon that does not start would lose them to
//! other nodes. The default name, the host's, may change while the machine runs, and so may the
//! configuration.

use conman_linux::StateFile;
use serde::{Deserialize, Serialize};

use crate::config::Config;

/// File in the state directory.
const FILE: &str = "node-name.json";

/// The stored name.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct StoredName {
    name: String,
    boot_id: String,
}

/// The name to store once this daemon is known to be the only one with its state directory and
/// its name.
#[must_use]
pub(super) struct Settled {
    file: StateFile,
    known: StoredName,
}

/// Sets the configuration's name to the one that was stored since the machine booted. Without one, returns
/// what to store. Writes nothing.
pub(super) fn settle(config: &mut Config, boot_id: String) -> Option<Settled> {
    let file = StateFile::new(config.state_dir.join(FILE));
    let known = file.read().unwrap_or_else(|error| {
        let path = file.path().display();
        tracing::warn!(%path, %error, "cannot read the node's stored name");
        None
    });
    let Some(StoredName { name, .. }) = known.filter(|known: &StoredName| known.boot_id == boot_id)
    else {
        let name = config.name.clone();
        let known = StoredName { name, boot_id };
        return Some(Settled { file, known });
    };
    if name != config.name {
        tracing::warn!(
            "`node.name`, or the host's name without it, is `{}`, but the node stays `{name}` until \
             the machine reboots, since its running sessions are recorded under that name. If the \
             host's name changes, set `node.name`. To rename the node before a reboot: drain it \
             (`conman drain`), stop conman, remove {}, and start conman",
            config.name,
            file.path().display()
        );
        config.name = name;
    }
    None
}

impl Settled {
    /// On a full disk the file stays as it is.
    pub(super) fn remember(self) {
        if let Err(error) = self.file.write(&self.known) {
            let path = self.file.path().display();
            tracing::warn!(%path, %error, "cannot store the node's name");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// The configuration of a start with this name, from the host or the configuration file.
    fn start(dir: &Path, name: &str) -> Config {
        let mut config = crate::config::tests::accepted("");
        config.state_dir = dir.to_owned();
        config.name = name.to_owned();
        config
    }

    fn named(mut config: Config, boot: &str) -> String {
        if let Some(settled) = settle(&mut config, boot.to_owned()) {
            settled.remember();
        }
        config.name
    }

    #[test]
    fn a_node_keeps_its_name_until_the_machine_boots_though_host_or_configuration_have_another() {
        let dir = tempfile::tempdir().expect("a directory");
        let name = |name, boot| named(start(dir.path(), name), boot);
        assert_eq!(name("a", "1"), "a");
        assert_eq!(name("a.example.org", "1"), "a");
        assert_eq!(name("a", "1"), "a");
        assert_eq!(name("b", "2"), "b");
        assert_eq!(name("a", "2"), "b");
    }

    #[test]
    fn who_does_not_have_the_directory_to_itself_leaves_no_name_there() {
        let dir = tempfile::tempdir().expect("a directory");
        let second = settle(&mut start(dir.path(), "b"), "1".to_owned());
        drop(second);
        assert_eq!(named(start(dir.path(), "a"), "1"), "a");
    }

    #[test]
    fn a_file_that_is_damaged_keeps_nobody_from_starting() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join(FILE), "{\"na").expect("written");
        assert_eq!(named(start(dir.path(), "a"), "1"), "a");
        assert_eq!(named(start(dir.path(), "b"), "1"), "a");
    }
}
