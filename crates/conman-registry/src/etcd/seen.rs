//! Whether etcd is still the one of before: its cluster, and that no revision ever falls.
//!
//! A store that was restored from a snapshot has forgotten who owns what, and generations with it.
//! Nodes that have seen a greater revision refuse it until somebody tells them a generation above
//! all that were used. What was seen outlives the daemon in a file. As others' writes may bring such
//! a store past that revision before a node asks it again, the heartbeats' own revisions are watched
//! too: every node rewrites its heartbeat, and a restored one is older than what was read before.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use conman_core::ownership::NodeName;
use serde::{Deserialize, Serialize};

use crate::files;

const FILE: &str = "etcd-seen.json";

/// Beside it once the node was told to be alone, until it joins a fleet again. What was seen is not
/// forgotten: the fleet that it joins then must not be an older one.
const LEFT: &str = "etcd-left";

/// Longest file that is read: it holds two numbers and a flag.
const MAX_FILE_BYTES: u64 = 4_096;

/// What was known when a call was sent; its answer must not be older.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Before {
    revision: i64,
}

impl Before {
    /// 0 before the first answer.
    pub(super) fn revision(self) -> i64 {
        self.revision
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Kept {
    /// 0 before the first answer.
    cluster_id: u64,
    revision: i64,
    /// An older store was met under the same cluster's name: its revision may grow past ours.
    #[serde(default)]
    went_back: bool,
}

/// Whether the node whose state is in this directory has been of a fleet, so that other nodes may
/// have taken over what ran here.
pub fn was_in_fleet(state_dir: &Path) -> io::Result<bool> {
    state_dir.join(FILE).try_exists()
}

/// What says that the node whose state is in this directory is of a fleet, and was not told to be
/// alone since.
pub(crate) fn in_fleet(state_dir: &Path) -> io::Result<Option<PathBuf>> {
    let file = state_dir.join(FILE);
    let is = file.try_exists()? && !state_dir.join(LEFT).try_exists()?;
    Ok(is.then_some(file))
}

/// The node is alone from now on, durably.
pub(crate) fn leave_fleet(state_dir: &Path) -> io::Result<()> {
    let mark = state_dir.join(LEFT);
    files::remove_if_present(&mark)?;
    files::open_options().create_new(true).open(&mark)?;
    files::sync_parent(&mark)
}

#[derive(Debug)]
pub(super) struct Seen {
    file: PathBuf,
    state: Mutex<State>,
    /// One writes at a time.
    keeping: Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    /// Why the latest answer was not trusted.
    refused: Option<String>,
    now: Kept,
    written: Kept,
    /// Nothing is written: whoever knew this store by that would take it, though no session may start
    /// by it yet.
    held_back: bool,
    /// Which revision wrote each node's heartbeat, as far as this daemon has read or written it.
    heartbeats: BTreeMap<NodeName, i64>,
}

impl Seen {
    /// What an earlier daemon saw; nothing of it with `forget`, by which an operator accepts the
    /// store as it is.
    pub(super) fn open(state_dir: &Path, forget: bool) -> io::Result<Self> {
        let file = state_dir.join(FILE);
        let kept = match files::open_options().open(&file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Kept::default(),
            Err(error) => return Err(error),
            Ok(_) if forget => Kept::default(),
            Ok(file) => {
                let mut text = String::new();
                file.take(MAX_FILE_BYTES).read_to_string(&mut text)?;
                serde_json::from_str(&text).map_err(io::Error::other)?
            }
        };
        let state = State {
            refused: None,
            now: kept,
            written: kept,
            held_back: forget,
            heartbeats: BTreeMap::new(),
        };
        Ok(Self {
            file,
            state: Mutex::new(state),
            keeping: Mutex::default(),
        })
    }

    /// Where it is written down what was seen.
    pub(super) fn file(&self) -> &Path {
        &self.file
    }

    pub(super) fn before(&self) -> Before {
        Before {
            revision: self.state().now.revision,
        }
    }

    /// Takes an answer's word for where the store is, or says why it is not to be trusted.
    pub(super) fn check(
        &self,
        before: &Before,
        cluster_id: u64,
        revision: i64,
    ) -> Result<(), String> {
        let mut state = self.state();
        let now = &mut state.now;
        if now.cluster_id != 0 && now.cluster_id != cluster_id {
            let reason = format!(
                "etcd has gone back, or is another one: this is cluster {cluster_id:x}, and this \
                 node's registry was in cluster {:x}; {REMEDY}",
                now.cluster_id
            );
            state.refused = Some(reason.clone());
            return Err(reason);
        }
        let falls = revision < before.revision;
        now.went_back |= falls;
        if now.went_back {
            let reason = match falls {
                true => gone_back("revision", before.revision, revision),
                // It has grown past that since.
                false => format!(
                    "etcd has gone back earlier, as after the restoration of a snapshot, and may \
                     not know who owns what; {REMEDY}"
                ),
            };
            state.refused = Some(reason.clone());
            return Err(reason);
        }
        now.cluster_id = cluster_id;
        now.revision = now.revision.max(revision);
        state.refused = None;
        Ok(())
    }

    /// Which revision wrote a node's heartbeat, as far as is known; an answer to a request that is
    /// sent from now on must not know an earlier one.
    pub(super) fn heartbeat(&self, node: &NodeName) -> i64 {
        self.state().heartbeats.get(node).copied().unwrap_or(0)
    }

    /// Takes an answer's word for which revision wrote a node's heartbeat, or says why the store is
    /// not to be trusted. `before` is what was known when the request was sent.
    pub(super) fn check_heartbeat(
        &self,
        node: &NodeName,
        before: i64,
        revision: i64,
    ) -> Result<(), String> {
        let mut state = self.state();
        if revision < before {
            state.now.went_back = true;
            let what = format!("the heartbeat of node `{node}` at revision");
            let reason = gone_back(&what, before, revision);
            state.refused = Some(reason.clone());
            return Err(reason);
        }
        match state.heartbeats.get_mut(node) {
            Some(known) => *known = revision.max(*known),
            None => {
                state.heartbeats.insert(node.clone(), revision);
            }
        }
        Ok(())
    }

    /// Why the store that answers is not the one of before, if it is not.
    pub(super) fn went_back(&self) -> Option<String> {
        self.state().refused.clone()
    }

    /// The generations are above all that were used: this store may be written down.
    pub(super) fn may_be_kept(&self) {
        self.state().held_back = false;
    }

    /// Whether what is written down, though older, tells this store from one that is restored later
    /// to what was before it.
    pub(super) fn is_known(&self) -> bool {
        let State { now, written, .. } = *self.state();
        written.cluster_id != 0
            && (written.cluster_id, written.went_back) == (now.cluster_id, now.went_back)
    }

    /// Writes down what was seen since, durably. Blocks on the disk.
    pub(super) fn keep(&self) -> io::Result<()> {
        let _turn = self.keeping.lock().unwrap_or_else(PoisonError::into_inner);
        let (now, written, held_back) = {
            let state = self.state();
            (state.now, state.written, state.held_back)
        };
        if now == written || held_back {
            return Ok(());
        }
        // It is of a fleet again.
        files::remove_if_present(&self.file.with_file_name(LEFT))?;
        let text = serde_json::to_vec(&now).map_err(io::Error::other)?;
        let new = files::with_suffix(&self.file, ".new");
        files::remove_if_present(&new)?;
        let mut file = files::open_options().create_new(true).open(&new)?;
        file.write_all(&text)?;
        file.sync_all()?;
        fs::rename(&new, &self.file)?;
        files::sync_parent(&self.file)?;
        self.state().written = now;
        Ok(())
    }

    /// A panic while the lock is held cannot leave half a change.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn gone_back(what: &str, from: i64, to: i64) -> String {
    format!(
        "etcd has gone back from {what} {from} to {to}, as after the restoration of a snapshot, and \
         may not know who owns what; {REMEDY}"
    )
}

const REMEDY: &str = "stop every conman of the fleet, see that etcd is the right one, and start each \
                      once with --generation-floor N above every generation ever used";

#[cfg(test)]
mod tests {
    use super::*;

    fn dir() -> tempfile::TempDir {
        tempfile::tempdir().expect("a directory")
    }

    fn open(dir: &tempfile::TempDir) -> Seen {
        Seen::open(dir.path(), false).expect("opened")
    }

    #[test]
    fn answers_that_overtake_each_other_are_no_sign_of_an_older_store() {
        let dir = dir();
        let seen = open(&dir);
        let first = seen.before();
        seen.check(&first, 7, 20).expect("the later one's answer");
        seen.check(&first, 7, 10)
            .expect("sent before 20 was seen: no older than what was known then");
        let later = seen.before();
        seen.check(&later, 7, 20).expect("no older");
    }

    #[test]
    fn a_store_that_went_back_is_refused_even_once_it_has_grown_past_and_by_the_next_daemon() {
        let dir = dir();
        assert!(!was_in_fleet(dir.path()).expect("looked"));
        let seen = open(&dir);
        seen.check(&seen.before(), 7, 20).expect("the first");
        seen.keep().expect("kept");
        assert!(was_in_fleet(dir.path()).expect("looked"));
        let seen = open(&dir);
        let refusal = seen.check(&seen.before(), 7, 19).expect_err("older");
        assert!(refusal.contains("--generation-floor"), "{refusal}");
        seen.check(&seen.before(), 7, 25).expect_err("it has grown");
        seen.keep().expect("kept");
        let seen = open(&dir);
        seen.check(&seen.before(), 7, 26).expect_err("remembered");
        let seen = Seen::open(dir.path(), true).expect("opened");
        seen.check(&seen.before(), 8, 1).expect("accepted");
    }

    #[test]
    fn a_store_that_grew_past_what_was_seen_is_betrayed_by_an_older_heartbeat() {
        let dir = dir();
        let (seen, node) = (open(&dir), NodeName::from("n1"));
        seen.check(&seen.before(), 7, 20).expect("the first");
        let first = seen.heartbeat(&node);
        seen.check_heartbeat(&node, first, 20).expect("as written");
        seen.check_heartbeat(&node, first, 18)
            .expect("asked before that was known");
        seen.check(&seen.before(), 7, 30).expect("it has grown");
        let refusal = seen.check_heartbeat(&node, seen.heartbeat(&node), 15);
        let refusal = refusal.expect_err("older than what was written");
        assert!(refusal.contains("--generation-floor"), "{refusal}");
        seen.check(&seen.before(), 7, 31).expect_err("remembered");
        seen.keep().expect("kept");
        let seen = open(&dir);
        seen.check(&seen.before(), 7, 32)
            .expect_err("by the next daemon too");
    }

    #[test]
    fn a_node_that_left_its_fleet_takes_no_older_one_later() {
        let dir = dir();
        let is_of_one = || in_fleet(dir.path()).expect("looked").is_some();
        let seen = open(&dir);
        seen.check(&seen.before(), 7, 20).expect("the first");
        seen.keep().expect("kept");
        assert!(is_of_one());
        leave_fleet(dir.path()).expect("left");
        assert!(!is_of_one() && was_in_fleet(dir.path()).expect("looked"));
        let seen = open(&dir);
        seen.check(&seen.before(), 7, 19).expect_err("older");
        let seen = Seen::open(dir.path(), true).expect("opened");
        seen.check(&seen.before(), 8, 1).expect("accepted");
        seen.may_be_kept();
        seen.keep().expect("kept");
        assert!(is_of_one());
    }

    #[test]
    fn a_store_that_is_accepted_is_not_known_to_later_daemons_before_its_generations_are_raised() {
        let dir = dir();
        let seen = open(&dir);
        assert!(!seen.is_known());
        seen.check(&seen.before(), 7, 20).expect("the first");
        assert!(!seen.is_known());
        seen.keep().expect("kept");
        assert!(open(&dir).is_known());
        let accepting = Seen::open(dir.path(), true).expect("opened");
        accepting
            .check(&accepting.before(), 8, 1)
            .expect("accepted");
        accepting.keep().expect("held back");
        assert!(!accepting.is_known());
        let seen = open(&dir);
        seen.check(&seen.before(), 8, 2).expect_err("another one");
        accepting.may_be_kept();
        accepting.keep().expect("kept");
        assert!(accepting.is_known());
        let seen = open(&dir);
        seen.check(&seen.before(), 8, 2).expect("the accepted one");
    }

    #[test]
    fn another_cluster_is_refused_and_the_right_one_serves_again() {
        let dir = dir();
        let seen = open(&dir);
        seen.check(&seen.before(), 7, 20).expect("the first");
        seen.check(&seen.before(), 8, 30).expect_err("another one");
        seen.check(&seen.before(), 7, 21).expect("the first again");
    }
}
