//! Pages of all sessions.

use std::collections::BTreeMap;

use conman_proto::SessionId;
use futures_util::future::join_all;

use super::{Member, World, answered, claim, forget, join, locate, read, release};
use crate::registry_conformance::id;
use conman_registry::{MAX_SESSION_PAGE, MAX_UNREADABLE, RegistryError, SessionPage};

/// Concurrent claims. All of a page's claims at once would keep the etcd of a loaded machine busy
/// for longer than a call's timeout, and again on each retry.
const AT_ONCE: usize = 8;

pub(super) async fn all_sessions_are_told_of_in_pages_by_id(world: &dyn World) {
    let [a, b] = join(world, ["a", "b"]).await;
    for member in [&a, &b] {
        let page = page(member, None, 10).await;
        assert_eq!(page, SessionPage::default(), "there are none");
    }
    let names = ["m", "z", "0", "a-b", "a", "a0", "zz", "aa"];
    let mut records = BTreeMap::new();
    for (index, name) in names.into_iter().enumerate() {
        let (owner, id) = ([&a, &b][index % 2], id(name));
        let generation = claim(owner, &id).await;
        if index % 3 == 0 {
            release(owner, &id, generation).await;
        }
        let record = answered("a record", async || owner.registry.get(&id).await);
        let record = record.await.expect("readable").expect("it is there");
        assert_eq!(record.state.is_ended(), index % 3 == 0);
        records.insert(id, (owner.me().to_owned(), record));
    }
    for member in [&a, &b] {
        for limit in [0, 1, 2, 3, 7, 8, 9, usize::MAX] {
            let mut told = BTreeMap::new();
            for page in walk(member, limit).await {
                assert_eq!(page.unreadable, [""; 0]);
                let last = page.sessions.last().map(|one| one.record.id.clone());
                assert!(page.next.is_none() || page.next == last, "{limit}");
                for one in page.sessions {
                    told.insert(one.record.id.clone(), (one.node, one.record));
                }
            }
            assert_eq!(told, records, "{limit} at a time");
        }
    }
    // A page may begin after an id that does not exist.
    let page_behind = page(&b, Some("a-a"), 2).await;
    assert_eq!(ids(&page_behind), ["a-b", "a0"]);
    assert_eq!(page(&b, Some("zz"), 2).await, SessionPage::default());

    let ended = id("m");
    forget(&a, &ended, records[&ended].1.generation).await;
    let page = page(&b, Some("aa"), 1).await;
    assert_eq!(
        (ids(&page), page.next),
        (vec!["z".to_owned()], Some(id("z")))
    );
}

pub(super) async fn a_page_has_its_greatest_size(world: &dyn World) {
    let [a] = join(world, ["a"]).await;
    let all: Vec<SessionId> = (0..MAX_SESSION_PAGE + 3)
        .map(|number| id(&format!("s-{number:04}")))
        .collect();
    for some in all.chunks(AT_ONCE) {
        join_all(some.iter().map(|id| claim(&a, id))).await;
    }
    let first = page(&a, None, usize::MAX).await;
    assert_eq!(first.sessions.len(), MAX_SESSION_PAGE);
    assert_eq!(first.next.as_ref(), all.get(MAX_SESSION_PAGE - 1));
    let mut told: Vec<SessionId> = Vec::new();
    for page in walk(&a, usize::MAX).await {
        told.extend(page.sessions.into_iter().map(|one| one.record.id));
    }
    assert_eq!(told, all);
}

pub(super) async fn what_cannot_be_read_is_named_once_and_hides_nothing(world: &dyn World) {
    let [a, b] = join(world, ["a", "b"]).await;
    let mut generations = BTreeMap::new();
    for name in ["s-1", "s-2", "s-3"] {
        generations.insert(name, claim(&a, &id(name)).await);
    }
    // One of them was never claimed.
    let spoilt = ["s-0", "s-2", "s-4"];
    for name in spoilt {
        world.spoil(&id(name)).await;
    }
    for limit in [1, 2, 3, 100] {
        let (mut told, mut unreadable) = (Vec::new(), Vec::new());
        for page in walk(&b, limit).await {
            told.extend(ids(&page));
            unreadable.extend(page.unreadable);
        }
        assert_eq!(told, ["s-1", "s-3"], "{limit} at a time");
        assert_eq!(unreadable.len(), spoilt.len(), "{limit} at a time");
        for (what, name) in unreadable.iter().zip(spoilt) {
            assert!(what.contains(name), "{limit} at a time: {what}");
        }
    }
    // Its owner is stored under another key.
    let found = locate(&b, &id("s-2"), false).await;
    assert_eq!(found, read("a", generations["s-2"], false));
    let claimed = answered("a claim", async || {
        let spec = crate::registry_conformance::spec("suite");
        b.registry.claim(&id("s-2"), &spec).await
    });
    let refused = claimed.await.expect_err("it is owned");
    assert!(matches!(&refused, RegistryError::Elsewhere { node, .. } if node == "a"));
    claim(&b, &id("s-0")).await;
    let page_anew = page(&b, None, 1).await;
    assert_eq!(ids(&page_anew), ["s-0"], "a claim rewrites it");

    for number in 0..=MAX_UNREADABLE {
        world.spoil(&id(&format!("u-{number:02}"))).await;
    }
    let long = page(&b, Some("t"), 100).await;
    assert_eq!(long.unreadable.len(), MAX_UNREADABLE);
    assert_eq!((long.sessions, long.next), (Vec::new(), None));
}

async fn page(member: &Member, after: Option<&str>, limit: usize) -> SessionPage {
    page_behind(member, after.map(id).as_ref(), limit).await
}

async fn page_behind(member: &Member, after: Option<&SessionId>, limit: usize) -> SessionPage {
    let page = answered("a page", async || member.sessions(after, limit).await);
    page.await.expect("told of")
}

/// All pages; checks that each says correctly whether there is another one.
async fn walk(member: &Member, limit: usize) -> Vec<SessionPage> {
    let (mut pages, mut after) = (Vec::new(), None);
    loop {
        let page = page_behind(member, after.as_ref(), limit).await;
        let count = page.sessions.len() + page.unreadable.len();
        assert!(count <= limit.max(1), "{count} of at most {limit}");
        assert!(count > 0, "a page without anything");
        assert!(page.next.is_none() || page.next > after, "it advances");
        after.clone_from(&page.next);
        pages.push(page);
        if after.is_none() {
            return pages;
        }
    }
}

fn ids(page: &SessionPage) -> Vec<String> {
    let ids = page.sessions.iter().map(|one| one.record.id.to_string());
    ids.collect()
}
