//! Takes a few of the items that a scan finds, in rotation, so that each one is taken even if earlier
//! ones are never done.

use conman_proto::SessionId;

/// Items of one scan, by session. Scans are in order of the ids; `N` items are taken after each.
#[derive(Debug)]
pub(super) struct SweepSchedule<T, const N: usize> {
    /// The last item taken; the next ones follow it.
    after: Option<SessionId>,
    behind: Vec<(SessionId, T)>,
    /// They come after the last.
    before: Vec<(SessionId, T)>,
}

impl<T, const N: usize> Default for SweepSchedule<T, N> {
    fn default() -> Self {
        Self {
            after: None,
            behind: Vec::new(),
            before: Vec::new(),
        }
    }
}

impl<T, const N: usize> SweepSchedule<T, N> {
    pub(super) fn add(&mut self, id: &SessionId, item: impl FnOnce() -> T) {
        let is_behind = self.after.as_ref().is_none_or(|after| id > after);
        let items = match is_behind {
            true => &mut self.behind,
            false => &mut self.before,
        };
        if items.len() < N {
            items.push((id.clone(), item()));
        }
    }

    /// The scan is complete: returns the items to process now.
    pub(super) fn take(&mut self) -> Vec<T> {
        let mut taken = std::mem::take(&mut self.behind);
        taken.append(&mut self.before);
        taken.truncate(N);
        if let Some((last, _)) = taken.last() {
            self.after = Some(last.clone());
        }
        taken.into_iter().map(|(_, item)| item).collect()
    }

    /// The scan failed: removes its items.
    pub(super) fn discard(&mut self) {
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
    fn scan(schedule: &mut SweepSchedule<usize, 10>, all: &BTreeSet<usize>) -> Vec<usize> {
        for number in all {
            schedule.add(&id(*number), || *number);
        }
        schedule.take()
    }

    #[test]
    fn no_item_waits_forever_behind_items_that_stay() {
        let mut schedule = SweepSchedule::default();
        let all: BTreeSet<usize> = (0..25).collect();
        assert_eq!(scan(&mut schedule, &all), Vec::from_iter(0..10));
        assert_eq!(scan(&mut schedule, &all), Vec::from_iter(10..20));
        let round: Vec<usize> = (20..25).chain(0..5).collect();
        assert_eq!(scan(&mut schedule, &all), round);
        assert_eq!(scan(&mut schedule, &all), Vec::from_iter(5..15));
    }

    #[test]
    fn all_items_are_taken_after_as_many_scans_as_they_fill() {
        let mut schedule = SweepSchedule::default();
        let mut all: BTreeSet<usize> = (0..95).collect();
        for _ in 0..10 {
            for gone in scan(&mut schedule, &all) {
                all.remove(&gone);
            }
        }
        assert_eq!(all, BTreeSet::new());
        assert!(scan(&mut schedule, &all).is_empty());
        // Those that come later may be anywhere.
        assert_eq!(scan(&mut schedule, &[3, 99].into()), [99, 3]);
    }

    #[test]
    fn a_failed_scan_does_not_advance_the_rotation() {
        let mut schedule: SweepSchedule<usize, 10> = SweepSchedule::default();
        schedule.add(&id(7), || 7);
        schedule.discard();
        assert_eq!(scan(&mut schedule, &[8].into()), [8]);
        schedule.add(&id(1), || 1);
        schedule.discard();
        assert_eq!(scan(&mut schedule, &[2, 9].into()), [9, 2]);
    }
}
