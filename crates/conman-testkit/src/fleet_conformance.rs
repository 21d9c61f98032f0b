//! What every fleet must do, as one suite that runs on all of them: `conman-etcd` over a
//! real etcd, and [`crate::ModelFleet`], which the tests of higher layers use.
//!
//! It is plain code, not a test. A violated requirement is a panic that names it. The suite waits
//! for what takes a real fleet time, and checks at once what must hold at once.

use std::collections::BTreeSet;
use std::future::Future;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use conman_proto::{Generation, SessionId};
use tokio::time::{sleep, timeout};

use crate::registry_conformance::{ending, spec};
use conman_registry::{
    Fleet, ForgetError, Located, Peer, PeerStanding, Registry, RegistryError, Release, Sighting,
    Standing,
};

mod death;
mod nodes;
mod pages;
mod places;

/// Longer than any step takes on a machine that makes progress at all.
const PATIENCE: Duration = Duration::from_secs(120);
const PAUSE: Duration = Duration::from_millis(20);

/// A registry without nodes or records, and the faults that a test can cause from outside.
#[async_trait]
pub trait World: Send + Sync {
    /// Starts a node of that name, which joins automatically and stays a member as long as the
    /// world exists.
    async fn begin(&self, name: &str) -> Member;

    /// From here on this node and the registry cannot reach each other.
    async fn cut(&self, name: &str);

    /// Lets the time pass after which the other nodes declare cut-off nodes dead. Does nothing
    /// where this takes real time: the suite waits.
    async fn takeover_passes(&self) {}

    /// The node and the registry can reach each other again.
    async fn heal(&self, name: &str);

    /// Replaces the session's record by text that no conman writes.
    async fn spoil(&self, id: &SessionId);
}

/// A node as the rest of its daemon uses it.
#[derive(Debug, Clone)]
pub struct Member {
    pub registry: Arc<dyn Registry>,
    pub fleet: Arc<dyn Fleet>,
}

/// Most calls are to the node's fleet.
impl Deref for Member {
    type Target = dyn Fleet;

    fn deref(&self) -> &Self::Target {
        &*self.fleet
    }
}

/// Runs every case in which no node dies, each in a world created by `make`.
///
/// # Panics
/// When the fleet violates a requirement.
pub async fn suite<F, W, M>(make: M)
where
    M: Fn() -> F,
    F: Future<Output = W>,
    W: World,
{
    nodes::a_node_knows_who_it_is_and_all_list_all_by_name(&make().await).await;
    nodes::what_a_node_announces_reaches_everybody_and_those_who_join_later(&make().await).await;
    nodes::all_have_one_key_whoever_asks_first(&make().await).await;
    places::what_nobody_owns_is_asked_for_anew_each_time(&make().await).await;
    places::a_session_is_found_by_everybody_and_remembered(&make().await).await;
    places::what_is_remembered_stays_until_it_is_denied_or_read_afresh(&make().await).await;
    places::what_was_given_up_is_told_as_that_and_what_was_forgotten_as_nobodys(&make().await)
        .await;
    pages::all_sessions_are_told_of_in_pages_by_id(&make().await).await;
    pages::a_page_has_its_greatest_size(&make().await).await;
    pages::what_cannot_be_read_is_named_once_and_hides_nothing(&make().await).await;
}

/// Runs the cases in which nodes are declared dead. Timeouts may be short: the suite waits for a
/// node that the machine did not run in time.
///
/// # Panics
/// When the fleet violates a requirement.
pub async fn suite_of_deaths<F, W, M>(make: M)
where
    M: Fn() -> F,
    F: Future<Output = W>,
    W: World,
{
    death::only_who_is_dead_and_owns_nothing_is_forgotten_and_it_may_come_back(&make().await).await;
}

/// Starts these nodes and waits until they have joined.
async fn join<const N: usize>(world: &dyn World, names: [&str; N]) -> [Member; N] {
    let mut members = Vec::new();
    for name in names {
        members.push(world.begin(name).await);
    }
    for member in &members {
        live(member).await;
    }
    members.try_into().expect("as many as names")
}

async fn live(member: &Member) {
    stands(member, &Standing::Live).await;
}

async fn stands(member: &Member, wanted: &Standing) {
    let mut standing = member.standing();
    let waited = timeout(PATIENCE, standing.wait_for(|now| now == wanted)).await;
    match waited {
        Ok(now) => drop(now.expect("the node is there")),
        Err(_) => panic!("never {wanted:?}: {:?}", *member.standing().borrow()),
    }
}

/// Waits until `is` returns true.
async fn until(what: &str, mut is: impl AsyncFnMut() -> bool) {
    let wait = async {
        while !is().await {
            sleep(PAUSE).await;
        }
    };
    assert!(timeout(PATIENCE, wait).await.is_ok(), "never: {what}");
}

/// Repeats a call until it succeeds or fails for another reason than an unavailable registry.
async fn answered<T>(
    what: &str,
    mut ask: impl AsyncFnMut() -> Result<T, RegistryError>,
) -> Result<T, RegistryError> {
    let asking = async {
        loop {
            match ask().await {
                Err(error) if error.is_retryable() => sleep(PAUSE).await,
                definite => return definite,
            }
        }
    };
    let answer = timeout(PATIENCE, asking).await;
    answer.unwrap_or_else(|_| panic!("never answered: {what}"))
}

async fn claim(member: &Member, id: &SessionId) -> Generation {
    let claimed = answered("a claim", async || {
        member.registry.claim(id, &spec("suite")).await
    });
    claimed.await.expect("it is free").generation
}

async fn release(member: &Member, id: &SessionId, generation: Generation) {
    let released = answered("a release", async || {
        let release = Release {
            id: id.clone(),
            generation,
            ending: ending("over"),
        };
        member.registry.release(vec![release]).await.remove(0)
    });
    released.await.expect("its owner releases");
}

async fn forget(member: &Member, id: &SessionId, generation: Generation) {
    let forgotten = answered("a forgetting", async || {
        member.registry.forget(id, generation).await
    });
    forgotten.await.expect("it has ended");
}

async fn forget_node(member: &Member, name: &str) -> Result<(), ForgetError> {
    let mut definite = None;
    until("an answer about a node", async || {
        definite = match member.forget_node(name).await {
            Err(ForgetError::Registry(error)) if error.is_retryable() => None,
            answer => Some(answer),
        };
        definite.is_some()
    })
    .await;
    definite.expect("it was waited for")
}

async fn locate(member: &Member, id: &SessionId, fresh: bool) -> Sighting {
    let found = answered("where a session is", async || {
        member.locate(id, fresh).await
    });
    found.await.expect("located")
}

/// A location from the node's cache.
fn remembered(node: &str, generation: Generation, released: bool) -> Sighting {
    Sighting {
        fresh: false,
        ..read(node, generation, released)
    }
}

/// A location read from the registry.
fn read(node: &str, generation: Generation, released: bool) -> Sighting {
    Sighting {
        located: Some(Located {
            node: node.to_owned(),
            generation,
            released,
        }),
        fresh: true,
    }
}

/// The registry's answer for a session without an owner.
fn nobodys() -> Sighting {
    Sighting {
        located: None,
        fresh: true,
    }
}

/// A node as another one sees it.
fn peer(seen_by: &Member, name: &str) -> Option<Peer> {
    let peers = seen_by.peers();
    peers.iter().find(|peer| peer.name == name).cloned()
}

fn standing(seen_by: &Member, name: &str) -> Option<PeerStanding> {
    peer(seen_by, name).map(|peer| peer.standing)
}

fn sorted(names: &[&str]) -> Vec<String> {
    let sorted: BTreeSet<&str> = names.iter().copied().collect();
    sorted.into_iter().map(str::to_owned).collect()
}
