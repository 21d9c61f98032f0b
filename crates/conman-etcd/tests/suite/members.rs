//! An etcd of three members, all of which a node is given.

use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};

use conman_etcd::EtcdTls;
use conman_registry::{Fleet as _, Registry as _, Standing};

use crate::etcd::{Etcd, Files};
use crate::log;
use crate::node::{Node, id, options, patient, until};
use crate::tls::Authority;

/// What was said of this endpoint.
fn warned_of(url: &str) -> String {
    let lines = log::lines(url).into_iter().map(|line| line.text);
    lines.collect::<Vec<_>>().join("\n")
}

/// Three that ask for certificates, of which those in `wrong` show one that nodes do not trust.
fn three(authority: &Authority, wrong: &[usize]) -> Option<[Etcd; 3]> {
    let other = Authority::new("other");
    Etcd::start_three(|index, dir, address| {
        let ca = dir.join("ca.pem");
        fs::write(&ca, format!("{}{}", authority.pem, other.pem)).expect("written");
        let signer = match wrong.contains(&index) {
            true => &other,
            false => authority,
        };
        Files {
            ca,
            server: signer.writes(dir, &address.to_string()),
            client: authority.writes(dir, "client"),
        }
    })
}

fn node(members: &[Etcd], authority: &Authority) -> Node {
    let dir = tempfile::tempdir().expect("a directory");
    Node::in_dir(dir, Vec::new(), |dir| {
        let mut options = options("", "a", patient(), dir);
        options.access.endpoints = members.iter().map(Etcd::url).collect();
        options.access.tls = Some(EtcdTls {
            ca: authority.pem.clone().into_bytes(),
            identity: Some(authority.signs("node", 2090)),
        });
        options
    })
}

/// Lives that follow each other, from claim to forgetting. Whatever fails for good is a panic.
async fn live_and_die(node: &Node, lives: &AtomicUsize) {
    let name = "s";
    loop {
        let generation = node.claim_at_last(name).await;
        let found = read(async || node.registry.locate(&id(name), true).await).await;
        let located = found.located.expect("it was claimed");
        assert_eq!((located.generation, located.released), (generation, false));
        node.release(name, generation).await.expect("its own");
        let page = read(async || node.registry.sessions(None, 10).await).await;
        assert_eq!(page.sessions.len(), 1);
        read(async || node.registry.forget(&id(name), generation).await).await;
        read(async || node.registry.shared_key().await).await;
        lives.fetch_add(1, Ordering::Relaxed);
    }
}

/// Asks again while nobody can tell.
async fn read<T>(mut ask: impl AsyncFnMut() -> Result<T, conman_registry::RegistryError>) -> T {
    let mut answer = None;
    until("answered", async || match ask().await {
        Ok(told) => {
            answer = Some(told);
            true
        }
        Err(error) => {
            assert!(error.is_retryable(), "{error}");
            false
        }
    })
    .await;
    answer.expect("it was waited for")
}

/// Kills each of these in turn, and has it come back, while a node works; one of them it was using.
async fn works_while_each_goes(members: &mut [Etcd; 3], each: &[usize], node: &Node) {
    let lives = AtomicUsize::new(0);
    let goes_on = async || {
        let before = lives.load(Ordering::Relaxed);
        until("it goes on working", async || {
            lives.load(Ordering::Relaxed) >= before + 3
        })
        .await;
    };
    let mut standing = node.registry.standing();
    let changes = async {
        goes_on().await;
        for index in each {
            members[*index].kill();
            goes_on().await;
            members[*index].begin();
            goes_on().await;
        }
    };
    // Whichever is dropped has nothing left to do.
    tokio::select! {
        () = live_and_die(node, &lives) => panic!("it stopped working"),
        frozen = standing.wait_for(Standing::is_frozen) => panic!("it did not own: {frozen:?}"),
        () = changes => {}
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_fails_for_good_when_the_member_that_is_used_goes() {
    log::keep();
    let authority = Authority::new("one");
    let Some(mut members) = three(&authority, &[]) else {
        return;
    };
    let node = node(&members, &authority);
    node.live().await;
    let urls = members.each_ref().map(Etcd::url);
    works_while_each_goes(&mut members, &[0, 1, 2], &node).await;
    // The one that it begins with, at the latest.
    let told = warned_of(&urls[0]);
    assert!(told.contains("`registry.endpoints`"), "{told}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_endpoint_with_a_wrong_certificate_is_named_and_stops_none_of_the_others() {
    log::keep();
    let authority = Authority::new("one");
    let Some(mut members) = three(&authority, &[0]) else {
        return;
    };
    let node = node(&members, &authority);
    node.live().await;
    let told = warned_of(&members[0].url());
    for word in ["certificate", "registry.ca_file", "`registry.endpoints`"] {
        assert!(told.contains(word), "{word}: {told}");
    }
    for good in &members[1..] {
        let told = warned_of(&good.url());
        assert!(!told.contains("certificate"), "{told}");
    }
    works_while_each_goes(&mut members, &[1, 2], &node).await;
}
