//! Who owns what among several nodes.

use std::time::{Duration, Instant};

use conman_core::ownership::{BootTime, Slot, SlotView, Timing};
use conman_etcd::Order;
use conman_registry::{Fleet, Located, RecordState, Registry, RegistryError, Standing};

use crate::etcd::Etcd;
use crate::node::{Node, ending, id, options, patient, short, until};
use crate::proxy::{Proxy, Way};

fn slot(session: &str, generation: u64) -> Slot {
    Slot {
        session: session.into(),
        generation,
    }
}

fn running(session: &str, generation: u64) -> SlotView {
    SlotView {
        slot: slot(session, generation),
        present: true,
        frozen: false,
        certified: false,
    }
}

#[tokio::test]
async fn whoever_asks_for_a_session_of_another_node_is_told_which_one() {
    let Some(etcd) = Etcd::start() else { return };
    let a = Node::join(&etcd.url(), "a", patient()).await;
    let b = Node::join(&etcd.url(), "b", patient()).await;
    let generation = a.claim("s").await.expect("it is free");
    let refused = b.claim("s").await.expect_err("it is owned");
    assert!(
        matches!(&refused, RegistryError::Elsewhere { node, .. } if node == "a"),
        "{refused}"
    );
    let sighting = b.registry.locate(&id("s"), false).await.expect("located");
    let located = sighting.located;
    let expected = Located {
        node: "a".to_owned(),
        generation,
        released: false,
    };
    assert_eq!(located, Some(expected));
    assert!(b.registry.list().await.expect("listed").is_empty());
    let all = b.registry.sessions(None, 10).await.expect("told of");
    let all = all.sessions;
    assert_eq!(all.len(), 1);
    assert_eq!((all[0].node.as_str(), &all[0].record.id), ("a", &id("s")));

    a.release("s", generation).await.expect("released");
    let next = b.claim("s").await.expect("released is free at once");
    assert!(next > generation);
    let late = a.release("s", generation).await.expect_err("long over");
    assert!(matches!(late, RegistryError::Superseded { .. }), "{late}");
}

#[tokio::test]
async fn a_silent_node_is_taken_over_but_not_before_its_fence_has_ended() {
    let Some(etcd) = Etcd::start() else { return };
    let a = Node::join(&etcd.url(), "a", short()).await;
    let b = Node::join(&etcd.url(), "b", short()).await;
    let generation = a.claim_at_last("s").await;
    let Node {
        registry, fence, ..
    } = a;
    drop(registry);
    let next = b.claim_at_last("s").await;
    let taken_at = boot_time();
    assert!(next > generation);
    // The latest deadline that the silent one can have told its fence of.
    let last_sent = BootTime(fence.deadline().0 - short().fence_ms);
    assert!(
        taken_at.since(last_sent) >= short().takeover_ms,
        "taken over {} ms after the last renewal was sent",
        taken_at.since(last_sent)
    );
    until("a is fenced for b", async || {
        let peers = b.registry.peers();
        let a = peers.iter().find(|peer| peer.name == "a");
        a.is_some_and(|peer| peer.standing == conman_registry::PeerStanding::Fenced)
    })
    .await;
}

#[tokio::test]
async fn a_node_that_comes_back_ends_what_it_lost_and_thaws_what_it_kept() {
    let Some(etcd) = Etcd::start() else { return };
    let proxy = Proxy::to(etcd.address()).await;
    let a = Node::join(&proxy.url(), "a", short()).await;
    let b = Node::join(&etcd.url(), "b", short()).await;
    let (lost, kept) = (a.claim_at_last("lost").await, a.claim_at_last("kept").await);
    proxy.set(Way::Cut);
    a.stands("fenced", |standing| !standing.is_ready()).await;
    a.fence.fire();
    let taken = b.claim_at_last("lost").await;
    assert!(taken > lost);
    proxy.set(Way::Open);
    until("it is killed, and what was kept is thawed", async || {
        a.fence.killed() == [slot("lost", lost.get())]
            && a.fence.thawed() == [slot("kept", kept.get())]
    })
    .await;
    // Nobody is led to what it has lost before it knows of that.
    let standing = a.registry.standing().borrow().clone();
    assert_eq!(standing, Standing::Fenced);
    let (id, generation) = a.next_condemned().await;
    assert_eq!((id.as_str(), generation), ("lost", lost));
    let refused = a.release("lost", lost).await.expect_err("it is b's");
    assert!(
        matches!(refused, RegistryError::Superseded { .. }),
        "{refused}"
    );
    a.live().await;
    until("the fence is open", async || !a.fence.is_closed()).await;
    let held = b.claim("kept").await.expect_err("a's again");
    assert!(
        matches!(
            held,
            RegistryError::Elsewhere { .. } | RegistryError::Unavailable { .. }
        ),
        "{held}"
    );
}

#[tokio::test]
async fn a_new_daemon_keeps_what_its_fence_holds_and_has_the_rest_ended() {
    let Some(etcd) = Etcd::start() else { return };
    let a = Node::join(&etcd.url(), "a", patient()).await;
    let held = a.claim("held").await.expect("free");
    let gone = a.claim("gone").await.expect("free");
    let Node { registry, dir, .. } = a;
    drop(registry);
    let slots = vec![running("held", held.get()), running("stray", 7)];
    let a = Node::in_dir(dir, slots, |dir| options(&etcd.url(), "a", patient(), dir));
    // At once: the installation is the same, and only one daemon can run in it.
    a.live().await;
    until("thawed", async || {
        a.fence.thawed() == [slot("held", held.get())]
    })
    .await;
    let mut condemned = Vec::new();
    for _ in 0..2 {
        let (id, generation) = a.next_condemned().await;
        condemned.push((id.as_str().to_owned(), generation.get()));
    }
    condemned.sort();
    assert_eq!(
        condemned,
        [("gone".to_owned(), gone.get()), ("stray".to_owned(), 7)]
    );
    a.release("gone", gone).await.expect("released");
    let stray = conman_proto::Generation::new(7).expect("not zero");
    let unknown = a.release("stray", stray).await.expect_err("nobody's");
    assert!(
        matches!(unknown, RegistryError::Superseded { .. }),
        "{unknown}"
    );
    let next = a.claim("gone").await.expect("free again");
    assert!(next > gone);
    let owned = a.claim("held").await.expect_err("it is held");
    assert!(
        matches!(owned, RegistryError::Owned { generation, .. } if generation == held),
        "{owned}"
    );
}

#[tokio::test]
async fn a_start_may_be_sent_while_it_is_this_nodes_and_not_after() {
    let Some(etcd) = Etcd::start() else { return };
    let a = Node::join(&etcd.url(), "a", patient()).await;
    let generation = a.claim("s").await.expect("free");
    let may = a.registry.may_start(&id("s"), generation).await;
    assert!(may.is_ok(), "{may:?}");
    let other = conman_proto::Generation::new(generation.get() + 1).expect("not zero");
    let may = a.registry.may_start(&id("s"), other).await;
    assert!(
        matches!(may, Err(RegistryError::Superseded { .. })),
        "{may:?}"
    );
    a.release("s", generation).await.expect("released");
    let may = a.registry.may_start(&id("s"), generation).await;
    assert!(
        matches!(may, Err(RegistryError::Superseded { .. })),
        "{may:?}"
    );
}

#[tokio::test]
async fn a_start_may_not_be_sent_while_ownership_has_lapsed_and_may_once_it_is_renewed() {
    let Some(etcd) = Etcd::start() else { return };
    let proxy = Proxy::to(etcd.address()).await;
    let a = Node::join(&proxy.url(), "a", short()).await;
    let generation = a.claim_at_last("s").await;
    proxy.set(Way::Cut);
    a.stands("fenced", |standing| matches!(standing, Standing::Fenced))
        .await;
    let may = a.registry.may_start(&id("s"), generation).await;
    assert!(
        matches!(&may, Err(error) if error.is_retryable()),
        "{may:?}"
    );
    proxy.set(Way::Open);
    until("it may be sent", async || {
        a.registry.may_start(&id("s"), generation).await.is_ok()
    })
    .await;
}

#[tokio::test]
async fn a_new_shim_costs_no_start_that_was_not_sent_to_the_old_one() {
    let Some(etcd) = Etcd::start() else { return };
    let a = Node::join(&etcd.url(), "a", patient()).await;
    let queued = a.claim("queued").await.expect("free");
    let sent = a.claim("sent").await.expect("free");
    let may = a.registry.may_start(&id("sent"), sent).await;
    assert!(may.is_ok(), "{may:?}");
    a.fence.break_connection();
    // In the order of their names, so that the other one would come first.
    let order = a.registry.orders().next().await;
    assert!(
        matches!(&order, Order::Condemned { id, generation, .. }
            if id.as_str() == "sent" && *generation == sent),
        "{order:?}"
    );
    // The new one may be closed, until the next renewal opens it.
    until("it may be sent to the new one", async || {
        match a.registry.may_start(&id("queued"), queued).await {
            Ok(()) => true,
            Err(error) => {
                assert!(error.is_retryable(), "{error}");
                false
            }
        }
    })
    .await;
    let may = a.registry.may_start(&id("sent"), sent).await;
    assert!(
        matches!(may, Err(RegistryError::Superseded { .. })),
        "{may:?}"
    );
}

#[tokio::test]
async fn what_ended_while_its_shim_was_replaced_ends_as_whoever_held_it_tells() {
    let Some(etcd) = Etcd::start() else { return };
    let a = Node::join(&etcd.url(), "a", patient()).await;
    let generation = a.claim("s").await.expect("free");
    let may = a.registry.may_start(&id("s"), generation).await;
    assert!(may.is_ok(), "{may:?}");
    let ended = SlotView {
        present: false,
        certified: true,
        ..running("s", generation.get())
    };
    a.fence.hold(vec![ended]);
    a.fence.break_connection();
    let order = a.registry.orders().next().await;
    let expected = Order::Ended {
        id: id("s"),
        generation,
    };
    assert_eq!(order, expected);
    a.release("s", generation).await.expect("released");
    let told = a.registry.get(&id("s")).await.expect("readable");
    let told = told.expect("it is told of").state;
    assert_eq!(told, RecordState::Ended(ending()));
}

fn boot_time() -> BootTime {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let millis = now.tv_sec * 1_000 + now.tv_nsec / 1_000_000;
    BootTime(u64::try_from(millis).expect("after boot"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_of_longer_times_is_taken_over_from_no_sooner_than_its_own_allow() {
    let Some(etcd) = Etcd::start() else { return };
    let short = short();
    let long = Timing {
        fence_ms: 7_000,
        takeover_ms: 2 * short.takeover_ms,
        ..short
    };
    let a = Node::join(&etcd.url(), "a", long).await;
    a.claim_at_last("s").await;
    let b = Node::join(&etcd.url(), "b", short).await;
    let renewed_at_the_earliest = Instant::now();
    until("renewed once more", async || !heartbeat(&etcd).is_empty()).await;
    let last = heartbeat(&etcd);
    until("renewed once more", async || heartbeat(&etcd) != last).await;
    let told = Duration::from_millis(long.silence_ms());
    until("known to whoever waits", async || {
        b.registry.takeover() >= told
    })
    .await;
    drop(a);
    b.claim_at_last("s").await;
    // A slow machine only makes it longer.
    assert!(renewed_at_the_earliest.elapsed() >= Duration::from_millis(long.silence_ms()));
}

fn heartbeat(etcd: &Etcd) -> String {
    etcd.ctl(&["get", "/conman/heartbeat/a", "--print-value-only"])
        .expect("read")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_read_of_one_node_or_session_hides_no_other() {
    let Some(etcd) = Etcd::start() else { return };
    let a = Node::join(&etcd.url(), "a", short()).await;
    for key in ["node/x", "heartbeat/a2", "owner/broken"] {
        etcd.ctl(&["put", &format!("/conman/{key}"), "garbage"])
            .expect("put");
    }
    let generation = a.claim_at_last("s").await;
    let refused = a
        .claim("broken")
        .await
        .expect_err("nobody knows whose it is");
    assert!(
        matches!(refused, RegistryError::Unavailable { .. }),
        "{refused}"
    );
    let b = Node::join(&etcd.url(), "b", short()).await;
    // Of a node that lives, whose sessions go on.
    let c = Node::join(&etcd.url(), "c", short()).await;
    until("seen", async || b.registry.peers().len() == 3).await;
    etcd.ctl(&["put", "/conman/takeover-delay/c", "garbage"])
        .expect("put");
    drop(a);
    assert!(b.claim_at_last("s").await > generation);
    c.claim_at_last("t").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ownership_with_fields_of_a_later_version_is_taken_over_like_any_other() {
    let Some(etcd) = Etcd::start() else { return };
    let a = Node::join(&etcd.url(), "a", short()).await;
    let first = a.claim_at_last("s").await;
    let ended = a.claim("t").await.expect("free");
    a.release("t", ended).await.expect("released");
    let thread = std::sync::Arc::downgrade(&a.registry);
    drop(a.registry);
    until("it has ended", async || thread.upgrade().is_none()).await;
    let keys = [
        "node/a",
        "heartbeat/a",
        "takeover-delay/a",
        "owner/s",
        "owner/t",
        "session/s",
        "session/t",
        "holder/a",
        "peer/a",
        "schema",
    ];
    for key in keys.map(|key| format!("/conman/{key}")) {
        let Ok(text) = etcd.ctl(&["get", &key, "--print-value-only"]) else {
            continue;
        };
        let Ok(mut later) = serde_json::from_str::<serde_json::Value>(text.trim()) else {
            continue;
        };
        later["hibernates"] = true.into();
        etcd.ctl(&["put", &key, &later.to_string()]).expect("put");
    }
    let b = Node::join(&etcd.url(), "b", short()).await;
    assert!(b.claim_at_last("s").await > first);
    let again = b.claim("t").await.expect("it was released");
    assert!(again > ended);
    b.release("t", again).await.expect("released");
    b.registry
        .forget(&"t".parse().expect("an id"), again)
        .await
        .expect("forgotten");
}

#[tokio::test]
async fn what_is_deleted_while_it_is_claimed_by_its_record_does_not_come_back() {
    const ROUNDS: usize = 64;
    let Some(etcd) = Etcd::start() else { return };
    let a = Node::join(&etcd.url(), "a", patient()).await;
    let b = Node::join(&etcd.url(), "b", patient()).await;
    let mut came_back = Vec::new();
    for round in 0..ROUNDS {
        let name = format!("s-{round}");
        let generation = a.claim(&name).await.expect("free");
        a.release(&name, generation).await.expect("released");
        let id = id(&name);
        let read = a.registry.get(&id).await.expect("read").expect("ended");
        let spec = crate::node::spec();
        let (forgotten, claimed) = tokio::join!(
            a.registry.forget(&id, generation),
            b.registry.claim_by(&id, &spec, Some(&read)),
        );
        match (forgotten, claimed) {
            (Ok(()), Ok(claimed)) => came_back.push(claimed.id),
            (Ok(()), Err(error)) => {
                assert!(matches!(error, RegistryError::Changed { .. }), "{error}");
                assert_eq!(a.registry.get(&id).await.expect("read"), None);
            }
            (Err(_), claimed) => assert!(claimed.is_ok(), "nobody had it: {claimed:?}"),
        }
    }
    assert!(came_back.is_empty(), "deleted, and claimed: {came_back:?}");
}

#[tokio::test]
async fn a_record_that_cannot_be_read_is_left_out_and_named_and_stands_before_no_other() {
    let Some(etcd) = Etcd::start() else { return };
    let a = Node::join(&etcd.url(), "a", patient()).await;
    for name in ["s-1", "s-2", "s-3"] {
        a.claim(name).await.expect("free");
    }
    let good = etcd.ctl(&["get", "--print-value-only", "/conman/session/s-2"]);
    let good = good.expect("it is there");
    for (name, value) in [
        ("s-0", "{}"),
        ("s-1/x", "garbage"),
        ("s-2", "garbage"),
        ("s-22", good.trim()),
        ("NO NAME", "garbage"),
        ("zz/z", "garbage"),
    ] {
        let key = format!("/conman/session/{name}");
        etcd.ctl(&["put", &key, value]).expect("written");
    }
    let b = Node::join(&etcd.url(), "b", patient()).await;
    for limit in [1, 2, 100] {
        let (mut seen, mut unreadable, mut after) = (Vec::new(), Vec::new(), None);
        loop {
            let page = b.registry.sessions(after.as_ref(), limit).await;
            let page = page.expect("told of");
            assert!(page.sessions.len() <= limit, "{limit} at a time");
            seen.extend(page.sessions.into_iter().map(|one| one.record.id));
            unreadable.extend(page.unreadable);
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        assert_eq!(seen, [id("s-1"), id("s-3")], "{limit} at a time");
        assert_eq!(unreadable.len(), 6, "{unreadable:?}");
        assert!(
            unreadable[3].contains("/conman/session/s-2 ") && unreadable[3].contains("PUT"),
            "{unreadable:?}"
        );
    }
    // None of them is b's; and a knows what it has claimed.
    assert_eq!(b.registry.list().await.expect("listed"), []);
    let listed = a.registry.list().await.expect("listed");
    let listed: Vec<_> = listed.into_iter().map(|record| record.id).collect();
    assert_eq!(listed, ["s-1", "s-2", "s-3"].map(id));
}

#[tokio::test]
async fn what_no_record_tells_of_is_ended_by_itself_and_is_nobody_elses_before() {
    let Some(etcd) = Etcd::start() else { return };
    let a = Node::join(&etcd.url(), "a", patient()).await;
    let mut generations = Vec::new();
    for name in ["gone", "good", "odd", "theirs"] {
        generations.push(a.claim(name).await.expect("free"));
    }
    let Node { registry, dir, .. } = a;
    drop(registry);
    let key = |name: &str| format!("/conman/session/{name}");
    let value = |name: &str| {
        let value = etcd.ctl(&["get", "--print-value-only", &key(name)]);
        value.expect("read").trim().to_owned()
    };
    etcd.ctl(&["put", &key("odd"), "garbage"]).expect("written");
    etcd.ctl(&["del", &key("gone")]).expect("deleted");
    let theirs = value("theirs").replace(r#""node":"a""#, r#""node":"b""#);
    etcd.ctl(&["put", &key("theirs"), &theirs])
        .expect("written");

    let b = Node::join(&etcd.url(), "b", patient()).await;
    let slots = ["gone", "good", "odd", "theirs"]
        .into_iter()
        .zip(&generations);
    let slots = slots.map(|(name, generation)| running(name, generation.get()));
    let a = Node::in_dir(dir, slots.collect(), |dir| {
        options(&etcd.url(), "a", patient(), dir)
    });
    a.live().await;
    assert!(a.fence.killed().is_empty(), "nothing was asked for yet");
    let listed = a.registry.list().await.expect("the rest can be read");
    let listed: Vec<_> = listed.into_iter().map(|record| record.id).collect();
    assert_eq!(listed, [id("good")]);
    for (name, generation) in [("gone", 0), ("odd", 2), ("theirs", 3)] {
        let generation = generations[generation];
        assert_eq!(a.next_condemned().await, (id(name), generation));
        until("the fence kills it", async || {
            a.fence.killed().contains(&slot(name, generation.get()))
        })
        .await;
        // Something of it may run.
        let refused = b.claim(name).await.expect_err("it is a's");
        assert!(
            matches!(&refused, RegistryError::Elsewhere { node, .. } if node == "a"),
            "{refused}"
        );
    }
    let unread = a.registry.get(&id("odd")).await.expect_err("it is garbage");
    assert!(
        matches!(&unread, RegistryError::Unreadable { reason } if reason.contains(&key("odd"))),
        "{unread}"
    );

    // Nothing of them is left. There is no record of this node's to write that down in.
    for (name, generation) in [("gone", 0), ("odd", 2), ("theirs", 3)] {
        let over = a.release(name, generations[generation]).await;
        let over = over.expect_err("nothing is recorded");
        assert!(matches!(over, RegistryError::Superseded { .. }), "{over}");
        until("it is released", async || {
            let sighting = b.registry.locate(&id(name), true).await;
            let located = sighting.expect("located").located;
            located.is_some_and(|located| located.released)
        })
        .await;
    }
    assert_eq!(value("odd"), "garbage", "it stays as it was");
    assert_eq!(value("theirs"), theirs);
    assert_eq!(value("gone"), "");
    let next = b.claim("odd").await.expect("free");
    assert!(next > generations[2]);
    let good = slot("good", generations[1].get());
    assert!(a.fence.thawed().contains(&good) && !a.fence.killed().contains(&good));
}
