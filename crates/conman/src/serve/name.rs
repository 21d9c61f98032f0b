//! A node of a fleet keeps its name for as long as something of it may run: until the machine boots
//! anew.
//!
//! What runs here is recorded as that node's. Under another name a daemon would find none of it in
//! its records and end all, and the host's name, which is the default, may change under a running
//! machine.

use std::fs;
use std::io::{self, ErrorKind, Read as _};
use std::path::Path;

use anyhow::{Result, bail};
use conman_linux::replace_file;
use serde::{Deserialize, Serialize};

use crate::config::Config;

/// File in the state directory.
const FILE: &str = "node-name.json";

/// Longest file that is read: two short names.
const MAX_FILE_BYTES: u64 = 4_096;

/// What is written down. What a newer conman adds is passed over.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Known {
    name: String,
    boot_id: String,
}

/// Has the configuration name the node that this installation is, and remembers it.
///
/// # Errors
/// When the configuration names another one.
pub(super) fn keep(config: &mut Config) -> Result<()> {
    let Ok(boot_id) = conman_linux::boot_id() else {
        return Ok(());
    };
    keep_since(config, boot_id)
}

fn keep_since(config: &mut Config, boot_id: String) -> Result<()> {
    let path = config.state_dir.join(FILE);
    let known = read(&path).unwrap_or_else(|error| {
        let path = path.display();
        tracing::warn!(%path, %error, "cannot read which node this installation was");
        None
    });
    let known = known.filter(|known| known.boot_id == boot_id);
    match known {
        Some(Known { name, .. }) if name == config.name => return Ok(()),
        Some(Known { name, .. }) if config.name_is_given => bail!(
            "this installation has been node `{name}` since the machine was started, and is to be \
             node `{}` now: all that runs here is recorded as that of `{name}`, and would be killed. \
             Set `node.name = \"{name}\"`; or drain the node under that name (`conman drain`), stop \
             conman, remove {}, and start it again",
            config.name,
            path.display()
        ),
        Some(Known { name, .. }) => {
            tracing::warn!(
                "this machine is called `{}` by now; the node stays `{name}`, as whose all that runs \
                 here is recorded, until the machine boots anew; `node.name` gives it a name that \
                 does not change",
                config.name
            );
            config.name = name;
            return Ok(());
        }
        None => {}
    }
    let known = Known {
        name: config.name.clone(),
        boot_id,
    };
    // On a full disk a node is no worse off than without.
    if let Err(error) = write(&path, &known) {
        let path = path.display();
        tracing::warn!(%path, %error, "cannot write down which node this installation is");
    }
    Ok(())
}

fn read(path: &Path) -> io::Result<Option<Known>> {
    let file = match fs::File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES).read_to_end(&mut bytes)?;
    Ok(Some(serde_json::from_slice(&bytes)?))
}

fn write(path: &Path, known: &Known) -> io::Result<()> {
    replace_file(path, &serde_json::to_vec(known)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The configuration of a start under this name, which is the host's or the configuration's.
    fn start(dir: &Path, name: &str, given: bool) -> Config {
        let mut config = crate::config::tests::accepted("");
        config.state_dir = dir.to_owned();
        config.name = name.to_owned();
        config.name_is_given = given;
        config
    }

    fn named(mut config: Config, boot: &str) -> Result<String> {
        keep_since(&mut config, boot.to_owned())?;
        Ok(config.name)
    }

    #[test]
    fn a_host_that_is_renamed_leaves_its_node_the_name_until_it_boots() {
        let dir = tempfile::tempdir().expect("a directory");
        let by_host = |name, boot| named(start(dir.path(), name, false), boot).expect("kept");
        assert_eq!(by_host("a", "1"), "a");
        assert_eq!(by_host("a.example.org", "1"), "a");
        assert_eq!(by_host("a", "1"), "a");
        assert_eq!(by_host("b", "2"), "b");
        assert_eq!(by_host("a", "2"), "b");
    }

    #[test]
    fn a_name_that_the_configuration_changes_under_what_runs_is_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let given = |name, boot| named(start(dir.path(), name, true), boot);
        assert_eq!(given("a", "1").expect("new"), "a");
        let why = given("b", "1").expect_err("a's sessions run").to_string();
        for part in ["node `a`", "`node.name = \"a\"`", "conman drain", FILE] {
            assert!(why.contains(part), "{part}: {why}");
        }
        assert_eq!(given("a", "1").expect("the same"), "a");
        assert_eq!(given("b", "2").expect("nothing of it runs"), "b");
    }

    #[test]
    fn a_file_that_is_damaged_keeps_nobody_from_starting() {
        let dir = tempfile::tempdir().expect("a directory");
        fs::write(dir.path().join(FILE), "{\"na").expect("written");
        let name = named(start(dir.path(), "a", true), "1").expect("started");
        assert_eq!(name, "a");
        let later = named(start(dir.path(), "b", false), "1").expect("started");
        assert_eq!(later, "a");
    }
}
