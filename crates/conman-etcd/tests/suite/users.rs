//! Users of etcd's who may do no more than a node needs, or less.

use std::time::Duration;

use conman_core::ownership::Timing;
use conman_etcd::EtcdCredentials;
use conman_registry::{Fleet as _, ForgetError, PeerStanding, Registry as _};

use crate::etcd::Etcd;
use crate::log;
use crate::node::{Node, options, patient, short, until};

/// Does so as the one user who may do everything.
fn as_root(etcd: &Etcd, arguments: &[&str]) -> Result<String, String> {
    etcd.ctl(&[&["--user", "root:secret"][..], arguments].concat())
}

fn grant(etcd: &Etcd, role: &str, permission: &str, prefix: &str) {
    let words = ["role", "grant-permission", "--prefix", role];
    let words = [&words[..], &[permission, prefix]].concat();
    as_root(etcd, &words).expect("granted");
}

/// A user of this name and password, whose role of this name may do that below a prefix.
fn add_user(etcd: &Etcd, name: &str, permission: &str, prefix: &str) {
    for words in [
        &["user", "add", &format!("{name}:{name}")][..],
        &["role", "add", name],
        &["user", "grant-role", name, name],
    ] {
        as_root(etcd, words).expect("added");
    }
    grant(etcd, name, permission, prefix);
}

/// A node that signs in as such a user.
fn begin(etcd: &Etcd, name: &str, user: &str, timing: Timing, compact: Option<Duration>) -> Node {
    let dir = tempfile::tempdir().expect("a directory");
    Node::in_dir(dir, Vec::new(), |dir| {
        let mut options = options(&etcd.url(), name, timing, dir);
        options.access.credentials = Some(EtcdCredentials {
            user: user.to_owned(),
            password: user.to_owned(),
        });
        options.compact_every = compact;
        options
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_that_reads_and_writes_the_prefix_is_all_that_nodes_need() {
    let Some(etcd) = Etcd::start() else { return };
    etcd.asks_for_password_of_root("secret");
    add_user(&etcd, "conman", "readwrite", "/conman/");
    let a = begin(&etcd, "a", "conman", short(), None);
    let b = begin(&etcd, "b", "conman", short(), None);
    a.live().await;
    b.live().await;
    until("they have heard of each other", async || {
        [&a, &b].iter().all(|node| node.registry.peers().len() == 2)
    })
    .await;
    let key = a.registry.shared_key().await.expect("a key");
    assert_eq!(b.registry.shared_key().await.expect("a key"), key);

    let first = a.claim_at_last("s").await;
    a.release("s", first).await.expect("released");
    let second = b.claim_at_last("s").await;
    assert!(second > first);
    let former = a.claim_at_last("t").await;
    let Node { registry, .. } = a;
    drop(registry);
    let later = b.claim_at_last("t").await;
    assert!(later > former, "{later} after {former}");
    let mut told = None;
    until("they are told of", async || {
        told = b.registry.sessions(None, 10).await.ok();
        told.is_some()
    })
    .await;
    let told = told.expect("told of").sessions;
    let told: Vec<_> = told.iter().map(|one| one.record.id.as_str()).collect();
    assert_eq!(told, ["s", "t"]);
    b.release("t", later).await.expect("released");
    until("it is seen to be gone", async || {
        let peers = b.registry.peers();
        let mut peers = peers.iter();
        peers.any(|peer| peer.name == "a" && peer.standing == PeerStanding::Fenced)
    })
    .await;
    loop {
        match b.registry.forget_node("a").await {
            Err(ForgetError::Registry(_)) => {}
            forgotten => break forgotten.expect("it owns nothing"),
        }
    }
}

/// Not every etcd lets such a user compact it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn history_goes_by_a_user_of_that_role_or_the_log_says_who_may() {
    let Some(etcd) = Etcd::start() else { return };
    log::keep();
    etcd.asks_for_password_of_root("secret");
    add_user(&etcd, "conman", "readwrite", "/conman/");
    let every = Some(Duration::from_secs(1));
    let a = begin(&etcd, "a", "conman", patient(), every);
    a.live().await;
    a.claim_at_last("s").await;
    let revision = || {
        let read = as_root(&etcd, &["get", "none", "-w", "json"]).expect("read");
        let read: serde_json::Value = serde_json::from_str(&read).expect("JSON");
        read["header"]["revision"].as_i64().expect("a number")
    };
    let now = revision().to_string();
    until("history goes, or it is said why not", async || {
        let read = as_root(&etcd, &["get", "/conman/schema", "--rev", &now]);
        let gone = read.is_err_and(|error| error.contains("compacted"));
        let said = log::lines("etcd is not compacted");
        gone || said
            .iter()
            .any(|line| line.text.contains("the role `root`"))
    })
    .await;
    assert!(a.registry.standing().borrow().is_ready());
    assert_eq!(a.registry.list().await.expect("listed").len(), 1);
}

#[tokio::test]
async fn a_user_whose_role_does_not_suffice_is_refused_until_it_does() {
    let Some(etcd) = Etcd::start() else { return };
    etcd.asks_for_password_of_root("secret");
    add_user(&etcd, "reader", "read", "/conman/");
    add_user(&etcd, "stranger", "readwrite", "/other/");
    for (node, user) in [("a", "reader"), ("b", "stranger")] {
        let node = begin(&etcd, node, user, patient(), None);
        let reason = node.waits_since("permission denied").await;
        for part in ["etcd refuses", user, "registry.prefix"] {
            assert!(reason.contains(part), "{reason}");
        }
        assert!(node.claim("s").await.is_err(), "it has not joined");
        grant(&etcd, user, "readwrite", "/conman/");
        node.live().await;
        let generation = node.claim_at_last("s").await;
        node.release("s", generation).await.expect("released");
    }
}
