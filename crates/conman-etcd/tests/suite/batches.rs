//! Releases that come together.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use conman_core::ownership::Timing;
use conman_proto::Generation;
use conman_registry::{Registry as _, RegistryError, Release};
use futures_util::future::join_all;
use serde_json::Value;

use crate::etcd::Etcd;
use crate::node::{Node, ending, id, patient, until};
use crate::proxy::{Proxy, Way};

const COUNT: usize = 200;
/// One takes 60 releases, and those of one moment may come in two.
const MOST_TRANSACTIONS: usize = 8;

/// Has a node own as many sessions as go together.
async fn claimed(node: &Node) -> Vec<(String, Generation)> {
    let names: Vec<String> = (0..COUNT).map(|number| format!("s-{number:03}")).collect();
    let mut claimed = Vec::new();
    for some in names.chunks(16) {
        claimed.extend(join_all(some.iter().map(|name| node.claim_at_last(name))).await);
    }
    names.into_iter().zip(claimed).collect()
}

fn releases(claimed: &[(String, Generation)]) -> Vec<Release> {
    let release = |(name, generation): &(String, Generation)| Release {
        id: id(name),
        generation: *generation,
        ending: ending(),
    };
    claimed.iter().map(release).collect()
}

/// Releases once more what was not: a machine that stands still exceeds the time for an answer.
async fn released_at_last(
    node: &Node,
    claimed: &[(String, Generation)],
    released: Vec<Result<(), RegistryError>>,
) {
    for (released, (name, generation)) in released.into_iter().zip(claimed) {
        if released.is_err() {
            node.release(name, *generation).await.expect("released");
        }
    }
}

/// At which revision who owns what was last written, by its key.
fn written(etcd: &Etcd) -> BTreeMap<String, i64> {
    let read = etcd.ctl(&["get", "--prefix", "/conman/owner/", "-w", "json"]);
    let read: Value = serde_json::from_str(&read.expect("read")).expect("JSON");
    let keys = read["kvs"].as_array().into_iter().flatten();
    keys.map(|one| {
        let key = one["key"].as_str().expect("a key").to_owned();
        (key, one["mod_revision"].as_i64().expect("a number"))
    })
    .collect()
}

/// The transactions that have written any of it since.
fn transactions(etcd: &Etcd, before: &BTreeMap<String, i64>) -> BTreeSet<i64> {
    let now = written(etcd).into_iter();
    let later = now.filter(|(key, revision)| before.get(key) != Some(revision));
    later.map(|(_, revision)| revision).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn releases_of_one_moment_take_few_transactions() {
    let Some(etcd) = Etcd::start() else { return };
    let a = Node::join(&etcd.url(), "a", patient()).await;
    let claimed = claimed(&a).await;
    let before = written(&etcd);
    assert_eq!(before.len(), COUNT);
    let released = a.registry.release(releases(&claimed)).await;
    released_at_last(&a, &claimed, released).await;
    let after = written(&etcd);
    assert!(after.iter().all(|(key, revision)| before[key] < *revision));
    let count = transactions(&etcd, &before).len();
    assert!(count <= MOST_TRANSACTIONS, "{count} for {COUNT} releases");
    let told = a.registry.list().await.expect("listed");
    assert!(told.iter().all(|record| record.state.is_ended()));
}

/// etcd has a later generation of its session.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_that_conflicts_keeps_none_of_the_others_back() {
    let Some(etcd) = Etcd::start() else { return };
    let a = Node::join(&etcd.url(), "a", patient()).await;
    let claimed = claimed(&a).await;
    let (first, others) = claimed.split_first().expect("there are some");
    let key = format!("/conman/owner/{}", first.0);
    let own = etcd.ctl(&["get", "--print-value-only", &key]);
    let mut own: Value = serde_json::from_str(&own.expect("read")).expect("JSON");
    own["generation"] = (first.1.get() + 1).into();
    etcd.ctl(&["put", &key, &own.to_string()]).expect("written");
    let before = written(&etcd);

    let mut released = a.registry.release(releases(&claimed)).await;
    released_at_last(&a, others, released.split_off(1)).await;
    let after = written(&etcd);
    let changed = before.keys().filter(|key| after[*key] > before[*key]);
    assert_eq!(changed.count(), others.len());
    let left = etcd.ctl(&["get", "--print-value-only", &key]);
    assert_eq!(left.expect("read").trim(), own.to_string());
}

/// Nothing is answered meanwhile, and nobody has given an answer up where no connection was begun.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transactions_of_releases_do_not_wait_for_each_others_answers() {
    let Some(etcd) = Etcd::start() else { return };
    let proxy = Proxy::to(etcd.address()).await;
    // A renewal gives up after twice this time, which a loaded machine needs to look at etcd.
    let timing = Timing {
        renew_ms: 5_000,
        ..patient()
    };
    let a = Node::join(&proxy.url(), "a", timing).await;
    // A machine that stands still makes the node give up, which shows nothing.
    until(
        "a second one is sent before the first is answered",
        async || {
            let claimed = claimed(&a).await;
            let before = written(&etcd);
            let connections = proxy.connections();
            proxy.set(Way::Held);
            let (registry, batch) = (Arc::clone(&a.registry), releases(&claimed));
            let releasing = tokio::spawn(async move { registry.release(batch).await });
            let mut several = false;
            while !several && proxy.connections() == connections {
                let seen = transactions(&etcd, &before).len();
                several = seen > 1 && proxy.connections() == connections;
            }
            proxy.set(Way::Open);
            let released = releasing.await.expect("no panic");
            released_at_last(&a, &claimed, released).await;
            several
        },
    )
    .await;
}
