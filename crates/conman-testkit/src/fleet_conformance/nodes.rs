//! The list of nodes and their announcements.

use std::time::Duration;

use super::{Member, PATIENCE, World, join, live, peer, sorted, until};
use conman_registry::{Announcement, NodeLoad, PeerStanding, Standing};

/// Not ordered by name, so that joining order and name order differ.
const NAMES: [&str; 4] = ["m", "b-1", "z", "b"];

pub(super) async fn a_node_knows_who_it_is_and_all_list_all_by_name(world: &dyn World) {
    let members = join(world, NAMES).await;
    for (member, name) in members.iter().zip(NAMES) {
        assert_eq!(member.me(), name);
        assert_eq!(*member.standing().borrow(), Standing::Live);
        assert!(peer(member, name).is_some(), "a node lists itself at once");
    }
    let seen = |member: &Member| -> Vec<(String, u64)> {
        let peers = member.peers();
        let named = peers
            .iter()
            .map(|peer| (peer.name.clone(), peer.incarnation));
        named.collect()
    };
    for member in &members {
        until("all are listed as live", async || {
            let peers = member.peers();
            let live = |name: &str| {
                let found = peers.iter().find(|peer| peer.name == name);
                found.is_some_and(|peer| peer.standing == PeerStanding::Live)
            };
            NAMES.iter().all(|name| live(name))
        })
        .await;
        let names: Vec<String> = seen(member).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, sorted(&NAMES), "each once, ordered by name");
        for one in &*member.peers() {
            assert!(one.incarnation > 0, "{} has joined", one.name);
            assert_eq!(one.announcement, None, "no node has announced anything");
        }
        until("all know the same incarnations", async || {
            seen(member) == seen(&members[0])
        })
        .await;
        assert!(member.takeover() > Duration::ZERO);
        until("all wait equally long", async || {
            member.takeover() == members[0].takeover()
        })
        .await;
    }
}

pub(super) async fn what_a_node_announces_reaches_everybody_and_those_who_join_later(
    world: &dyn World,
) {
    let [a, b] = join(world, ["a", "b"]).await;
    let first = Announcement {
        peer_url: Some("http://127.0.0.1:7702".to_owned()),
        version: "1".to_owned(),
        labels: [("pool".to_owned(), "gpu".to_owned())].into(),
        templates: vec!["web".to_owned(), "idle".to_owned()],
        max_sessions: u32::MAX,
        ..Announcement::default()
    };
    let draining = Announcement {
        draining: true,
        ..first.clone()
    };
    let loaded = Announcement {
        load: NodeLoad {
            sessions: 7,
            starting: 1,
            cpu_pressure_percent: 12.5,
            memory_available_bytes: u64::MAX,
            memory_total_bytes: u64::MAX,
        },
        ..draining.clone()
    };
    for told in [first, draining, loaded.clone()] {
        a.announce(told.clone());
        let own = peer(&a, "a").expect("a node lists itself");
        assert_eq!(own.announcement.as_ref(), Some(&told), "at once");
        assert_eq!(own.announced_ago_ms, 0, "it cannot be older here");
        hears(&b, "a", &told).await;
        let heard = peer(&b, "a").expect("it is listed");
        assert!(u128::from(heard.announced_ago_ms) <= PATIENCE.as_millis());
    }
    for member in [&a, &b] {
        let silent = peer(member, "b").and_then(|peer| peer.announcement);
        assert_eq!(silent, None, "b has said nothing");
    }
    let c = world.begin("c").await;
    live(&c).await;
    hears(&c, "a", &loaded).await;

    // An announcement made before joining is published after it.
    let d = world.begin("d").await;
    d.announce(loaded.clone());
    for member in [&a, &b, &c] {
        hears(member, "d", &loaded).await;
    }
}

pub(super) async fn hears(member: &Member, of: &str, wanted: &Announcement) {
    until("it receives another node's announcement", async || {
        let heard = peer(member, of).and_then(|peer| peer.announcement);
        heard.as_ref() == Some(wanted)
    })
    .await;
}

pub(super) async fn all_have_one_key_whoever_asks_first(world: &dyn World) {
    let [a, b] = join(world, ["a", "b"]).await;
    let (one, other) = tokio::join!(a.shared_key(), b.shared_key());
    let one = one.expect("answered").expect("there are others");
    assert_ne!(one, [0; 32], "it is random");
    assert_eq!(other.expect("answered"), Some(one));
    let [c] = join(world, ["c"]).await;
    for member in [&a, &b, &c] {
        assert_eq!(member.shared_key().await.expect("answered"), Some(one));
    }
}
