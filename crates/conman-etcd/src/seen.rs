//! Checks that etcd is still the same store: the same cluster, and revisions that never fall.
//!
//! A store restored from a snapshot has lost ownership and generations. A node that has seen a
//! greater revision refuses it until an operator gives a generation above all used ones. The
//! observed state survives the daemon in a file. Other nodes' writes may raise a restored store
//! above that revision before a node reads it again, so the heartbeats' revisions are checked too:
//! every node rewrites its heartbeat, and a restored one is older than what was read before. A node
//! remembers its last heartbeat in the file: while every daemon is stopped, other writes may raise a
//! restored store above any revision, but not this node's heartbeat.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use conman_core::ownership::NodeName;
use conman_linux::StateFile;
use serde::{Deserialize, Serialize};

use conman_registry::fleet_mark;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
struct StoredMark {
    /// 0 before the first answer.
    cluster_id: u64,
    revision: i64,
    /// An older store of the same cluster was seen: its revision may grow past ours.
    went_back: bool,
    /// The revision and the incarnation of this node's latest heartbeat; 0 before the first.
    #[serde(default)]
    heartbeat: i64,
    #[serde(default)]
    incarnation: u64,
}

#[derive(Debug)]
pub(super) struct Seen {
    file: StateFile,
    state: Mutex<SeenState>,
    /// Serializes writes of the file.
    keeping: Mutex<()>,
}

#[derive(Debug, Default)]
struct SeenState {
    /// Why the latest answer was not trusted.
    refused: Option<String>,
    now: StoredMark,
    written: StoredMark,
    /// Do not write the file yet: a later daemon would trust this store by it, although the floor
    /// is not raised yet.
    held_back: bool,
    /// The revision that wrote each node's heartbeat, as far as this daemon has read or written it.
    heartbeats: BTreeMap<NodeName, i64>,
}

impl SeenState {
    /// Notes why the store is refused, and logs it once.
    fn refuse(&mut self, reason: String) -> String {
        if self.refused.is_none() {
            tracing::warn!(reason, "refused the registry");
        }
        self.refused = Some(reason.clone());
        reason
    }
}

impl Seen {
    /// Loads what an earlier daemon observed. With `forget` it is dropped: an operator accepts the
    /// store as it is.
    pub(super) fn open(state_dir: &Path, forget: bool) -> io::Result<Self> {
        let file = StateFile::new(state_dir.join(fleet_mark::SEEN));
        let kept = match forget {
            true => StoredMark::default(),
            false => file.read()?.unwrap_or_default(),
        };
        let state = SeenState {
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

    /// Path of the file with the observed state.
    pub(super) fn file(&self) -> &Path {
        self.file.path()
    }

    /// The latest revision, 0 before the first answer. The answer to a call that is sent after this
    /// must not be older.
    pub(super) fn revision(&self) -> i64 {
        self.state().now.revision
    }

    /// Accepts an answer's revision and cluster, or returns why it is not trusted. `before` is the
    /// latest revision when the call was sent.
    pub(super) fn check(&self, before: i64, cluster_id: u64, revision: i64) -> Result<(), String> {
        let mut state = self.state();
        let now = &mut state.now;
        if now.cluster_id != 0 && now.cluster_id != cluster_id {
            let reason = format!(
                "etcd has gone back, or is another one: this is cluster {cluster_id:x}, and this \
                 node's registry was in cluster {:x}; {REMEDY}",
                now.cluster_id
            );
            return Err(state.refuse(reason));
        }
        let falls = revision < before;
        now.went_back |= falls;
        if now.went_back {
            let reason = match falls {
                true => gone_back("revision", before, revision),
                // It has grown past that revision since.
                false => format!(
                    "etcd has gone back earlier, as after the restoration of a snapshot, and may \
                     not know who owns what; {REMEDY}"
                ),
            };
            return Err(state.refuse(reason));
        }
        now.cluster_id = cluster_id;
        now.revision = now.revision.max(revision);
        state.refused = None;
        Ok(())
    }

    /// The revision that wrote a node's heartbeat, as far as known; an answer to a request sent
    /// after this call must not have an earlier one.
    pub(super) fn heartbeat(&self, node: &NodeName) -> i64 {
        self.state().heartbeats.get(node).copied().unwrap_or(0)
    }

    /// Accepts an answer's heartbeat revision, or returns why the store is not trusted. `before` is
    /// what was known when the request was sent.
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
            return Err(state.refuse(reason));
        }
        match state.heartbeats.get_mut(node) {
            Some(known) => *known = revision.max(*known),
            None => {
                state.heartbeats.insert(node.clone(), revision);
            }
        }
        Ok(())
    }

    /// Notes that this node has written its heartbeat.
    pub(super) fn wrote_heartbeat(&self, incarnation: u64, revision: i64) {
        let now = &mut self.state().now;
        now.heartbeat = revision.max(now.heartbeat);
        now.incarnation = incarnation.max(now.incarnation);
    }

    /// Accepts what the store has of this node before it joins, or returns why the store is not
    /// trusted. `revision` is the latest that wrote this node's heartbeat, its record, or the record of
    /// its being forgotten; 0 without any of them.
    pub(super) fn check_own(&self, revision: i64, incarnation: Option<u64>) -> Result<(), String> {
        let mut state = self.state();
        let now = &mut state.now;
        let falls = revision < now.heartbeat
            || incarnation.is_some_and(|incarnation| incarnation < now.incarnation);
        if !falls {
            return Ok(());
        }
        now.went_back = true;
        let reason = gone_back(
            "this node's last heartbeat at revision",
            now.heartbeat,
            revision,
        );
        Err(state.refuse(reason))
    }

    /// Why the current store is not the same as before, if so.
    pub(super) fn went_back(&self) -> Option<String> {
        self.state().refused.clone()
    }

    /// The floor is above all used generations: this store may be saved.
    pub(super) fn may_be_kept(&self) {
        self.state().held_back = false;
    }

    /// Whether the saved state, though older, distinguishes this store from one that is restored
    /// later.
    pub(super) fn is_known(&self) -> bool {
        let SeenState { now, written, .. } = *self.state();
        written.cluster_id != 0
            && (written.cluster_id, written.went_back) == (now.cluster_id, now.went_back)
    }

    /// Saves the observed state, durably. Blocks on the disk.
    pub(super) fn keep(&self) -> io::Result<()> {
        let _turn = self.keeping.lock().unwrap_or_else(PoisonError::into_inner);
        let (now, written, held_back) = {
            let state = self.state();
            (state.now, state.written, state.held_back)
        };
        if now == written || held_back {
            return Ok(());
        }
        // It is in a fleet again.
        fleet_mark::rejoin(self.file.path())?;
        self.file.write(&now)?;
        self.state().written = now;
        Ok(())
    }

    /// A panic while the lock is held cannot leave a partial change.
    fn state(&self) -> MutexGuard<'_, SeenState> {
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
    use conman_registry::fleet_mark::{in_fleet, leave_fleet, was_in_fleet};

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
        let first = seen.revision();
        seen.check(first, 7, 20).expect("the later one's answer");
        seen.check(first, 7, 10)
            .expect("sent before 20 was seen: no older than what was known then");
        let later = seen.revision();
        seen.check(later, 7, 20).expect("no older");
    }

    #[test]
    fn a_store_that_went_back_is_refused_even_once_it_has_grown_past_and_by_the_next_daemon() {
        let dir = dir();
        assert!(!was_in_fleet(dir.path()).expect("looked"));
        let seen = open(&dir);
        seen.check(seen.revision(), 7, 20).expect("the first");
        seen.keep().expect("kept");
        assert!(was_in_fleet(dir.path()).expect("looked"));
        let seen = open(&dir);
        let refusal = seen.check(seen.revision(), 7, 19).expect_err("older");
        assert!(refusal.contains("--generation-floor"), "{refusal}");
        seen.check(seen.revision(), 7, 25)
            .expect_err("it has grown");
        seen.keep().expect("kept");
        let seen = open(&dir);
        seen.check(seen.revision(), 7, 26).expect_err("remembered");
        let seen = Seen::open(dir.path(), true).expect("opened");
        seen.check(seen.revision(), 8, 1).expect("accepted");
    }

    #[test]
    fn a_store_that_was_restored_while_all_daemons_were_stopped_is_betrayed_by_the_own_heartbeat() {
        let dir = dir();
        let seen = open(&dir);
        seen.check_own(0, None).expect("nothing is remembered");
        seen.check(seen.revision(), 7, 20).expect("the first");
        seen.wrote_heartbeat(3, 19);
        seen.keep().expect("kept");
        let seen = open(&dir);
        seen.check(seen.revision(), 7, 90).expect("others write");
        seen.check_own(19, Some(3)).expect("the same");
        seen.check_own(40, None).expect("it was forgotten since");
        for older in [(11, Some(3)), (0, None), (19, Some(2))] {
            let refusal = seen.check_own(older.0, older.1).expect_err("older");
            assert!(refusal.contains("--generation-floor"), "{refusal}");
        }
        seen.keep().expect("kept");
        let seen = open(&dir);
        seen.check(seen.revision(), 7, 91).expect_err("remembered");
        let seen = Seen::open(dir.path(), true).expect("opened");
        seen.check_own(11, Some(3)).expect("accepted");
    }

    #[test]
    fn a_store_that_grew_past_what_was_seen_is_betrayed_by_an_older_heartbeat() {
        let dir = dir();
        let (seen, node) = (open(&dir), NodeName::from("n1"));
        seen.check(seen.revision(), 7, 20).expect("the first");
        let first = seen.heartbeat(&node);
        seen.check_heartbeat(&node, first, 20).expect("as written");
        seen.check_heartbeat(&node, first, 18)
            .expect("asked before that was known");
        seen.check(seen.revision(), 7, 30).expect("it has grown");
        let refusal = seen.check_heartbeat(&node, seen.heartbeat(&node), 15);
        let refusal = refusal.expect_err("older than what was written");
        assert!(refusal.contains("--generation-floor"), "{refusal}");
        seen.check(seen.revision(), 7, 31).expect_err("remembered");
        seen.keep().expect("kept");
        let seen = open(&dir);
        seen.check(seen.revision(), 7, 32)
            .expect_err("by the next daemon too");
    }

    #[test]
    fn a_node_that_left_its_fleet_takes_no_older_one_later() {
        let dir = dir();
        let is_of_one = || in_fleet(dir.path()).expect("looked").is_some();
        let seen = open(&dir);
        seen.check(seen.revision(), 7, 20).expect("the first");
        seen.keep().expect("kept");
        assert!(is_of_one());
        leave_fleet(dir.path()).expect("left");
        assert!(!is_of_one() && was_in_fleet(dir.path()).expect("looked"));
        let seen = open(&dir);
        seen.check(seen.revision(), 7, 19).expect_err("older");
        let seen = Seen::open(dir.path(), true).expect("opened");
        seen.check(seen.revision(), 8, 1).expect("accepted");
        seen.may_be_kept();
        seen.keep().expect("kept");
        assert!(is_of_one());
    }

    #[test]
    fn a_store_that_is_accepted_is_not_known_to_later_daemons_before_its_generations_are_raised() {
        let dir = dir();
        let seen = open(&dir);
        assert!(!seen.is_known());
        seen.check(seen.revision(), 7, 20).expect("the first");
        assert!(!seen.is_known());
        seen.keep().expect("kept");
        assert!(open(&dir).is_known());
        let accepting = Seen::open(dir.path(), true).expect("opened");
        accepting
            .check(accepting.revision(), 8, 1)
            .expect("accepted");
        accepting.keep().expect("held back");
        assert!(!accepting.is_known());
        let seen = open(&dir);
        seen.check(seen.revision(), 8, 2).expect_err("another one");
        accepting.may_be_kept();
        accepting.keep().expect("kept");
        assert!(accepting.is_known());
        let seen = open(&dir);
        seen.check(seen.revision(), 8, 2).expect("the accepted one");
    }

    #[test]
    fn another_cluster_is_refused_and_the_right_one_serves_again() {
        let dir = dir();
        let seen = open(&dir);
        seen.check(seen.revision(), 7, 20).expect("the first");
        seen.check(seen.revision(), 8, 30).expect_err("another one");
        seen.check(seen.revision(), 7, 21).expect("the first again");
    }
}
