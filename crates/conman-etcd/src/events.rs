//! Reports to the journal what happens to this node's ownership, when it happens.

use std::sync::{Arc, Mutex, PoisonError};

use conman_proto::{EventKind, Generation, SessionId, TAKEN_OVER_FROM};
use conman_registry::{Journal, NewEvent, Standing};
use jiff::Timestamp;

use super::figures::Tally;

/// Events before the journal is open; a few at most.
const MAX_WAITING: usize = 64;

#[derive(Debug, Default)]
pub(super) struct Events(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    journal: Option<Arc<Journal>>,
    waiting: Vec<NewEvent>,
    /// When etcd stopped renewing the ownership, as far as reported.
    lost_at: Option<Timestamp>,
    /// When the sessions were frozen, as far as reported.
    frozen_at: Option<Timestamp>,
}

impl Events {
    /// Appends to this journal from now on.
    pub(super) fn record(&self, journal: Arc<Journal>) {
        self.change(|inner| {
            journal.append(std::mem::take(&mut inner.waiting));
            inner.journal = Some(journal);
        });
    }

    /// `trouble`: why the latest renewal failed, if it did.
    pub(super) fn stands(&self, before: &Standing, standing: &Standing, trouble: Option<&str>) {
        self.change(|inner| inner.stands(before, standing, trouble));
    }

    /// The fence has fired under an earlier daemon.
    pub(super) fn found_frozen(&self) {
        let why = "no daemon renewed the node's ownership in time";
        self.change(|inner| inner.froze(why));
    }

    /// A transaction of this node has committed.
    pub(super) fn committed(&self, tally: &Tally) {
        self.change(|inner| match tally {
            Tally::Release => {}
            Tally::Takeover {
                session,
                generation,
                from,
            } => {
                let message = format!("{TAKEN_OVER_FROM}{from}, which was declared dead");
                let id = session.parse::<SessionId>();
                if let (Ok(id), Some(generation)) = (id, Generation::new(*generation)) {
                    inner.note(NewEvent {
                        session: Some(id),
                        generation: Some(generation),
                        ..NewEvent::of_node(EventKind::SessionTakenOver, message)
                    });
                }
            }
            Tally::NodeFenced { node } => inner.note(NewEvent::of_node(
                EventKind::NodeFenced,
                format!(
                    "declared node {node} dead, which has not renewed its ownership; other nodes may \
                     take over its sessions"
                ),
            )),
        });
    }

    /// No panic can happen while the lock is held with a partial change.
    fn change(&self, change: impl FnOnce(&mut Inner)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Inner {
    fn stands(&mut self, before: &Standing, standing: &Standing, trouble: Option<&str>) {
        if let (Standing::Late | Standing::Fenced, Some(trouble), None) =
            (standing, trouble, self.lost_at)
        {
            self.lost_at = Some(Timestamp::now());
            let message = format!("etcd does not renew this node's ownership: {trouble}");
            self.note(NewEvent::of_node(EventKind::RegistryLost, message));
        }
        if standing.is_frozen() && !before.is_frozen() {
            let why = match (standing, trouble) {
                (Standing::Joining { reason }, _) => reason,
                (_, Some(trouble)) => trouble,
                (_, None) => "this machine was too slow or was suspended",
            };
            self.froze(why);
        }
        if standing.is_ready()
            && let Some(lost_at) = self.lost_at.take()
        {
            let message = format!(
                "etcd renews this node's ownership again, after {}",
                since(lost_at)
            );
            self.note(NewEvent::of_node(EventKind::RegistryReturned, message));
        }
        if !standing.is_frozen()
            && let Some(frozen_at) = self.frozen_at.take()
        {
            let message = format!(
                "thawed after {}; sessions that another node has taken over are ended instead",
                since(frozen_at)
            );
            self.note(NewEvent::of_node(EventKind::NodeThawed, message));
        }
    }

    fn froze(&mut self, why: &str) {
        if self.frozen_at.is_none() {
            self.frozen_at = Some(Timestamp::now());
            let message = format!("all sessions are frozen until the node owns them again: {why}");
            self.note(NewEvent::of_node(EventKind::NodeFrozen, message));
        }
    }

    fn note(&mut self, event: NewEvent) {
        match &self.journal {
            Some(journal) => journal.append(vec![event]),
            None if self.waiting.len() < MAX_WAITING => self.waiting.push(event),
            None => {}
        }
    }
}

fn since(at: Timestamp) -> String {
    format!("{:.1} s", Timestamp::now().duration_since(at).as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_is_reported_once_and_so_is_its_end() {
        let events = Events::default();
        let joining = || Standing::Joining {
            reason: "it has just begun".to_owned(),
        };
        let outage = [
            (Standing::Live, None),
            (Standing::Late, Some("no answer")),
            (Standing::Late, Some("no answer")),
            (Standing::Fenced, Some("no answer")),
            (joining(), Some("no answer")),
            (Standing::Late, None),
            (Standing::Live, None),
            // The machine was suspended.
            (Standing::Fenced, None),
            (Standing::Live, None),
        ];
        let mut before = joining();
        for (standing, trouble) in outage {
            events.stands(&before, &standing, trouble);
            before = standing;
        }
        let inner = events.0.lock().expect("no panic");
        let kinds: Vec<_> = inner.waiting.iter().map(|event| event.kind).collect();
        use EventKind::{NodeFrozen, NodeThawed, RegistryLost, RegistryReturned};
        assert_eq!(
            kinds,
            [
                RegistryLost,
                NodeFrozen,
                NodeThawed,
                RegistryReturned,
                NodeFrozen,
                NodeThawed
            ]
        );
    }
}
