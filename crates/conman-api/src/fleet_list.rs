//! Sessions and nodes of the whole fleet.

use conman_core::listing::ListQuery;
use conman_fleet::FleetMap;
use conman_node::{SessionsHandle, StatusHandle};
use conman_proto::{NodeInFleet, NodeLoad, Session, SessionList};
use conman_registry::{FleetSession, Peer};

use crate::node_errors::chain;
use crate::problem::{ApiError, IntoApiError as _, Kind};

/// Records per page of the registry.
const PAGE: usize = 500;

/// Most unreadable records that one answer names.
const MAX_WARNINGS: usize = 20;

/// Most records that one request scans. With filters that hardly any session matches, the page
/// then ends early, with a cursor to continue from.
const MAX_SCANNED: usize = 20_000;

/// A page of the fleet's sessions: this node's from its state, others from their records.
pub(crate) async fn sessions(
    own: &SessionsHandle,
    map: &FleetMap,
    query: &ListQuery,
) -> Result<SessionList, ApiError> {
    let mut after = query.after.clone();
    let mut found: Vec<Session> = Vec::new();
    let (mut scanned, mut warnings) = (0, Vec::new());
    loop {
        let page = map.fleet().sessions(after.as_ref(), PAGE).await;
        let page = page.map_err(|error| Kind::NO_REGISTRY.because(chain(&error)))?;
        scanned += page.sessions.len();
        after = page.next;
        for unreadable in page.unreadable {
            if warnings.len() < MAX_WARNINGS && !warnings.contains(&unreadable) {
                warnings.push(unreadable);
            }
        }
        let shown = page
            .sessions
            .into_iter()
            .map(|session| show(own, map, &session));
        found.extend(shown.filter(|session| query.matches(session)));
        if found.len() > query.limit {
            found.truncate(query.limit);
            let next = found.last().map(|session| session.id.to_string());
            return Ok(SessionList {
                sessions: found,
                next,
                warnings,
            });
        }
        if after.is_none() || scanned >= MAX_SCANNED {
            return Ok(SessionList {
                sessions: found,
                next: after.map(|id| id.to_string()),
                warnings,
            });
        }
    }
}

fn show(own: &SessionsHandle, map: &FleetMap, session: &FleetSession) -> Session {
    let shown = (session.node == map.me())
        .then(|| own.get(&session.record.id))
        .flatten();
    shown.unwrap_or_else(|| own.recorded(&session.node, &session.record))
}

/// All nodes, ordered by name.
pub(crate) fn nodes(own: &StatusHandle, map: &FleetMap) -> Vec<conman_proto::Node> {
    let peers = map.fleet().peers();
    if !peers.iter().any(|peer| peer.name == map.me()) {
        // Not joined yet: the others, and this node.
        let others = peers.iter().map(|peer| show_node(own, map, peer));
        let mut nodes: Vec<_> = others.chain([own.view()]).collect();
        nodes.sort_by(|one, other| one.name.cmp(&other.name));
        return nodes;
    }
    peers.iter().map(|peer| show_node(own, map, peer)).collect()
}

/// One node by its name, or `self`.
pub(crate) fn node(own: &StatusHandle, map: &FleetMap, name: &str) -> Option<conman_proto::Node> {
    let name = if name == "self" { map.me() } else { name };
    let peers = map.fleet().peers();
    let peer = peers.iter().find(|peer| peer.name == name)?;
    Some(show_node(own, map, peer))
}

fn show_node(own: &StatusHandle, map: &FleetMap, peer: &Peer) -> conman_proto::Node {
    let mine = peer.name == map.me();
    let announced = peer.announcement.as_ref();
    let view = if mine {
        Some(own.view())
    } else {
        announced.and_then(|announced| announced.view.clone())
    };
    let mut view = view.unwrap_or_else(|| conman_proto::Node::unannounced(&peer.name));
    view.fleet = Some(NodeInFleet {
        standing: map.standing(peer),
        draining: announced.is_some_and(|announced| announced.draining),
        announced_ago_ms: announced.map(|_| peer.announced_ago_ms),
        peer_url: announced.and_then(|announced| announced.peer_url.clone()),
        labels: announced
            .map(|announced| announced.labels.clone())
            .unwrap_or_default(),
        load: announced.map(|announced| NodeLoad {
            cpu_pressure_percent: announced.load.cpu_pressure_percent,
            memory_available_bytes: announced.load.memory_available_bytes,
            memory_total_bytes: announced.load.memory_total_bytes,
        }),
    });
    view
}
