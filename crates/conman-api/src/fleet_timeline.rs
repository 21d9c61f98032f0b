//! Collects what all nodes know of one session, and why it is where it is.

use std::sync::Arc;
use std::time::Duration;

use conman_auth::Caller;
use conman_fleet::{
    BufferedRequest, FleetMap, PlacementRequest, SessionLocation, node_api, read_json,
};
use conman_node::Node;
use conman_proto::{NodeReason, SessionId, SessionInFleet, SessionOwnership, Timeline};
use conman_registry::{Peer, PeerStanding};
use futures_util::{StreamExt as _, stream};
use http::{Method, StatusCode};
use tokio::time::timeout;

use crate::node_errors::chain;

/// Nodes that are requested at a time.
const PARALLEL: usize = 16;

/// Time for one node's answer, including the connection.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Largest answer of a node: more than its journal has of one session.
const MAX_ANSWER_BYTES: usize = 16 * 1024 * 1024;

/// Most events in the answer; older ones are left out.
const MAX_EVENTS: usize = 5_000;

/// Adds the other nodes' knowledge to this one's.
pub(crate) async fn gather(
    node: &Node,
    map: &Arc<FleetMap>,
    caller: &Caller,
    own: Timeline,
) -> Timeline {
    let id = own.id.clone();
    let peers = map.fleet().peers();
    // A node that was declared dead does not answer, or reports itself when it is back.
    let (lost, others): (Vec<&Peer>, Vec<&Peer>) = peers
        .iter()
        .filter(|peer| peer.name != map.me())
        .partition(|peer| peer.standing == PeerStanding::Fenced);
    let others: Vec<String> = others.iter().map(|peer| peer.name.clone()).collect();
    let requests = stream::iter(others.into_iter().map(|name| {
        let (map, id, caller) = (Arc::clone(map), id.clone(), caller.clone());
        async move {
            let answer = timeout(ANSWER_TIMEOUT, request_timeline(&map, &name, &id, &caller)).await;
            let late = || format!("it did not answer within {} s", ANSWER_TIMEOUT.as_secs());
            (name, answer.unwrap_or_else(|_| Err(late())))
        }
    }));
    let answers = requests.buffered(PARALLEL).collect::<Vec<_>>();
    let (answers, mut fleet) = tokio::join!(answers, ownership(node, map, &id));
    let mut all = own;
    for (name, answer) in answers {
        match answer {
            Ok(timeline) => add(&mut all, timeline),
            Err(why) => fleet.unreachable_nodes.push(NodeReason { node: name, why }),
        }
    }
    let owner = lost
        .iter()
        .find(|peer| fleet.node.as_deref() == Some(&*peer.name));
    if let Some(owner) = owner {
        fleet.unreachable_nodes.push(NodeReason {
            node: owner.name.clone(),
            why: "it was declared dead".to_owned(),
        });
    }
    let key = |event: &conman_proto::Event| (event.at, event.node.clone(), event.seq);
    all.events.sort_by_cached_key(key);
    if all.events.len() > MAX_EVENTS {
        all.events.drain(..all.events.len() - MAX_EVENTS);
        all.truncated = true;
    }
    all.fleet = Some(fleet);
    all
}

fn add(all: &mut Timeline, other: Timeline) {
    let latest = |timeline: &Timeline| timeline.phases.iter().map(|phase| phase.generation).max();
    if latest(&other) > latest(all) {
        all.phases = other.phases;
    }
    all.events.extend(other.events);
    all.truncated |= other.truncated;
}

async fn request_timeline(
    map: &FleetMap,
    name: &str,
    id: &SessionId,
    caller: &Caller,
) -> Result<Timeline, String> {
    let target = node_api::timeline(id).parse();
    let target = target.map_err(|error| chain(&error as &http::uri::InvalidUri))?;
    let request = BufferedRequest::new(Method::GET, target, caller.clone());
    let response = map.call(&map.node(name), &request, None).await;
    let response = response.map_err(|error| chain(&error))?;
    if response.status() != StatusCode::OK {
        return Err(format!("it answered {}", response.status()));
    }
    read_json(response.into_body(), MAX_ANSWER_BYTES).await
}

/// The session's state in the fleet, according to the registry.
async fn ownership(node: &Node, map: &FleetMap, id: &SessionId) -> SessionInFleet {
    let mut fleet = SessionInFleet {
        ownership: SessionOwnership::Unknown,
        node: None,
        standing: None,
        generation: None,
        takers: Vec::new(),
        refused: Vec::new(),
        unreachable_nodes: Vec::new(),
        registry_error: None,
    };
    let located = match timeout(ANSWER_TIMEOUT, map.locate_fresh(id)).await {
        Ok(Ok(located)) => located,
        Ok(Err(error)) => {
            fleet.registry_error = Some(chain(&error));
            return fleet;
        }
        Err(_elapsed) => {
            fleet.registry_error = Some("it did not answer in time".to_owned());
            return fleet;
        }
    };
    let (ownership, owner, generation) = match located {
        SessionLocation::NoOwner => (SessionOwnership::Nobody, None, None),
        SessionLocation::Here { generation } => (
            SessionOwnership::Owned,
            Some(map.me().to_owned()),
            Some(generation),
        ),
        SessionLocation::There(owner) => {
            let name = owner.node.name.to_string();
            (SessionOwnership::Owned, Some(name), Some(owner.generation))
        }
        SessionLocation::Released { node, generation } => {
            (SessionOwnership::Released, Some(node), Some(generation))
        }
        SessionLocation::Lost { node, generation } => {
            (SessionOwnership::Lost, Some(node), Some(generation))
        }
    };
    fleet.ownership = ownership;
    fleet.generation = generation;
    let peers = map.fleet().peers();
    let peer = owner
        .as_ref()
        .and_then(|owner| peers.iter().find(|peer| peer.name == *owner));
    fleet.standing = peer.map(|peer| map.standing(peer));
    fleet.node = owner;
    if ownership != SessionOwnership::Owned
        && let Ok(Ok(Some(record))) = timeout(ANSWER_TIMEOUT, node.sessions().record(id)).await
    {
        let placement = map.place(id, &PlacementRequest::from(&record.spec));
        fleet.takers = placement.candidates;
        let refused = placement.refused.into_iter();
        fleet.refused = refused
            .map(|refused| NodeReason {
                why: refused.why.to_string(),
                node: refused.node,
            })
            .collect();
    }
    fleet
}
