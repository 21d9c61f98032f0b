//! Reads of many records, and what they must not hold up.

use std::pin::pin;
use std::task::Poll;

use conman_registry::{Fleet, Registry};
use futures_util::future::join_all;
use futures_util::poll;

use crate::etcd::Etcd;
use crate::log;
use crate::node::{Node, id, patient, spec, until};
use crate::proxy::{Proxy, Way};

#[tokio::test]
async fn records_are_parsed_where_no_renewal_waits_for_it() {
    let Some(etcd) = Etcd::start() else { return };
    log::keep();
    let a = Node::join(&etcd.url(), "a", patient()).await;
    // What cannot be read is logged where it is found out, once.
    for (name, by_list) in [("parsed-for-a-page", false), ("parsed-for-a-list", true)] {
        a.claim(name).await.expect("free");
        let key = format!("/conman/session/{name}");
        etcd.ctl(&["put", &key, "spoilt"]).expect("spoilt");
        match by_list {
            true => drop(a.registry.list().await),
            false => drop(a.registry.sessions(None, 10).await),
        }
        let lines = log::lines(&key);
        assert!(!lines.is_empty(), "nothing is said of {key}");
        for line in lines {
            assert_ne!(line.thread, "fleet", "{}", line.text);
        }
    }
}

#[tokio::test]
async fn callers_that_go_away_do_not_multiply_what_is_read() {
    const CALLERS: usize = 200;
    let Some(etcd) = Etcd::start() else { return };
    let proxy = Proxy::to(etcd.address()).await;
    let a = Node::join(&proxy.url(), "a", patient()).await;
    let before = etcd.count_of("Range");
    proxy.set(Way::Deaf);
    {
        let pages = (0..CALLERS).map(|_| a.registry.sessions(None, 10));
        let mut pages = pin!(join_all(pages));
        let poll = poll!(&mut pages);
        assert!(matches!(poll, Poll::Pending), "nobody answers");
        until("some have reached etcd", async || {
            etcd.count_of("Range") > before
        })
        .await;
    }
    proxy.set(Way::Open);
    // Those before it have had their turn by then.
    until("a page is read", async || {
        a.registry.sessions(None, 10).await.is_ok()
    })
    .await;
    let reads = etcd.count_of("Range") - before;
    assert!(reads < CALLERS / 2, "{reads} reads for {CALLERS} callers");
}

/// One as large as a request may make it: a character in its environment takes six in a record.
async fn claim_large(node: &Node, number: usize) -> String {
    let mut spec = spec();
    spec.env
        .insert("LARGE".to_owned(), "\u{1}".repeat(64 * 1_024));
    let name = format!("large-{number:03}");
    let claimed = node.registry.claim(&id(&name), &spec).await;
    claimed.unwrap_or_else(|error| panic!("{name}: {error}"));
    name
}

/// All sessions, page by page, each asked for until it comes.
async fn all_pages(node: &Node) -> Vec<String> {
    let (mut names, mut after) = (Vec::new(), None);
    loop {
        let mut page = None;
        until("a page is read", async || {
            page = node.registry.sessions(after.as_ref(), 500).await.ok();
            page.is_some()
        })
        .await;
        let page = page.expect("it was read");
        let told = page.sessions.into_iter().map(|one| one.record.id);
        names.extend(told.map(|id| id.to_string()));
        after = page.next;
        if after.is_none() {
            return names;
        }
    }
}

async fn own(node: &Node) -> Vec<String> {
    let mut records = None;
    until("the records are listed", async || {
        records = node.registry.list().await.ok();
        records.is_some()
    })
    .await;
    let records = records.expect("they were listed").into_iter();
    records.map(|record| record.id.to_string()).collect()
}

#[tokio::test]
async fn large_records_are_told_of_in_as_many_parts_as_it_takes() {
    // Of more bytes than any answer may have.
    const COUNT: usize = 180;
    let Some(etcd) = Etcd::start() else { return };
    let a = Node::join(&etcd.url(), "a", patient()).await;
    let b = Node::join(&etcd.url(), "b", patient()).await;
    let mut names = Vec::new();
    for number in 0..COUNT {
        names.push(claim_large(&a, number).await);
    }
    assert_eq!(own(&a).await, names);
    assert_eq!(own(&b).await, [""; 0]);
    assert_eq!(all_pages(&b).await, names);
}

#[tokio::test]
async fn records_that_do_not_come_in_time_are_asked_for_in_parts() {
    let Some(etcd) = Etcd::start() else { return };
    let proxy = Proxy::to(etcd.address()).await;
    let a = Node::join(&proxy.url(), "a", patient()).await;
    let mut names = Vec::new();
    for number in 0..16 {
        names.push(claim_large(&a, number).await);
    }
    proxy.set(Way::Slow);
    assert_eq!(own(&a).await, names);
    assert_eq!(all_pages(&a).await, names);
    proxy.set(Way::Open);
    assert!(a.registry.standing().borrow().is_ready());
}
