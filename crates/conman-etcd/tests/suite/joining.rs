//! What keeps a node from joining, and what it says then.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use conman_core::ownership::{Slot, SlotView};
use conman_etcd::{EtcdAccess, EtcdCredentials, EtcdOptions, EtcdRegistry, EtcdStartError};
use conman_proto::Generation;
use conman_registry::{
    Announcement, EmbeddedOptions, EmbeddedRegistry, Fleet as _, Registry, RegistryError, Standing,
};
use conman_testkit::MemoryFence;

use crate::etcd::Etcd;
use crate::node::{Node, StateDir, id, options, patient, short, spec, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_nodes_have_one_key_whoever_asks_for_it_first() {
    let Some(etcd) = Etcd::start() else { return };
    let a = Node::join(&etcd.url(), "a", patient()).await;
    let b = Node::join(&etcd.url(), "b", patient()).await;
    let ask = async |node: &Node| node.registry.shared_key().await.expect("a key");
    let (one, other) = tokio::join!(ask(&a), ask(&b));
    assert!(one.is_some_and(|key| key != [0; 32]) && one == other);
    assert_eq!(ask(&a).await, one);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_key_is_asked_for_again_while_an_etcd_that_let_the_node_join_is_away() {
    let Some(mut etcd) = Etcd::start() else {
        return;
    };
    let a = Node::join(&etcd.url(), "a", patient()).await;
    etcd.kill();
    let registry = Arc::clone(&a.registry);
    let asking = tokio::spawn(async move { registry.shared_key().await });
    // Nobody tells when the first read has failed: its time is given it.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let beginning = tokio::task::spawn_blocking(move || {
        etcd.begin();
        etcd
    });
    let _etcd = beginning.await.expect("etcd is back");
    let key = asking.await.expect("no panic").expect("a key");
    assert!(key.is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_an_earlier_life_announced_is_told_no_more_once_the_next_one_has_joined() {
    let Some(etcd) = Etcd::start() else { return };
    let b = Node::join(&etcd.url(), "b", patient()).await;
    let heard = || {
        let peers = b.registry.peers();
        let a = peers.iter().find(|peer| peer.name == "a");
        a.and_then(|peer| peer.announcement.clone())
    };
    let said = |version: &str| Announcement {
        version: version.to_owned(),
        ..Announcement::default()
    };
    let a = Node::join(&etcd.url(), "a", patient()).await;
    a.registry.announce(said("1"));
    until("it is heard", async || heard() == Some(said("1"))).await;
    let Node { registry, dir, .. } = a;
    drop(registry);
    let again = Node::in_dir(dir, Vec::new(), |dir| {
        options(&etcd.url(), "a", patient(), dir)
    });
    again.live().await;
    until("that is over", async || heard().is_none()).await;
    again.registry.announce(said("2"));
    until("it is heard", async || heard() == Some(said("2"))).await;
}

#[tokio::test]
async fn a_node_waits_for_an_etcd_that_does_not_answer_and_claims_nothing() {
    let Some(mut etcd) = Etcd::start() else {
        return;
    };
    etcd.kill();
    let a = Node::begin(&etcd.url(), "a", patient());
    let reason = a.waits_since("cannot be connected to").await;
    assert!(reason.contains(&etcd.url()), "{reason}");
    let refused = a.claim("s").await.expect_err("it has not joined");
    assert!(
        matches!(&refused, RegistryError::Unavailable { reason } if reason.contains("not joined")),
        "{refused}"
    );
    assert!(a.fence.is_closed(), "nothing runs that may not be ours");
    etcd.begin();
    a.live().await;
    a.claim("s").await.expect("free");
}

#[tokio::test]
async fn of_two_conmans_with_one_name_the_second_waits_until_the_first_is_silent() {
    let Some(etcd) = Etcd::start() else { return };
    let first = Node::join(&etcd.url(), "a", short()).await;
    let generation = first.claim_at_last("s").await;
    let second = Node::begin(&etcd.url(), "a", short());
    let reason = second.waits_since("and renews").await;
    assert!(reason.contains("node.name"), "{reason}");
    assert!(second.claim("s").await.is_err());
    first.live().await;
    drop(first);
    second.live().await;
    // By the registry it is the name's; what ran of it has ended with the first one's fence.
    let (id, _) = second.next_condemned().await;
    assert_eq!(id.as_str(), "s");
    second.release("s", generation).await.expect("released");
}

#[tokio::test]
async fn a_copy_of_a_state_directory_on_another_machine_is_refused_as_that() {
    let Some(etcd) = Etcd::start() else { return };
    let first = Node::join(&etcd.url(), "a", short()).await;
    let generation = first.claim_at_last("s").await;
    let copied = first.dir.path().display().to_string();
    let dir = tempfile::tempdir().expect("a directory");
    let copy = Node::in_dir(dir, Vec::new(), |dir| {
        let mut options = options(&etcd.url(), "a", short(), dir);
        options.instance = copied;
        options.boot_id = "11111111-1111-1111-1111-111111111111".to_owned();
        options
    });
    let reason = copy.waits_since("state directory is a copy").await;
    assert!(reason.contains("node.name"), "{reason}");
    assert!(copy.claim("s").await.is_err());
    first.live().await;
    first.release("s", generation).await.expect("released");
}

#[tokio::test]
async fn keys_of_something_else_and_of_other_formats_are_left_alone() {
    let Some(etcd) = Etcd::start() else { return };
    etcd.ctl(&["put", "/foreign/key", "value"]).expect("put");
    etcd.ctl(&["put", "/newer/schema", r#"{"format":3}"#])
        .expect("put");
    etcd.ctl(&["put", "/strange/schema", "v1"]).expect("put");
    let older = [
        ("schema", r#"{"format":1}"#),
        ("floor", r#"{"generation":20}"#),
        (
            "own/s",
            r#"{"owner":"a","incarnation":1,"generation":31,"state":"owned"}"#,
        ),
    ];
    for (key, text) in older {
        etcd.ctl(&["put", &format!("/older/{key}"), text])
            .expect("put");
    }
    for (prefix, says, remedy) in [
        ("/foreign/", "something else", "registry.prefix"),
        ("/newer/", "format 3", "newer conman"),
        ("/strange/", "something else", "registry.prefix"),
        ("/older/", "format 1", "conman serve --generation-floor 31"),
    ] {
        let dir = tempfile::tempdir().expect("a directory");
        let node = Node::in_dir(dir, Vec::new(), |dir| {
            let mut options = options(&etcd.url(), "a", patient(), dir);
            options.prefix = prefix.to_owned();
            options
        });
        let reason = node.waits_since(says).await;
        assert!(reason.contains(remedy), "{reason}");
        let keys = etcd.ctl(&["get", "--prefix", prefix, "--keys-only"]);
        let expected = if prefix == "/older/" { 3 } else { 1 };
        assert_eq!(keys.expect("listed").split_whitespace().count(), expected);
    }
}

#[tokio::test]
async fn whoever_etcd_does_not_know_is_told_where_to_look() {
    let Some(etcd) = Etcd::start() else { return };
    etcd.asks_for_password_of_root("secret");
    let with = |user: &str, password: &str| {
        let credentials = EtcdCredentials {
            user: user.to_owned(),
            password: password.to_owned(),
        };
        let dir = tempfile::tempdir().expect("a directory");
        Node::in_dir(dir, Vec::new(), |dir| {
            let mut options = options(&etcd.url(), "a", patient(), dir);
            options.access.credentials = Some(credentials);
            options
        })
    };
    let wrong = with("root", "wrong");
    let reason = wrong.waits_since("cannot sign in").await;
    assert!(reason.contains("registry.password_file"), "{reason}");
    let nobody = Node::begin(&etcd.url(), "b", patient());
    nobody
        .stands("refused", |standing| {
            matches!(standing, Standing::Joining { reason } if reason.contains("etcd refuses"))
        })
        .await;
    let right = with("root", "secret");
    right.live().await;
    right.claim("s").await.expect("free");
    assert_eq!(right.registry.list().await.expect("listed").len(), 1);
}

#[tokio::test]
async fn a_password_is_replaced_while_the_node_runs_whether_here_or_at_etcd_first() {
    let Some(etcd) = Etcd::start() else { return };
    etcd.asks_for_password_of_root("first");
    let access = |password: &str| EtcdAccess {
        endpoints: vec![etcd.url()],
        credentials: Some(EtcdCredentials {
            user: "root".to_owned(),
            password: password.to_owned(),
        }),
        tls: None,
    };
    let dir = tempfile::tempdir().expect("a directory");
    let node = Node::in_dir(dir, Vec::new(), |dir| {
        let mut options = options(&etcd.url(), "a", patient(), dir);
        options.access = access("first");
        options
    });
    node.live().await;
    node.claim_at_last("s").await;

    // Who is let in stays so, though etcd does not know this password yet.
    let renewed = node.registry.renew_access(&access("second"));
    renewed.expect("usable");
    node.claim_at_last("t").await;
    etcd.replace_password_of_root("first", "second");
    node.claim_at_last("u").await;

    etcd.replace_password_of_root("second", "third");
    let refused = node.claim("v").await.expect_err("nobody knows it here");
    assert!(
        matches!(&refused, RegistryError::Unavailable { .. }),
        "{refused}"
    );
    let renewed = node.registry.renew_access(&access("third"));
    renewed.expect("usable");
    node.claim_at_last("v").await;
    assert_eq!(node.registry.list().await.expect("listed").len(), 4);
}

#[tokio::test]
async fn a_node_joins_once_it_is_written_down_which_etcd_it_has_seen() {
    let Some(etcd) = Etcd::start() else { return };
    let dir = tempfile::tempdir().expect("a directory");
    let (seen, new) = ("etcd-seen.json", "etcd-seen.json.new");
    let (seen, new) = (dir.path().join(seen), dir.path().join(new));
    // In the way of what is written.
    std::fs::create_dir(&new).expect("made");
    let a = Node::in_dir(dir, Vec::new(), |dir| {
        options(&etcd.url(), "a", patient(), dir)
    });
    let reason = a.waits_since("etcd-seen.json").await;
    assert!(reason.contains("`state_dir`"), "{reason}");
    assert!(a.claim("s").await.is_err(), "it has not joined");
    std::fs::remove_dir(&new).expect("removed");
    a.live().await;
    assert!(seen.exists());
}

#[tokio::test]
async fn a_node_whose_record_leaves_no_incarnation_says_so_until_it_is_mended() {
    let Some(etcd) = Etcd::start() else { return };
    let before = Node::join(&etcd.url(), "b", patient()).await;
    let put = |incarnation: u64| {
        let record = format!("{{\"incarnation\":{incarnation},\"state\":\"fenced\"}}");
        etcd.ctl(&["put", "/conman/node/a", &record])
            .expect("written");
    };
    put(u64::MAX);
    let a = Node::begin(&etcd.url(), "a", patient());
    let reason = a.waits_since("incarnation").await;
    assert!(reason.contains("`node.name`"), "{reason}");
    assert!(before.registry.standing().borrow().is_ready());
    put(7);
    a.live().await;
}

/// Claims a session in the directory of a node that is alone.
async fn claimed_alone(dir: &Path, name: &str, floor: Option<Generation>) -> Generation {
    let options = EmbeddedOptions {
        generation_floor: floor,
    };
    let alone = EmbeddedRegistry::open(dir, options).expect("opened");
    let claimed = alone.claim(&id(name), &spec()).await;
    claimed.expect("free").generation
}

#[tokio::test]
async fn a_node_that_was_alone_joins_above_the_generations_that_it_has_used() {
    let Some(etcd) = Etcd::start() else { return };
    let b = Node::join(&etcd.url(), "b", patient()).await;
    let low = b.claim("alice").await.expect("free");
    b.release("alice", low).await.expect("released");
    let dir = tempfile::tempdir().expect("a directory");
    let floor = Generation::new(7_000);
    let alone = claimed_alone(dir.path(), "alice", floor).await;
    assert!(alone.get() > 7_000);
    let left = SlotView {
        slot: Slot {
            session: "alice".into(),
            generation: alone.get(),
        },
        present: true,
        frozen: false,
        certified: false,
    };
    let join = |dir: StateDir, slots| {
        Node::in_dir(dir, slots, |dir| options(&etcd.url(), "a", patient(), dir))
    };
    let a = join(dir.into(), vec![left.clone()]);
    a.live().await;
    // The fleet's session by that name is another one, so what runs here is ended first.
    assert_eq!(a.next_condemned().await, (id("alice"), alone));
    until("the fence kills it", async || {
        a.fence.killed().contains(&left.slot)
    })
    .await;
    assert!(a.claim("alice").await.is_err(), "it may run still");
    let over = a.release("alice", alone).await;
    over.expect_err("nothing of it is recorded");
    let mut claimed = None;
    until("it is free", async || {
        claimed = a.claim("alice").await.ok();
        claimed.is_some()
    })
    .await;
    assert!(claimed > Some(alone), "{claimed:?} after {alone}");
    let elsewhere = b.claim("bob").await.expect("free");
    assert!(elsewhere > alone, "wherever it starts");

    // Alone again, and of the fleet again.
    let Node { registry, dir, .. } = a;
    drop(registry);
    let again = claimed_alone(dir.path(), "bob", Generation::new(50_000)).await;
    assert!(again.get() > 50_000);
    let a = join(dir, Vec::new());
    a.live().await;
    assert!(a.claim("carol").await.expect("free") > again);
}

#[tokio::test]
async fn a_node_of_which_nobody_knows_what_it_used_alone_joins_above_what_an_operator_says() {
    let Some(etcd) = Etcd::start() else { return };
    let dir = tempfile::tempdir().expect("a directory");
    claimed_alone(dir.path(), "alice", None).await;
    for file in ["generations", "registry.redb"] {
        std::fs::write(dir.path().join(file), "damaged").expect("written");
    }
    let fence = Arc::new(MemoryFence::default());
    let start = options(&etcd.url(), "a", patient(), dir.path());
    let refused = EtcdRegistry::start(start, fence).expect_err("nobody knows");
    assert!(
        matches!(
            refused,
            EtcdStartError::State(RegistryError::FloorUnknown { .. })
        ),
        "{refused}"
    );
    let told = Node::in_dir(dir, Vec::new(), |dir| EtcdOptions {
        accept_above: Generation::new(9_000),
        ..options(&etcd.url(), "a", patient(), dir)
    });
    told.live().await;
    assert!(told.claim("alice").await.expect("free").get() > 9_000);
    let Node { registry, dir, .. } = told;
    drop(registry);
    // It has joined since.
    let later = Node::in_dir(dir, Vec::new(), |dir| {
        options(&etcd.url(), "a", patient(), dir)
    });
    later.live().await;
}
