//! The records of which this node is the owner, as they were last read or written. Whoever asks for
//! one is answered from here, and a release is written over what is known here: nothing that an
//! answer tells late may undo what is known by then.

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

impl Mine {
    /// Generations follow each other, and so do the revisions that write one; what is of no known
    /// revision is a claim, the first of its generation.
    fn is_later_than(&self, other: &Self) -> bool {
        let age = |mine: &Self| (mine.told.record.generation, mine.mod_revision);
        age(self) > age(other)
    }
}

/// How much had been taken out before a read was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(super) struct Since(u64);

#[derive(Debug, Default)]
pub(super) struct Records {
    known: HashMap<SessionId, Mine>,
    now: Since,
    taken_out: HashMap<SessionId, Since>,
    /// Of all others.
    all_taken_out: Since,
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
        self.known.insert(mine.told.record.id.clone(), mine);
    }

    /// What was known when it was changed, unless it has ended meanwhile or been changed again: both
    /// may be known earlier than what was sent before them.
    pub(super) fn note_changed(&mut self, mine: Mine) {
        if let Some(known) = self.known.get_mut(&mine.told.record.id)
            && known.told.record.generation == mine.told.record.generation
            && mine.is_later_than(known)
        {
            *known = mine;
        }
    }

    /// What was not known before it was read. What was taken out since may have ended, and is read
    /// again when it is asked for.
    pub(super) fn note_read(&mut self, mine: Mine, since: Since) {
        let id = &mine.told.record.id;
        let taken_out = *self.taken_out.get(id).unwrap_or(&self.all_taken_out);
        match self.known.get_mut(id) {
            Some(known) if mine.is_later_than(known) => *known = mine,
            Some(_) => {}
            None if taken_out <= since => self.note(mine),
            None => {}
        }
    }

    /// Unless it is of another generation by now.
    pub(super) fn take_out(&mut self, id: &SessionId, generation: Generation) {
        // What of it is on its way here, whether it was known or not, is not to be noted either.
        self.now.0 += 1;
        if self.taken_out.len() >= MAX_TAKEN_OUT {
            self.taken_out.clear();
            self.all_taken_out = self.now;
        }
        self.taken_out.insert(id.clone(), self.now);
        let is = |mine: &Mine| mine.told.record.generation == generation;
        if self.known.get(id).is_some_and(is) {
            self.known.remove(id);
        }
    }

    pub(super) fn clear(&mut self) {
        self.now.0 += 1;
        self.all_taken_out = self.now;
        self.taken_out.clear();
        self.known.clear();
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
}
