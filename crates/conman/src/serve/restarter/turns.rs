//! Takes a few of the items that a scan meets, in rotation, so that each one has its turn even if
//! earlier ones are never done.

use conman_proto::SessionId;

/// Items of one scan, by session. Scans are in order of the ids; `N` items are taken after each.
#[derive(Debug)]
pub(super) struct Turns<T, const N: usize> {
    /// The last item taken; the next ones follow it.
    after: Option<SessionId>,
    behind: Vec<(SessionId, T)>,
    /// They come after the last.
    before: Vec<(SessionId, T)>,
}

impl<T, const N: usize> Default for Turns<T, N> {
    fn default() -> Self {
        Self {
            after: None,
            behind: Vec::new(),
            before: Vec::new(),
        }
    }
}

impl<T, const N: usize> Turns<T, N> {
    pub(super) fn meet(&mut self, id: &SessionId, what: impl FnOnce() -> T) {
        let is_behind = self.after.as_ref().is_none_or(|after| id > after);
        let met = match is_behind {
            true => &mut self.behind,
            false => &mut self.before,
        };
        if met.len() < N {
            met.push((id.clone(), what()));
        }
    }

    /// The scan is complete: returns the items whose turn it is.
    pub(super) fn take(&mut self) -> Vec<T> {
        let mut turn = std::mem::take(&mut self.behind);
        turn.append(&mut self.before);
        turn.truncate(N);
        if let Some((last, _)) = turn.last() {
            self.after = Some(last.clone());
        }
        turn.into_iter().map(|(_, what)| what).collect()
    }

    /// The scan failed: returns no items.
    pub(super) fn drop_met(&mut self) {
        self.behind.clear();
        self.before.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn id(number: usize) -> SessionId {
        format!("s-{number:03}").parse().expect("an id")
    }

    /// The items taken after a scan of these.
    fn look(turns: &mut Turns<usize, 10>, all: &BTreeSet<usize>) -> Vec<usize> {
        for number in all {
            turns.meet(&id(*number), || *number);
        }
        turns.take()
    }

    #[test]
    fn none_waits_for_ever_behind_those_that_stay() {
        let mut turns = Turns::default();
        let all: BTreeSet<usize> = (0..25).collect();
        assert_eq!(look(&mut turns, &all), Vec::from_iter(0..10));
        assert_eq!(look(&mut turns, &all), Vec::from_iter(10..20));
        let round: Vec<usize> = (20..25).chain(0..5).collect();
        assert_eq!(look(&mut turns, &all), round);
        assert_eq!(look(&mut turns, &all), Vec::from_iter(5..15));
    }

    #[test]
    fn all_that_go_are_gone_after_as_many_looks_as_they_fill() {
        let mut turns = Turns::default();
        let mut all: BTreeSet<usize> = (0..95).collect();
        for _ in 0..10 {
            for gone in look(&mut turns, &all) {
                all.remove(&gone);
            }
        }
        assert_eq!(all, BTreeSet::new());
        assert!(look(&mut turns, &all).is_empty());
        // Those that come later may be anywhere.
        assert_eq!(look(&mut turns, &[3, 99].into()), [99, 3]);
    }

    #[test]
    fn a_look_in_vain_costs_nobody_its_turn() {
        let mut turns: Turns<usize, 10> = Turns::default();
        turns.meet(&id(7), || 7);
        turns.drop_met();
        assert_eq!(look(&mut turns, &[8].into()), [8]);
        turns.meet(&id(1), || 1);
        turns.drop_met();
        assert_eq!(look(&mut turns, &[2, 9].into()), [9, 2]);
    }
}
