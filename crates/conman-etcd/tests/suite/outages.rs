//! Lost answers, restarts, compaction, and a store that has forgotten.

use conman_proto::Generation;
use conman_registry::{Fleet, Registry, Release};

use crate::etcd::Etcd;
use crate::log;
use crate::node::{Node, ending, id, options, patient, short, until};
use crate::proxy::{Proxy, Way};

#[tokio::test]
async fn a_claim_whose_answer_is_lost_is_one_generation_and_known_in_the_end() {
    let Some(etcd) = Etcd::start() else { return };
    let proxy = Proxy::to(etcd.address()).await;
    let a = Node::join(&proxy.url(), "a", patient()).await;
    let b = Node::join(&etcd.url(), "b", patient()).await;
    // Known before, so that the claim's own transaction is all that is under way.
    let before = a.claim("s").await.expect("free");
    a.release("s", before).await.expect("released");
    proxy.set(Way::Deaf);
    let registry = std::sync::Arc::clone(&a.registry);
    let claim = tokio::spawn(async move {
        let claimed = registry.claim(&id("s"), &crate::node::spec()).await;
        claimed.map(|record| record.generation)
    });
    // Its look may be lost as well, and then it is asked for again once the way is open.
    until("the claim has reached etcd, or was given up", async || {
        let located = b.registry.locate(&id("s"), true).await;
        let arrived = located
            .is_ok_and(|sighting| sighting.located.is_some_and(|one| one.generation > before));
        arrived || claim.is_finished()
    })
    .await;
    proxy.set(Way::Open);
    let claimed = claim.await.expect("no panic");
    let sighting = b.registry.locate(&id("s"), true).await.expect("located");
    let located = sighting.located;
    let located = located.expect("a record");
    match claimed {
        Ok(generation) => {
            assert_eq!(located.generation, generation);
            assert_eq!((located.node.as_str(), located.released), ("a", false));
            assert_eq!(generation.get(), before.get() + 1, "claimed once");
        }
        // Nothing was sent while the way was deaf.
        Err(error) => {
            assert!(error.is_retryable(), "{error}");
            let generation = a.claim_at_last("s").await;
            assert_eq!(generation.get(), before.get() + 1, "claimed once");
        }
    }
}

#[tokio::test]
async fn a_restart_of_etcd_costs_nothing_but_the_time_it_takes() {
    let Some(mut etcd) = Etcd::start() else {
        return;
    };
    let a = Node::join(&etcd.url(), "a", patient()).await;
    let generation = a.claim("s").await.expect("free");
    etcd.kill();
    let gone = a.claim("t").await.expect_err("nobody answers");
    assert!(gone.is_retryable(), "{gone}");
    etcd.begin();
    a.claim_at_last("t").await;
    a.release("s", generation).await.expect("still ours");
    assert!(a.registry.standing().borrow().is_ready());
}

#[tokio::test]
async fn ownership_that_lapses_in_an_outage_comes_back_with_it() {
    let Some(mut etcd) = Etcd::start() else {
        return;
    };
    log::keep();
    let a = Node::join(&etcd.url(), "a", short()).await;
    let generation = a.claim_at_last("s").await;
    etcd.kill();
    a.stands("fenced", |standing| {
        matches!(standing, conman_registry::Standing::Fenced)
    })
    .await;
    // With the reason of its last try, which names the endpoint.
    let told = log::lines(&etcd.url()).into_iter().map(|line| line.text);
    let told = told.collect::<Vec<_>>().join("\n");
    assert!(told.contains("ownership has lapsed"), "{told}");
    let why = a.registry.why_late().expect("it is late");
    assert!(why.contains(&etcd.url()), "{why}");
    let refused = a.claim("t").await.expect_err("it may not");
    assert!(refused.to_string().contains(&etcd.url()), "{refused}");
    a.fence.fire();
    etcd.begin();
    a.live().await;
    until("thawed", async || {
        let thawed = a.fence.thawed();
        thawed.len() == 1 && thawed[0].generation == generation.get()
    })
    .await;
}

/// Whoever told of it tells it once, as a preempted node does.
#[tokio::test]
async fn an_ending_that_is_told_while_its_node_may_not_write_is_what_is_recorded_later() {
    // The least that holds a node's records and a little of heartbeats.
    let Some(etcd) = Etcd::start_bounded(&["--quota-backend-bytes", "2097152"]) else {
        return;
    };
    let a = Node::join(&etcd.url(), "a", short()).await;
    let generation = a.claim_at_last("s").await;
    let junk = "x".repeat(65_536);
    until("reads are answered alone", async || {
        etcd.ctl(&["put", "junk", &junk]).is_err()
    })
    .await;
    a.stands("fenced", |standing| {
        matches!(standing, conman_registry::Standing::Fenced)
    })
    .await;
    a.fence.fire();
    let release = Release {
        id: id("s"),
        generation,
        ending: ending(),
    };
    let refused = a.registry.release(vec![release]).await.remove(0);
    let refused = refused.expect_err("nothing can be written");
    assert!(refused.is_retryable(), "{refused}");
    let revision = etcd.revision().to_string();
    for arguments in [
        &["compact", &revision, "--physical"] as &[&str],
        &["defrag"],
        &["alarm", "disarm"],
    ] {
        etcd.ctl(arguments).expect("there is space again");
    }
    until("it is released", async || {
        let located = a.registry.locate(&id("s"), true).await;
        located.is_ok_and(|sighting| sighting.located.is_some_and(|one| one.released))
    })
    .await;
    let record = etcd.ctl(&["get", "/conman/session/s", "--print-value-only"]);
    let record = record.expect("read");
    assert!(record.contains(&ending().reason), "{record}");
}

#[tokio::test]
async fn compaction_loses_nothing_that_is_told_or_owned() {
    let Some(etcd) = Etcd::start() else { return };
    let a = Node::join(&etcd.url(), "a", patient()).await;
    let b = Node::join(&etcd.url(), "b", patient()).await;
    for round in 0..20 {
        a.claim(&format!("s-{round}")).await.expect("free");
    }
    etcd.ctl(&["compact", &etcd.revision().to_string()])
        .expect("compacted");
    let told = b.registry.sessions(None, 100).await.expect("told of");
    assert_eq!(told.sessions.len(), 20);
    a.registry.announce(conman_registry::Announcement {
        draining: true,
        ..Default::default()
    });
    until("b hears that a drains", async || {
        let peers = b.registry.peers();
        let a = peers.iter().find(|peer| peer.name == "a");
        let said = a.and_then(|peer| peer.announcement.as_ref());
        said.is_some_and(|said| said.draining)
    })
    .await;
    assert_eq!(a.registry.list().await.expect("listed").len(), 20);
}

#[tokio::test]
async fn a_store_that_went_back_is_refused_until_a_floor_is_named() {
    let Some(mut etcd) = Etcd::start() else {
        return;
    };
    let a = Node::join(&etcd.url(), "a", patient()).await;
    for _ in 0..5 {
        let generation = a.claim("s").await.expect("free");
        a.release("s", generation).await.expect("released");
    }
    let Node { registry, dir, .. } = a;
    let thread = std::sync::Arc::downgrade(&registry);
    drop(registry);
    assert!(thread.upgrade().is_none(), "nobody else holds it");
    let seen = dir.path().join("etcd-seen.json");
    until("what was seen is written down", async || seen.exists()).await;
    etcd.wipe();
    etcd.begin();
    let a = Node::in_dir(dir, Vec::new(), |dir| {
        options(&etcd.url(), "a", patient(), dir)
    });
    let reason = a.waits_since("gone back").await;
    assert!(reason.contains("--generation-floor"), "{reason}");
    let refused = a.claim("s").await.expect_err("not before it is accepted");
    assert!(refused.to_string().contains("gone back"), "{refused}");
    let Node { registry, dir, .. } = a;
    drop(registry);
    let a = Node::in_dir(dir, Vec::new(), |dir| {
        let mut options = options(&etcd.url(), "a", patient(), dir);
        options.accept_above = Generation::new(1_000);
        options
    });
    a.live().await;
    assert_eq!(a.claim("s").await.expect("free").get(), 1_001);
}

/// An operator may need hours until a node accepts it, and other nodes recognize it by its revision.
#[tokio::test]
async fn a_store_that_went_back_gets_no_announcements() {
    let Some(mut etcd) = Etcd::start() else {
        return;
    };
    let a = Node::join(&etcd.url(), "a", short()).await;
    a.claim_at_last("s").await;
    etcd.wipe();
    etcd.begin();
    a.waits_since("gone back").await;
    let revision = etcd.revision();
    a.registry.announce(conman_registry::Announcement {
        draining: true,
        ..Default::default()
    });
    // Each read of the other nodes is followed by an announcement, if one is due.
    let reads = etcd.count_of("Txn");
    until("it has read the nodes several times", async || {
        etcd.count_of("Txn") > reads + 10
    })
    .await;
    assert_eq!(etcd.revision(), revision, "something was written");
}
