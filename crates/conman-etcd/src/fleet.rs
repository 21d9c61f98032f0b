//! What the rest of the daemon requests about the other nodes.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use conman_core::ownership::{Key, OwnedState, Timing, Value};
use conman_proto::{Generation, NodeStore, SessionId};
use tokio::sync::watch;

use super::shared::{Shared, name};
use super::{EtcdRegistry, codec, figures, forgetting, listing, notes, shared_key};
use conman_registry::{
    Announcement, Fleet, ForgetError, Located, Peer, RegistryError, SessionPage, Sighting, Standing,
};

#[async_trait]
impl Fleet for EtcdRegistry {
    fn me(&self) -> &str {
        &self.shared.me
    }

    fn peers(&self) -> Arc<[Peer]> {
        let incarnation = *self.shared.incarnation.borrow();
        let me = (&*self.shared.me, incarnation);
        self.membership.peers(me, &self.shared.timing)
    }

    fn peer_changes(&self) -> watch::Receiver<()> {
        self.membership.changes()
    }

    async fn locate(&self, id: &SessionId, fresh: bool) -> Result<Sighting, RegistryError> {
        if !fresh && let Some(located) = self.shared.location(id) {
            figures::looked_up("memory");
            return Ok(Sighting {
                located: Some(located),
                fresh: false,
            });
        }
        figures::looked_up("etcd");
        let (shared, id) = (Arc::clone(&self.shared), id.clone());
        self.run(async move {
            let located = locate(&shared, &id).await?;
            shared.note_location(&id, located.clone());
            Ok(Sighting {
                located,
                fresh: true,
            })
        })
        .await
    }

    async fn forget_node(&self, node: &str) -> Result<(), ForgetError> {
        let (shared, node) = (Arc::clone(&self.shared), node.to_owned());
        let forgetting = async move { Ok(forgetting::forget(&shared, &node).await) };
        self.run(forgetting).await?
    }

    async fn shared_key(&self) -> Result<Option<[u8; 32]>, RegistryError> {
        let shared = Arc::clone(&self.shared);
        self.run(async move { shared_key::of(&shared.store).await.map(Some) })
            .await
    }

    fn forget_location(&self, id: &SessionId, generation: Generation) {
        self.shared.forget_location(id, generation);
    }

    fn takeover(&self) -> Duration {
        let own_ms = self.shared.timing.takeover_ms;
        Duration::from_millis(own_ms.max(self.membership.longest_patience_ms()))
    }

    fn standing(&self) -> watch::Receiver<Standing> {
        self.shared.standing.subscribe()
    }

    fn why_late(&self) -> Option<String> {
        match *self.shared.standing.borrow() {
            Standing::Late | Standing::Fenced => Some(self.shared.why_late()),
            Standing::Alone | Standing::Joining { .. } | Standing::Live => None,
        }
    }

    fn store(&self) -> Option<NodeStore> {
        let answers = self.shared.store.client.answers();
        let round_trip = answers.renewal;
        let ms = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        Some(NodeStore {
            answered_ago_ms: answers.latest.map(|at| ms(at.elapsed())),
            round_trip_ms: round_trip.map(ms),
            warning: round_trip.and_then(|took| slow_store(&self.shared.timing, ms(took))),
        })
    }

    fn announce(&self, announcement: Announcement) {
        if self.membership.announce(announcement) {
            self.shared.hurry.notify_one();
        }
    }

    async fn sessions(
        &self,
        after: Option<&SessionId>,
        limit: usize,
    ) -> Result<SessionPage, RegistryError> {
        let (shared, after) = (Arc::clone(&self.shared), after.cloned());
        self.run_list(async move { listing::page(&shared, after, limit).await })
            .await
    }
}

/// Which times would fit, if the store is too slow for the present ones.
fn slow_store(timing: &Timing, round_trip_ms: u64) -> Option<String> {
    let borne_ms = timing.borne_round_trip_ms();
    let fitting = timing.fitting(round_trip_ms);
    (round_trip_ms > borne_ms).then(|| {
        format!(
            "a renewal in etcd took {round_trip_ms} ms, and `fleet.fence_ms` = {} needs at most \
             {borne_ms} ms: sessions may freeze. Make etcd faster, or set `fleet.fence_ms` to at least \
             {} and `fleet.takeover_ms`, if it is set, to at least {}",
            timing.fence_ms, fitting.fence_ms, fitting.takeover_ms
        )
    })
}

async fn locate(shared: &Shared, id: &SessionId) -> Result<Option<Located>, RegistryError> {
    let key = Key::Session(name(id));
    let names = [shared.store.keys.of(&key)];
    let (entries, _) = shared
        .store
        .get_queued(&names)
        .await
        .map_err(notes::not_read)?;
    let Some((name, bytes, _)) = entries.into_iter().flatten().next() else {
        return Ok(None);
    };
    let value =
        codec::decode(&key, &name, &bytes).map_err(|error| notes::not_read(error.into()))?;
    let Value::Session(ownership) = value else {
        return Ok(None);
    };
    Ok(
        Generation::new(ownership.generation).map(|generation| Located {
            node: ownership.owner.to_string(),
            generation,
            released: ownership.state == OwnedState::Released,
        }),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_that_is_too_slow_has_the_times_named_that_would_fit() {
        let timing = Timing::default();
        assert_eq!(slow_store(&timing, timing.borne_round_trip_ms()), None);
        let warning = slow_store(&timing, 2_100).expect("too slow");
        for part in ["2100 ms", "at most 1666 ms", "to at least 6300"] {
            assert!(warning.contains(part), "{warning}");
        }
    }
}
