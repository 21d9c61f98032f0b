//! The records of which this node is the owner, as they were last read or written. Whoever asks for
//! one is answered from here, and a release is written over what is known here: nothing that an
//! answer tells late may undo what is known by then.
//!
//! Answers overtake each other, and what is known may be taken out while a write is under way. So of
//! what is taken out two things are remembered: when that was, as a read that was sent before may tell
//! of what has ended since; and the latest revision that anybody has heard of, as a read that was sent
//! after it may have missed a write that was under way.

use std::collections::HashMap;

use conman_proto::{Generation, SessionId};

use super::codec::Told;

/// Sessions of which it is remembered when they were taken out: more than end while one read is
/// under way. Beyond, all count as just taken out.
const MAX_TAKEN_OUT: usize = 10_000;

/// A record of which this node is the owner, as it was last read or written.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Mine {
    pub(super) told: Told,
    /// Which revision wrote it; not known after an answer that was lost.
    pub(super) mod_revision: Option<i64>,
}

/// Generations follow each other, and so do the revisions that write one; what is of no known
/// revision is a claim, the first of its generation.
type Age = (Generation, Option<i64>);

impl Mine {
    fn age(&self) -> Age {
        (self.told.record.generation, self.mod_revision)
    }
}

/// How much had been taken out before a read was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(super) struct Since(u64);

/// What is remembered of a session that is not known.
#[derive(Debug, Clone, Copy)]
struct Gone {
    since: Since,
    /// Nothing older is the record any more.
    latest: Option<Age>,
}

#[derive(Debug, Default)]
pub(super) struct Records {
    known: HashMap<SessionId, Mine>,
    now: Since,
    gone: HashMap<SessionId, Gone>,
    /// Since when all others may be gone.
    all_gone: Since,
}

impl Records {
    pub(super) fn of(&self, id: &SessionId) -> Option<&Mine> {
        self.known.get(id)
    }

    /// To be asked for before a read whose answer is noted by [`Self::note_read`].
    pub(super) fn since(&self) -> Since {
        self.now
    }

    /// What this node has just become the owner of.
    pub(super) fn note(&mut self, mine: Mine) {
        let id = &mine.told.record.id;
        let known = self.known.get(id).map(Mine::age);
        if known.max(self.gone(id).latest) <= Some(mine.age()) {
            self.known.insert(id.clone(), mine);
        }
    }

    /// What was known when it was changed, unless it has ended meanwhile or been changed again: both
    /// may be known earlier than what was sent before them.
    pub(super) fn note_changed(&mut self, mine: Mine) {
        let id = &mine.told.record.id;
        match self.known.get_mut(id) {
            Some(known) if known.told.record.generation != mine.told.record.generation => {}
            Some(known) if known.age() < mine.age() => *known = mine,
            Some(_) => {}
            None => self.outdate(id, mine.age()),
        }
    }

    /// What was not known before it was read: whether that, or what is known by now, is the record as
    /// far as anybody has heard. What was taken out since may have ended, and is read again when it is
    /// asked for, as is what is older than what was written meanwhile.
    pub(super) fn note_read(&mut self, mine: Mine, since: Since) -> bool {
        let id = &mine.told.record.id;
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

    /// Unless it is of another generation by now.
    pub(super) fn take_out(&mut self, id: &SessionId, generation: Generation) {
        // What of it is on its way here, whether it was known or not, is not to be noted either.
        self.now.0 += 1;
        let is = |mine: &Mine| mine.told.record.generation == generation;
        let known = self.known.get(id).map(Mine::age);
        if self.known.get(id).is_some_and(is) {
            self.known.remove(id);
        }
        let latest = self.gone(id).latest.max(known);
        let since = self.now;
        self.remember(id, Gone { since, latest });
    }

    pub(super) fn clear(&mut self) {
        self.now.0 += 1;
        self.all_gone = self.now;
        self.gone.clear();
        self.known.clear();
    }

    fn gone(&self, id: &SessionId) -> Gone {
        let other = Gone {
            since: self.all_gone,
            latest: None,
        };
        self.gone.get(id).copied().unwrap_or(other)
    }

    /// What is not known was written since it was.
    fn outdate(&mut self, id: &SessionId, age: Age) {
        let gone = self.gone(id);
        let latest = gone.latest.max(Some(age));
        self.remember(id, Gone { latest, ..gone });
    }

    fn remember(&mut self, id: &SessionId, gone: Gone) {
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
    use crate::conformance::spec;
    use crate::{RecordState, SessionRecord};

    fn generation(number: u64) -> Generation {
        Generation::new(number).expect("not zero")
    }

    /// As a revision told of it.
    fn mine(number: u64, mod_revision: impl Into<Option<i64>>) -> Mine {
        Mine {
            told: Told {
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
        Some((mine.told.record.generation.get(), mine.mod_revision))
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

        // Nothing of it is this node's for certain any more.
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

    /// A change is on its way when another one finds no answer and has the record taken out.
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

        // By whoever had read it himself, before it was taken out.
        let mut records = Records::default();
        let before = records.since();
        records.take_out(&alice(), generation(1));
        let since = records.since();
        assert!(!records.note_read(mine(1, 7), before));
        assert!(!records.note_read(mine(1, 5), since));
        assert!(records.note_read(mine(1, 7), since));

        // The other way round.
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
        // Whatever it was, it is another one's time.
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
            other.told.record.id = format!("s{number}").parse().expect("an id");
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
