//! Reads of many records, and what they must not hold up.

use std::pin::pin;
use std::task::Poll;

use conman_registry::{Fleet, Registry};
use futures_util::future::join_all;
use futures_util::poll;

use crate::etcd::Etcd;
use crate::log;
use crate::node::{Node, patient, until};
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
