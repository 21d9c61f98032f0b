//! For how long nodes have been lost.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use conman_core::retention::Age;

use super::{ModelFleet, lock};
use conman_registry::PeerStanding;

impl ModelFleet {
    /// Stores that a lost node was observed to be lost for so long.
    pub fn was_gone_for(&self, name: &str, gone_for: Duration) {
        if let Some(member) = lock(&self.members).get(name) {
            let age = Age {
                incarnation: member.peer.incarnation,
                gone_for,
            };
            lock(&self.ages).insert(name.to_owned(), age);
        }
    }

    /// Like etcd's, except that nodes of the model observe nothing.
    pub(super) fn count(&self, seen: &BTreeMap<String, Option<Age>>) -> BTreeMap<String, Age> {
        let members = lock(&self.members);
        let mut kept = lock(&self.ages);
        let names: BTreeSet<String> = seen.keys().chain(kept.keys()).cloned().collect();
        let mut ages = BTreeMap::new();
        for name in names {
            let gone = members.get(&name).filter(|member| {
                member.peer.standing == PeerStanding::Fenced
                    && (!member.is_forgotten || seen.contains_key(&name))
            });
            let Some(gone) = gone else {
                kept.remove(&name);
                continue;
            };
            let new = Age::new(gone.peer.incarnation);
            let before = kept.get(&name).copied();
            let age = new.or_longer(seen.get(&name).copied().flatten().into_iter().chain(before));
            if age.is_news_to(before) {
                kept.insert(name.clone(), age);
            } else if before.is_some_and(|before| before.incarnation != age.incarnation) {
                kept.remove(&name);
            }
            ages.insert(name, age);
        }
        ages
    }
}
