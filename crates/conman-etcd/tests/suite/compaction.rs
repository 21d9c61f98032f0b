//! What becomes of etcd's history.

use std::sync::Arc;
use std::time::Duration;

use conman_registry::{Announcement, Fleet, Registry};
use futures_util::future::join_all;

use crate::etcd::Etcd;
use crate::node::{Node, options, patient, until};
use crate::proxy::{Proxy, Way};

fn compacting(etcd: &Etcd, name: &str, every: Option<Duration>) -> Node {
    let dir = tempfile::tempdir().expect("a directory");
    Node::in_dir(dir, Vec::new(), |dir| {
        let mut options = options(&etcd.url(), name, patient(), dir);
        options.compact_every = every;
        options
    })
}

fn has_history(etcd: &Etcd, revision: i64) -> bool {
    let read = etcd.ctl(&["get", "/conman/schema", "--rev", &revision.to_string()]);
    match read {
        Ok(_) => true,
        Err(error) if error.contains("compacted") => false,
        Err(error) => panic!("{error}"),
    }
}

#[tokio::test]
async fn history_goes_by_itself_and_nobody_misses_it() {
    const EVERY: Duration = Duration::from_secs(1);
    let Some(etcd) = Etcd::start() else { return };
    let a = compacting(&etcd, "a", Some(EVERY));
    a.live().await;
    let b = compacting(&etcd, "b", Some(EVERY));
    b.live().await;
    for round in 0..3 {
        let name = format!("s-{round}");
        a.claim_at_last(&name).await;
        let now = etcd.revision();
        until("what was current is compacted away", async || {
            !has_history(&etcd, now)
        })
        .await;
        let told = b.registry.sessions(None, 10).await.expect("told of");
        assert_eq!(told.sessions.len(), round + 1);
        assert_eq!(a.registry.list().await.expect("listed").len(), round + 1);
        let label = format!("round-{round}");
        a.registry.announce(Announcement {
            templates: vec![label.clone()],
            ..Announcement::default()
        });
        until("b hears of it", async || {
            let peers = b.registry.peers();
            let a = peers.iter().find(|peer| peer.name == "a");
            let said = a.and_then(|peer| peer.announcement.as_ref());
            said.is_some_and(|said| said.templates == [label.as_str()])
        })
        .await;
    }
    for node in [&a, &b] {
        assert!(node.registry.standing().borrow().is_ready());
    }
}

#[tokio::test]
async fn history_goes_though_the_first_of_the_nodes_does_not_see_to_it() {
    let Some(etcd) = Etcd::start() else { return };
    let a = compacting(&etcd, "a", None);
    a.live().await;
    let b = compacting(&etcd, "b", Some(Duration::from_millis(500)));
    b.live().await;
    until("b has heard of a", async || b.registry.peers().len() == 2).await;
    let now = etcd.revision();
    until("what was current is compacted away", async || {
        !has_history(&etcd, now)
    })
    .await;
    for node in [&a, &b] {
        assert!(node.registry.standing().borrow().is_ready());
    }
}

#[tokio::test]
async fn history_stays_where_no_node_is_to_compact_it() {
    let Some(etcd) = Etcd::start() else { return };
    let a = compacting(&etcd, "a", None);
    a.live().await;
    let b = compacting(&etcd, "b", None);
    b.live().await;
    let now = etcd.revision();
    until("heartbeats have come", async || etcd.revision() > now + 20).await;
    assert!(has_history(&etcd, now));
}

#[tokio::test]
async fn a_list_whose_moment_is_compacted_away_is_of_a_later_one() {
    // More than three pages of who owns what.
    const COUNT: usize = 1_600;
    let Some(etcd) = Etcd::start() else { return };
    let proxy = Proxy::to(etcd.address()).await;
    let a = Node::join(&proxy.url(), "a", patient()).await;
    let names: Vec<String> = (0..COUNT).map(|number| format!("s-{number:04}")).collect();
    for some in names.chunks(16) {
        join_all(some.iter().map(|name| a.claim_at_last(name))).await;
    }
    proxy.set(Way::Slow);
    let before = etcd.count_of("Range");
    let registry = Arc::clone(&a.registry);
    let list = tokio::spawn(async move { registry.list().await });
    until("the first page was asked for", async || {
        etcd.count_of("Range") > before
    })
    .await;
    etcd.ctl(&["put", "other", "value"]).expect("written");
    etcd.ctl(&["compact", &etcd.revision().to_string()])
        .expect("compacted");
    let listed = list.await.expect("no panic").expect("listed");
    assert_eq!(listed.len(), COUNT);
}
