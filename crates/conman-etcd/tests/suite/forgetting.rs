//! Nodes that are gone do not stay for ever, and come back as what they were.

use std::sync::Arc;

use async_trait::async_trait;
use conman_core::ownership::{
    FabricRecord, FenceHolds, FenceLinkError, FenceNews, PartRecord, Slot, SlotView, Underlay,
    WantedPart,
};
use conman_etcd::EtcdRegistry;
use conman_registry::{
    Announcement, FenceLink, FenceOrder, Fleet as _, ForgetError, PartError, PartRegistry as _,
    PeerStanding, Registry as _, RegistryError,
};
use conman_testkit::MemoryFence;
use jiff::Timestamp;
use tokio::sync::watch;

use crate::etcd::Etcd;
use crate::node::{Node, id, options, short, until};
use crate::proxy::{Proxy, Way};

/// A fence that its node reaches only once it may: all that comes before the rejoin is done by then.
#[derive(Debug)]
struct Withheld {
    fence: Arc<MemoryFence>,
    reached: watch::Sender<bool>,
}

#[async_trait]
impl FenceLink for Withheld {
    async fn connect(&self) -> Result<FenceHolds, FenceLinkError> {
        let mut reached = self.reached.subscribe();
        let reached = reached.wait_for(|reached| *reached).await;
        reached.map(drop).expect("the sender is here");
        self.fence.connect().await
    }

    async fn order(&self, order: FenceOrder) -> Result<(), FenceLinkError> {
        self.fence.order(order).await
    }

    async fn news(&self) -> FenceNews {
        self.fence.news().await
    }
}

/// A node that was forgotten, and has begun to come back: it has taken its record back, and not
/// joined. Also its incarnation before.
async fn between_recall_and_rejoin(etcd: &Etcd, b: &Node) -> (Node, Arc<Withheld>, u64) {
    let Node { registry, dir, .. } = Node::join(&etcd.url(), "a", short()).await;
    drop(registry);
    is_fenced(b, "a").await;
    let before = incarnation(etcd, "node/a").await;
    let died_at = fenced_at(b, "a");
    assert!(died_at.is_some());
    forget(b, "a").await.expect("it owns nothing");
    assert_eq!(keys_of(etcd, "a"), ["lost-node/a"]);
    let fence = Arc::new(MemoryFence::holding(Vec::new()));
    let withheld = Arc::new(Withheld {
        fence: Arc::clone(&fence),
        reached: watch::Sender::new(false),
    });
    let link = Arc::clone(&withheld) as Arc<dyn FenceLink>;
    let options = options(&etcd.url(), "a", short(), dir.path());
    let registry = EtcdRegistry::start(options, link).expect("it starts");
    until("its record is back", async || {
        keys_of(etcd, "a") == ["node/a"]
    })
    .await;
    assert_eq!(incarnation(etcd, "node/a").await, before);
    is_fenced(b, "a").await;
    assert_eq!(fenced_at(b, "a"), died_at, "it was not back");
    let node = Node {
        registry,
        fence,
        dir,
    };
    (node, withheld, before)
}

/// Every key below the prefix that ends with this node's name.
fn keys_of(etcd: &Etcd, name: &str) -> Vec<String> {
    let keys = etcd.ctl(&["get", "--prefix", "/conman/", "--keys-only"]);
    let keys = keys.expect("listed");
    let mut keys: Vec<String> = keys
        .split_whitespace()
        .filter_map(|key| key.strip_prefix("/conman/"))
        .filter(|key| key.ends_with(&format!("/{name}")))
        .map(str::to_owned)
        .collect();
    keys.sort();
    keys
}

async fn incarnation(etcd: &Etcd, key: &str) -> u64 {
    let text = etcd.ctl(&["get", "--print-value-only", &format!("/conman/{key}")]);
    let text = text.expect("read");
    let value: serde_json::Value = serde_json::from_str(text.trim()).expect("a record");
    value["incarnation"].as_u64().expect("a number")
}

fn standing(seen_by: &Node, name: &str) -> Option<PeerStanding> {
    let peers = seen_by.registry.peers();
    let peer = peers.iter().find(|peer| peer.name == name);
    peer.map(|peer| peer.standing)
}

fn fenced_at(seen_by: &Node, name: &str) -> Option<Timestamp> {
    let peers = seen_by.registry.peers();
    peers.iter().find(|peer| peer.name == name)?.fenced_at
}

async fn is_fenced(seen_by: &Node, name: &str) {
    until("it is fenced", async || {
        standing(seen_by, name) == Some(PeerStanding::Fenced)
    })
    .await;
}

/// Asks again while the registry does not answer.
async fn forget(node: &Node, name: &str) -> Result<(), ForgetError> {
    loop {
        match node.registry.forget_node(name).await {
            Err(ForgetError::Registry(_)) => {}
            definite => return definite,
        }
    }
}

#[tokio::test]
async fn a_node_is_forgotten_once_it_is_gone_and_owns_nothing_and_ends_what_it_left_when_it_is_back()
 {
    let Some(etcd) = Etcd::start() else { return };
    let a = Node::join(&etcd.url(), "a", short()).await;
    let b = Node::join(&etcd.url(), "b", short()).await;
    let lost = a.claim_at_last("s").await;
    let alive = forget(&b, "a").await.expect_err("it lives");
    assert!(matches!(alive, ForgetError::Alive { .. }), "{alive}");
    let Node { registry, dir, .. } = a;
    drop(registry);
    is_fenced(&b, "a").await;
    let owns = forget(&b, "a").await.expect_err("it owns one");
    assert!(
        matches!(&owns, ForgetError::Owns { count: 1, first, .. } if first == "s"),
        "{owns}"
    );
    b.claim_at_last("s").await;
    let before = incarnation(&etcd, "node/a").await;
    forget(&b, "a").await.expect("nothing keeps it");
    assert_eq!(keys_of(&etcd, "a"), ["lost-node/a"]);
    until("nobody sees it", async || standing(&b, "a").is_none()).await;
    let again = forget(&b, "a").await.expect_err("it is forgotten");
    assert!(matches!(again, ForgetError::Unknown { .. }), "{again}");

    // What its shim holds still is nobody's.
    let slot = Slot {
        session: "s".into(),
        generation: lost.get(),
    };
    let left = SlotView {
        slot,
        present: true,
        frozen: true,
        certified: false,
    };
    let a = Node::in_dir(dir, vec![left], |dir| {
        options(&etcd.url(), "a", short(), dir)
    });
    a.registry.announce(Announcement::default());
    a.live().await;
    let (id, generation) = a.next_condemned().await;
    assert_eq!((id.as_str(), generation), ("s", lost));
    assert!(incarnation(&etcd, "node/a").await > before, "it only grows");
    until("all of it is back", async || {
        let keys = keys_of(&etcd, "a");
        let back = ["heartbeat/a", "holder/a", "node/a", "peer/a"];
        back.iter().all(|key| keys.iter().any(|one| one == key))
            && !keys.iter().any(|one| one == "lost-node/a")
    })
    .await;
}

/// Claims a part for the sessions in a group, again while the registry does not answer.
async fn claim_part(node: &Node, group: String) {
    let wanted = WantedPart {
        fabric: FabricRecord {
            kind: "host-gw".to_owned(),
            pool: vec!["10.96.0.0/16".to_owned()],
            part: 24,
        },
        count: 256,
        groups: vec![group],
        underlay: Underlay::default(),
    };
    loop {
        match node.registry.claim_part(&wanted).await {
            Err(PartError::Registry(_)) => {}
            definite => return definite.expect("one is free"),
        }
    }
}

/// The holder of each part.
fn holders(etcd: &Etcd) -> Vec<String> {
    let parts = etcd.ctl(&[
        "get",
        "--prefix",
        "/conman/fabric/part/",
        "--print-value-only",
    ]);
    let parts = parts.expect("listed");
    let parts = parts.lines().filter(|line| !line.is_empty());
    let holder = |part| serde_json::from_str::<PartRecord>(part).map(|part| part.holder);
    parts
        .map(|part| holder(part).expect("a part").to_string())
        .collect()
}

#[tokio::test]
async fn the_parts_of_a_node_that_is_forgotten_are_deleted_and_not_before_it_owns_nothing() {
    let Some(etcd) = Etcd::start() else { return };
    let a = Node::join(&etcd.url(), "a", short()).await;
    let b = Node::join(&etcd.url(), "b", short()).await;
    claim_part(&b, "team".to_owned()).await;
    // More than one transaction deletes.
    for number in 0..40 {
        claim_part(&a, format!("team-{number}")).await;
    }
    a.claim_at_last("s").await;
    let before = holders(&etcd);
    assert!(before.len() > 40, "{before:?}");
    drop(a.registry);
    is_fenced(&b, "a").await;
    forget(&b, "a").await.expect_err("it owns one");
    assert_eq!(holders(&etcd), before);
    b.claim_at_last("s").await;
    forget(&b, "a").await.expect("nothing keeps it");
    let after = holders(&etcd);
    assert!(after.iter().all(|holder| holder == "b"), "{after:?}");
    assert!(!after.is_empty());
    assert_eq!(keys_of(&etcd, "a"), ["lost-node/a"]);
}

#[tokio::test]
async fn a_node_that_was_forgotten_while_it_was_cut_off_joins_anew_with_a_greater_incarnation() {
    let Some(etcd) = Etcd::start() else { return };
    let proxy = Proxy::to(etcd.address()).await;
    let a = Node::join(&proxy.url(), "a", short()).await;
    let b = Node::join(&etcd.url(), "b", short()).await;
    proxy.set(Way::Cut);
    is_fenced(&b, "a").await;
    let before = incarnation(&etcd, "node/a").await;
    forget(&b, "a").await.expect("it owns nothing");
    assert_eq!(keys_of(&etcd, "a"), ["lost-node/a"]);
    a.stands("not ready", |standing| !standing.is_ready()).await;
    proxy.set(Way::Open);
    a.live().await;
    assert!(incarnation(&etcd, "node/a").await > before, "it only grows");
    assert!(!keys_of(&etcd, "a").contains(&"lost-node/a".to_owned()));
    a.claim_at_last("s").await;
}

#[tokio::test]
async fn whoever_is_left_forgets_what_ended_on_a_node_that_is_gone_and_nothing_that_is_its_still() {
    let Some(etcd) = Etcd::start() else { return };
    let a = Node::join(&etcd.url(), "a", short()).await;
    let b = Node::join(&etcd.url(), "b", short()).await;
    let lost = a.claim_at_last("lost").await;
    let former = a.claim_at_last("ended").await;
    a.release("ended", former).await.expect("released");
    let ended = a.claim_at_last("ended").await;
    a.release("ended", ended).await.expect("released");
    drop(a.registry);
    is_fenced(&b, "a").await;
    let forget = async |name: &str, generation| {
        loop {
            match b.registry.forget(&id(name), generation).await {
                Err(RegistryError::Unavailable { .. }) => {}
                definite => return definite,
            }
        }
    };
    let owned = forget("lost", lost).await.expect_err("it may run");
    assert!(matches!(owned, RegistryError::Owned { .. }), "{owned}");
    let older = forget("ended", former).await.expect_err("another one");
    assert!(matches!(older, RegistryError::Superseded { .. }), "{older}");
    forget("ended", ended).await.expect("nobody's");
    let record = b.registry.get(&id("ended")).await.expect("readable");
    assert_eq!(record, None);
    let read = b.registry.get(&id("lost")).await.expect("readable");
    assert!(read.is_some_and(|record| record.generation == lost));
    let claimed = b.claim_at_last("lost").await;
    b.release("lost", claimed).await.expect("released");
    forget("lost", claimed).await.expect("nobody's");
    assert!(b.claim_at_last("ended").await > ended, "it only grows");
}

#[tokio::test]
async fn a_node_that_dies_between_its_recall_and_its_rejoin_joins_next_with_a_greater_incarnation()
{
    let Some(etcd) = Etcd::start() else { return };
    let b = Node::join(&etcd.url(), "b", short()).await;
    let (dead, _withheld, before) = between_recall_and_rejoin(&etcd, &b).await;
    let Node { registry, dir, .. } = dead;
    drop(registry);
    // It is as gone as it was, and may be forgotten as before.
    is_fenced(&b, "a").await;
    forget(&b, "a").await.expect("it owns nothing");
    assert_eq!(keys_of(&etcd, "a"), ["lost-node/a"]);
    assert_eq!(incarnation(&etcd, "lost-node/a").await, before);
    let a = Node::in_dir(dir, Vec::new(), |dir| {
        options(&etcd.url(), "a", short(), dir)
    });
    a.live().await;
    assert!(incarnation(&etcd, "node/a").await > before, "it only grows");
    assert!(!keys_of(&etcd, "a").contains(&"lost-node/a".to_owned()));
    a.claim_at_last("s").await;
}

#[tokio::test]
async fn a_node_that_is_forgotten_between_its_recall_and_its_rejoin_takes_its_record_back_again() {
    let Some(etcd) = Etcd::start() else { return };
    let b = Node::join(&etcd.url(), "b", short()).await;
    let (a, withheld, before) = between_recall_and_rejoin(&etcd, &b).await;
    is_fenced(&b, "a").await;
    forget(&b, "a").await.expect("it owns nothing");
    assert_eq!(keys_of(&etcd, "a"), ["lost-node/a"]);
    withheld.reached.send_replace(true);
    a.live().await;
    assert!(incarnation(&etcd, "node/a").await > before, "it only grows");
    assert!(!keys_of(&etcd, "a").contains(&"lost-node/a".to_owned()));
    a.claim_at_last("s").await;
}
