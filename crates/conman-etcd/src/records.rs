//! A cache of the records that this node owns, as they were last read or written. Reads are
//! answered from it, and a release overwrites what is cached here, so a late answer must never
//! replace a newer record.
//!
//! Answers may arrive out of order, and a record may be evicted while a write is under way. So two
//! things are remembered of an evicted record: when it was evicted, because a read sent before may
//! return a record that has ended since; and the latest known revision, because a read sent after
//! the eviction may have missed a write that was under way.

use std::collections::HashMap;

use conman_proto::{Generation, SessionId};

use super::codec::SessionDetails;

/// Sessions whose eviction is remembered: more than end during one read. Beyond this limit all
/// count as just evicted.
const MAX_TAKEN_OUT: usize = 10_000;

/// A record that this node owns, as it was last read or written.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct OwnRecord {
    pub(super) details: SessionDetails,
    /// The revision that wrote it; `None` after a lost answer.
    pub(super) mod_revision: Option<i64>,
}

/// Order of records: by generation, then by the revision that wrote it. A record without a known
/// revision is a claim, the first of its generation.
type Age = (Generation, Option<i64>);

impl OwnRecord {
    fn age(&self) -> Age {
        (self.details.record.generation, self.mod_revision)
    }
}

/// Number of evictions before a read was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(super) struct Since(u64);

/// What is remembered of an evicted session.
#[derive(Debug, Clone, Copy)]
struct Evicted {
    since: Since,
    /// Older records are out of date.
    latest: Option<Age>,
}

#[derive(Debug, Default)]
pub(super) struct Records {
    known: HashMap<SessionId, OwnRecord>,
    now: Since,
    gone: HashMap<SessionId, Evicted>,
    /// Since when all other records may have been evicted.
    all_gone: Since,
}

impl Records {
    pub(super) fn of(&self, id: &SessionId) -> Option<&OwnRecord> {
        self.known.get(id)
    }

    /// Call it before a read whose answer is passed to [`Self::note_read`].
    pub(super) fn since(&self) -> Since {
        self.now
    }

    /// Caches a record that this node has just become the owner of.
    pub(super) fn note(&mut self, mine: OwnRecord) {
        let id = &mine.details.record.id;
        let known = self.known.get(id).map(OwnRecord::age);
        if known.max(self.gone(id).latest) <= Some(mine.age()) {
            self.known.insert(id.clone(), mine);
        }
    }

    /// Caches a changed record, unless it was evicted or changed again meanwhile: answers may
    /// arrive in another order than the requests were sent.
    pub(super) fn note_changed(&mut self, mine: OwnRecord) {
        let id = &mine.details.record.id;
        match self.known.get_mut(id) {
            Some(known) if known.details.record.generation != mine.details.record.generation => {}
            Some(known) if known.age() < mine.age() => *known = mine,
            Some(_) => {}
            None => self.outdate(id, mine.age()),
        }
    }

    /// Caches a record that was read. Returns whether this record, or the cached one, is the newest
    /// known. `false` if the record was evicted since the read was sent, because it may have ended,
    /// or if a newer one was written meanwhile; it must then be read again.
    pub(super) fn note_read(&mut self, mine: OwnRecord, since: Since) -> bool {
        let id = &mine.details.record.id;
        let gone = self.gone(id);
        match self.known.get_mut(id) {
            Some(known) if known.age() < mine.age() => *known = mine,
            Some(_) => {}
            None if gone.since <= since && gone.latest <= Some(mine.age()) => self.note(mine),
            None => {
                self.outdate(id, mine.age());
                return false;
            }
        }
        true
    }

    /// Evicts a record unless it has another generation.
    pub(super) fn take_out(&mut self, id: &SessionId, generation: Generation) {
        // Answers that are on their way must not be cached either, whether the record was cached or
        // not.
        self.now.0 += 1;
        let is = |mine: &OwnRecord| mine.details.record.generation == generation;
        let known = self.known.get(id).map(OwnRecord::age);
        if self.known.get(id).is_some_and(is) {
            self.known.remove(id);
        }
        let latest = self.gone(id).latest.max(known);
        let since = self.now;
        self.remember(id, Evicted { since, latest });
    }

    pub(super) fn clear(&mut self) {
        self.now.0 += 1;
        self.all_gone = self.now;
        self.gone.clear();
        self.known.clear();
    }

    fn gone(&self, id: &SessionId) -> Evicted {
        let other = Evicted {
            since: self.all_gone,
            latest: None,
        };
        self.gone.get(id).copied().unwrap_or(other)
    }

    /// An uncached record was written: remembers the revision.
    fn outdate(&mut self, id: &SessionId, age: Age) {
        let gone = self.gone(id);
        let latest = gone.latest.max(Some(age));
        self.remember(id, Evicted { latest, ..gone });
    }

    fn remember(&mut self, id: &SessionId, gone: Evicted) {
        if self.gone.len() >= MAX_TAKEN_OUT && !self.gone.contains_key(id) {
            self.now.0 += 1;
            self.all_gone = self.now;
            self.gone.clear();
        }
        self.gone.insert(id.clone(), gone);
    }
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::*;
    use conman_registry::{RecordState, SessionRecord};
    use conman_testkit::registry_conformance::spec;

    fn generation(number: u64) -> Generation {
        Generation::new(number).expect("not zero")
    }

    /// A record written by this revision.
    fn mine(number: u64, mod_revision: impl Into<Option<i64>>) -> OwnRecord {
        OwnRecord {
            details: SessionDetails {
                node: "a".to_owned(),
                incarnation: 1,
                record: SessionRecord {
                    id: alice(),
                    generation: generation(number),
                    state: RecordState::Starting,
                    spec: spec("idle"),
                    container: None,
                    created_at: Timestamp::UNIX_EPOCH,
                },
            },
            mod_revision: mod_revision.into(),
        }
    }

    fn alice() -> SessionId {
        "alice".parse().expect("an id")
    }

    fn known(records: &Records) -> Option<(u64, Option<i64>)> {
        let mine = records.of(&alice())?;
        Some((mine.details.record.generation.get(), mine.mod_revision))
    }

    /// Claimed by revision 5.
    fn claimed() -> Records {
        let mut records = Records::default();
        records.note(mine(1, 5));
        records
    }

    #[test]
    fn a_change_is_known_once_it_is_answered() {
        let mut records = claimed();
        records.note_changed(mine(1, 6));
        assert_eq!(known(&records), Some((1, Some(6))));
        // A claim whose answer was lost.
        records.note(mine(2, None));
        records.note_changed(mine(2, 8));
        assert_eq!(known(&records), Some((2, Some(8))));
    }

    #[test]
    fn what_is_answered_late_undoes_no_later_change() {
        let mut records = claimed();
        records.note_changed(mine(1, 7));
        records.note_changed(mine(1, 6));
        assert_eq!(known(&records), Some((1, Some(7))));
        let since = records.since();
        records.note_read(mine(1, 6), since);
        assert_eq!(known(&records), Some((1, Some(7))));
        records.note_read(mine(1, 8), since);
        assert_eq!(known(&records), Some((1, Some(8))));
    }

    #[test]
    fn what_is_answered_late_brings_nothing_back_that_has_ended() {
        let mut records = claimed();
        records.take_out(&alice(), generation(1));
        records.note_changed(mine(1, 6));
        assert_eq!(known(&records), None);
        records.note(mine(2, 9));
        records.note_changed(mine(1, 6));
        records.take_out(&alice(), generation(1));
        assert_eq!(known(&records), Some((2, Some(9))));
    }

    #[test]
    fn an_end_keeps_back_only_what_was_read_of_that_session_as_long_as_few_have_ended() {
        let other = |number: usize| format!("s{number}").parse().expect("an id");
        let mut records = Records::default();
        let before = records.since();
        for number in 0..MAX_TAKEN_OUT {
            records.take_out(&other(number), generation(1));
        }
        records.note_read(mine(1, 5), before);
        assert_eq!(known(&records), Some((1, Some(5))));

        let mut records = Records::default();
        let before = records.since();
        records.take_out(&alice(), generation(1));
        for number in 0..MAX_TAKEN_OUT {
            records.take_out(&other(number), generation(1));
        }
        records.note_read(mine(1, 5), before);
        assert_eq!(known(&records), None);
    }

    #[test]
    fn what_was_read_before_an_end_is_not_noted_after_it() {
        let mut records = Records::default();
        let before = records.since();
        records.take_out(&alice(), generation(1));
        records.note_read(mine(1, 6), before);
        assert_eq!(known(&records), None);
        records.note(mine(2, 9));
        records.note_read(mine(1, 6), records.since());
        assert_eq!(known(&records), Some((2, Some(9))));

        // Nothing is certain to be this node's.
        let before = records.since();
        records.clear();
        records.note_read(mine(2, 10), before);
        assert_eq!(known(&records), None);
        records.note_read(mine(2, 10), records.since());
        assert_eq!(known(&records), Some((2, Some(10))));
    }

    #[test]
    fn what_is_noted_never_takes_the_place_of_what_is_later() {
        let mut records = claimed();
        records.note_changed(mine(1, 7));
        records.note(mine(1, 6));
        assert_eq!(known(&records), Some((1, Some(7))));
        records.take_out(&alice(), generation(1));
        records.note(mine(1, 6));
        assert_eq!(known(&records), None);
        records.note(mine(2, None));
        records.note(mine(1, 8));
        assert_eq!(known(&records), Some((2, None)));
    }

    /// A change is under way when another one gets no answer and evicts the record.
    #[test]
    fn what_was_read_before_a_change_is_not_noted_once_that_was_answered() {
        let mut records = claimed();
        records.take_out(&alice(), generation(1));
        let since = records.since();
        // Read before the change took effect, and answered after it.
        records.note_changed(mine(1, 7));
        assert_eq!(known(&records), None, "it may have ended");
        assert!(!records.note_read(mine(1, 5), since));
        assert_eq!(known(&records), None);
        assert!(records.note_read(mine(1, 7), since));
        assert_eq!(known(&records), Some((1, Some(7))));

        // By a caller that had read it, before it was evicted.
        let mut records = Records::default();
        let before = records.since();
        records.take_out(&alice(), generation(1));
        let since = records.since();
        assert!(!records.note_read(mine(1, 7), before));
        assert!(!records.note_read(mine(1, 5), since));
        assert!(records.note_read(mine(1, 7), since));

        // The other order.
        let mut records = claimed();
        records.take_out(&alice(), generation(1));
        assert!(records.note_read(mine(1, 5), records.since()));
        records.note_changed(mine(1, 7));
        assert_eq!(known(&records), Some((1, Some(7))));
    }

    #[test]
    fn what_is_taken_out_is_not_known_as_it_was_earlier() {
        let mut records = claimed();
        records.note_changed(mine(1, 7));
        records.take_out(&alice(), generation(1));
        assert!(!records.note_read(mine(1, 6), records.since()));
        assert_eq!(known(&records), None);
        records.take_out(&alice(), generation(1));
        assert!(!records.note_read(mine(1, 6), records.since()), "it stays");
        assert!(records.note_read(mine(1, 7), records.since()));
        // Whatever it was, the node has rejoined since.
        records.clear();
        assert!(records.note_read(mine(1, 6), records.since()));
    }

    #[test]
    fn what_many_changes_have_written_is_remembered_of_so_many_and_read_anew_of_the_rest() {
        let mut records = Records::default();
        let before = records.since();
        records.note_changed(mine(1, 7));
        let named = |number: usize| {
            let mut other = mine(1, 7);
            other.details.record.id = format!("s{number}").parse().expect("an id");
            other
        };
        for number in 0..MAX_TAKEN_OUT {
            records.note_changed(named(number));
        }
        assert!(records.gone.len() <= MAX_TAKEN_OUT);
        assert!(!records.note_read(mine(1, 5), before), "as it may be older");
        assert!(records.note_read(mine(1, 7), records.since()));
    }
}
