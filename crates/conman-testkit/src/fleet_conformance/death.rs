//! Nodes that are cut off, declared dead, forgotten, and back.

use conman_proto::Generation;
use jiff::Timestamp;
use tokio::sync::watch;
use tokio::time::timeout;

use super::nodes::hears;
use super::{
    Member, PATIENCE, World, answered, claim, forget_node, join, live, locate, peer, read, release,
    remembered, standing, stands, until,
};
use crate::registry_conformance::{id, spec};
use conman_registry::{Announcement, ForgetError, PeerStanding, RegistryError, Standing};

/// What `a` announces while it is cut off.
fn unheard() -> Announcement {
    Announcement {
        version: "unheard".to_owned(),
        ..Announcement::default()
    }
}

pub(super) async fn only_who_is_dead_and_owns_nothing_is_forgotten_and_it_may_come_back(
    world: &dyn World,
) {
    let [a, b, c] = join(world, ["a", "b", "c"]).await;
    let kept = claim(&a, &id("kept")).await;
    claim(&a, &id("other")).await;
    let ended = claim(&a, &id("ended")).await;
    release(&a, &id("ended"), ended).await;
    locate(&a, &id("kept"), false).await;
    for member in [&a, &b, &c] {
        all_are_seen(member).await;
    }
    for name in ["a", "b", "c"] {
        refuses_as_alive(&b, name).await;
    }
    let unknown = forget_node(&b, "unknown").await.expect_err("no such node");
    assert!(matches!(&unknown, ForgetError::Unknown { node } if node == "unknown"));
    for member in [&a, &b, &c] {
        all_are_seen(member).await;
    }

    let mut changes = [&b, &c].map(|member| member.peer_changes());
    world.cut("a").await;
    is_cut_off(&a, kept).await;
    until("it is missed", async || {
        standing(&b, "a") != Some(PeerStanding::Live)
    })
    .await;
    let answer = b.forget_node("a").await;
    if standing(&b, "a") == Some(PeerStanding::Silent) {
        // It may be declared dead during the call.
        let refused = answer.expect_err("it may be alive");
        assert!(!matches!(refused, ForgetError::Unknown { .. }), "{refused}");
    }
    world.takeover_passes().await;
    for (member, changes) in [&b, &c].into_iter().zip(&mut changes) {
        shows_after_changes(member, changes, Some(PeerStanding::Fenced)).await;
    }
    let before = is_dated(&b, &c);
    is_forgotten_once_it_owns_nothing(&b, &c, kept).await;
    for (member, changes) in [&b, &c].into_iter().zip(&mut changes) {
        shows_after_changes(member, changes, None).await;
    }

    world.heal("a").await;
    is_back(&a, [&b, &c], before).await;
}

/// Waits until a node shows `a` with this standing, and looks only after it has reported a change.
async fn shows_after_changes(
    member: &Member,
    changes: &mut watch::Receiver<()>,
    wanted: Option<PeerStanding>,
) {
    let shows = async {
        loop {
            changes.changed().await.expect("the node is there");
            if standing(member, "a") == wanted {
                return;
            }
        }
    };
    let shown = timeout(PATIENCE, shows).await;
    shown.unwrap_or_else(|_| panic!("no change reported that `a` is {wanted:?}"));
}

/// All nodes state the same time of its death, which was a moment ago. Returns its incarnation.
fn is_dated(b: &Member, c: &Member) -> u64 {
    let [seen, other] = [b, c].map(|member| peer(member, "a").expect("it is known"));
    assert_eq!(seen.fenced_at, other.fenced_at);
    let fenced_at = seen.fenced_at.expect("it is dead");
    let ago = Timestamp::now().duration_since(fenced_at);
    assert!(!ago.is_negative() && ago.as_secs() < 300, "{ago}");
    assert_eq!(peer(b, "b").and_then(|peer| peer.fenced_at), None);
    seen.incarnation
}

async fn all_are_seen(member: &Member) {
    until("all live", async || {
        let live = |name| standing(member, name) == Some(PeerStanding::Live);
        ["a", "b", "c"].into_iter().all(live)
    })
    .await;
}

async fn refuses_as_alive(member: &Member, name: &str) {
    let refused = forget_node(member, name).await.expect_err("it lives");
    assert!(
        matches!(&refused, ForgetError::Alive { node } if node == name),
        "{refused}"
    );
}

/// It returns what it has cached; calls that need the registry fail with a retryable error.
async fn is_cut_off(a: &Member, kept: Generation) {
    stands(a, &Standing::Fenced).await;
    assert!(peer(a, "a").is_some(), "it lists itself still");
    a.announce(unheard());
    let own = peer(a, "a").and_then(|peer| peer.announcement);
    assert_eq!(own, Some(unheard()), "it knows what it has said");
    let known = a.locate(&id("kept"), false).await.expect("remembered");
    assert_eq!(known, remembered("a", kept, false));
    let fails = |what: &str, error: &RegistryError| {
        assert!(error.is_retryable(), "{what}: {error}");
    };
    let asked = a.locate(&id("kept"), true).await;
    fails("locate", &asked.expect_err("no answer"));
    let asked = a.locate(&id("never"), false).await;
    fails("locate", &asked.expect_err("no answer"));
    let asked = a.sessions(None, 10).await;
    fails("sessions", &asked.expect_err("no answer"));
    let claimed = a.registry.claim(&id("new"), &spec("suite")).await;
    fails("claim", &claimed.expect_err("it may own nothing"));
    let forgotten = a.forget_node("b").await.expect_err("no answer");
    match &forgotten {
        ForgetError::Registry(error) => fails("forget_node", error),
        other => panic!("{other}"),
    }
    let known = a.locate(&id("kept"), false).await.expect("remembered");
    assert_eq!(known, remembered("a", kept, false), "it stays so");
}

async fn is_forgotten_once_it_owns_nothing(b: &Member, c: &Member, kept: Generation) {
    let heard = peer(b, "a").and_then(|peer| peer.announcement);
    assert_eq!(heard, None, "nothing came from it");
    let found = locate(b, &id("kept"), true).await;
    assert_eq!(found, read("a", kept, false), "its own until it is claimed");
    for _ in 0..2 {
        let owns = forget_node(b, "a").await.expect_err("it owns some");
        assert!(
            matches!(&owns, ForgetError::Owns { node, count: 2, first }
                if node == "a" && first == "kept"),
            "{owns}"
        );
        let now = standing(c, "a");
        assert_eq!(now, Some(PeerStanding::Fenced), "nothing has changed");
    }
    let taken = claim(b, &id("kept")).await;
    assert!(taken > kept, "generations grow");
    assert_eq!(locate(c, &id("kept"), false).await, read("b", taken, false));
    let owns = forget_node(c, "a").await.expect_err("it owns one");
    assert!(
        matches!(&owns, ForgetError::Owns { count: 1, first, .. } if first == "other"),
        "{owns}"
    );
    claim(c, &id("other")).await;
    forget_node(c, "a").await.expect("nothing keeps it");
    let again = forget_node(b, "a").await.expect_err("it is forgotten");
    assert!(
        matches!(&again, ForgetError::Unknown { node } if node == "a"),
        "{again}"
    );
    for member in [b, c] {
        until("no node lists it", async || peer(member, "a").is_none()).await;
        let page = answered("a page", async || member.sessions(None, 10).await);
        let page = page.await.expect("told of");
        let nodes: Vec<(&str, &str)> = page
            .sessions
            .iter()
            .map(|one| (one.record.id.as_str(), one.node.as_str()))
            .collect();
        let wanted = [("ended", "a"), ("kept", "b"), ("other", "c")];
        assert_eq!(nodes, wanted, "ended sessions are listed");
    }
}

async fn is_back(a: &Member, others: [&Member; 2], before: u64) {
    live(a).await;
    let [b, c] = others;
    for member in [a, b, c] {
        all_are_seen(member).await;
    }
    for member in others {
        hears(member, "a", &unheard()).await;
        let back = peer(member, "a").expect("it is back");
        assert!(back.incarnation > before, "it only grows");
        assert_eq!(back.fenced_at, None);
    }
    let claimed = answered("a claim", async || {
        a.registry.claim(&id("kept"), &spec("suite")).await
    });
    let refused = claimed.await.expect_err("another one has it");
    assert!(
        matches!(&refused, RegistryError::Elsewhere { node, .. } if node == "b"),
        "{refused}"
    );
    let generation = claim(a, &id("new")).await;
    let found = locate(b, &id("new"), false).await;
    assert_eq!(found, read("a", generation, false));
    refuses_as_alive(b, "a").await;
}
