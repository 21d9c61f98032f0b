//! Sessions and nodes of the whole fleet.

use conman_core::listing::ListQuery;
use conman_fleet::FleetMap;
use conman_node::{SessionsHandle, StatusHandle};
use conman_proto::{NodeInFleet, NodeLoad, Session, SessionList, SessionState};
use conman_registry::{FleetSession, Peer, PeerStanding, SessionRecord};

use crate::fleet_comparison::FleetComparison;
use crate::node_errors::chain;

/// Records per page of the registry.
const PAGE: usize = 500;

/// Most unreadable records that one answer names.
const MAX_WARNINGS: usize = 20;

/// Most records that one request scans. With filters that hardly any session matches, the page
/// then ends early, with a cursor to continue from.
const MAX_SCANNED: usize = 20_000;

/// A page of the fleet's sessions: this node's from its state, others from their records. If the registry
/// does not answer, this node's alone, with a warning.
pub(crate) async fn sessions(
    own: &SessionsHandle,
    map: &FleetMap,
    query: &ListQuery,
) -> SessionList {
    let mut after = query.after.clone();
    let mut found: Vec<Session> = Vec::new();
    let (mut scanned, mut warnings) = (0, Vec::new());
    loop {
        let page = match map.fleet().sessions(after.as_ref(), PAGE).await {
            Ok(page) => page,
            // This node knows its own without the registry.
            Err(error) => {
                let mut list = own.list(query);
                list.warnings.push(format!(
                    "only sessions of node {} are listed, because those of the fleet cannot be read: {}",
                    map.me(),
                    chain(&error)
                ));
                return list;
            }
        };
        scanned += page.sessions.len();
        after = page.next;
        for unreadable in page.unreadable {
            if warnings.len() < MAX_WARNINGS && !warnings.contains(&unreadable) {
                warnings.push(unreadable);
            }
        }
        // Once a page: it is copied.
        let peers = map.fleet().peers();
        let shown = page
            .sessions
            .into_iter()
            .map(|session| show(own, map.me(), &peers, &session));
        found.extend(shown.filter(|session| query.matches(session)));
        if found.len() > query.limit {
            found.truncate(query.limit);
            let next = found.last().map(|session| session.id.to_string());
            return SessionList {
                sessions: found,
                next,
                warnings,
            };
        }
        if after.is_none() || scanned >= MAX_SCANNED {
            return SessionList {
                sessions: found,
                next: after.map(|id| id.to_string()),
                warnings,
            };
        }
    }
}

fn show(own: &SessionsHandle, me: &str, peers: &[Peer], session: &FleetSession) -> Session {
    let shown = (session.node == me)
        .then(|| own.get(&session.record.id))
        .flatten();
    shown.unwrap_or_else(|| recorded(own, peers, &session.node, &session.record))
}

/// A session by its record, which says what its node last wrote. Of a node that is not heard of nothing
/// runs: its fence has ended.
pub(crate) fn recorded(
    own: &SessionsHandle,
    peers: &[Peer],
    node: &str,
    record: &SessionRecord,
) -> Session {
    let mut session = own.recorded(node, record);
    let peer = peers.iter().find(|peer| peer.name == node);
    let why = match peer.map(|peer| peer.standing) {
        Some(PeerStanding::Silent) => "its node is silent; if it stays so, others take it over",
        Some(PeerStanding::Fenced) => "its node was lost, and no other has taken it over yet",
        Some(PeerStanding::Live) | None => return session,
    };
    if !session.state.is_ended() {
        session.reason.get_or_insert_with(|| why.to_owned());
    }
    if matches!(
        session.state,
        SessionState::Starting | SessionState::Running | SessionState::Paused
    ) {
        session.state = SessionState::Frozen;
    }
    session
}

/// Why the list of nodes may be out of date.
pub(crate) fn warnings(map: &FleetMap) -> Vec<String> {
    let why = map.fleet().why_late();
    why.map(|why| {
        format!(
            "the registry does not answer node {}, and what is shown of other nodes is what was \
             read last: {why}",
            map.me()
        )
    })
    .into_iter()
    .collect()
}

/// All nodes, ordered by name.
pub(crate) fn nodes(own: &StatusHandle, map: &FleetMap) -> Vec<conman_proto::Node> {
    let peers = map.fleet().peers();
    let fleet_comparison = FleetComparison::of(map, &peers);
    let shown = peers
        .iter()
        .map(|peer| show_node(own, map, &fleet_comparison, peer));
    let mut nodes: Vec<_> = shown.collect();
    if !peers.iter().any(|peer| peer.name == map.me()) {
        // It has not joined yet.
        nodes.push(own.view());
        nodes.sort_by(|one, other| one.name.cmp(&other.name));
    }
    nodes
}

/// One node by its name, or `self`.
pub(crate) fn node(own: &StatusHandle, map: &FleetMap, name: &str) -> Option<conman_proto::Node> {
    let name = if name == "self" { map.me() } else { name };
    let peers = map.fleet().peers();
    let peer = peers.iter().find(|peer| peer.name == name)?;
    Some(show_node(own, map, &FleetComparison::of(map, &peers), peer))
}

/// Of a node that is not heard of, what it announced last is not so any more: nothing of it runs, and once it
/// is declared dead its sessions are counted where they are started again.
fn leave_what_runs(view: &mut conman_proto::Node, standing: PeerStanding) {
    let frozen = match standing {
        PeerStanding::Live => return,
        PeerStanding::Silent => {
            view.sessions_running
                + view.sessions_starting
                + view.sessions_paused
                + view.sessions_frozen
        }
        PeerStanding::Fenced => {
            view.sessions_stuck = 0;
            0
        }
    };
    view.sessions_frozen = frozen;
    (view.sessions_running, view.sessions_starting) = (0, 0);
    view.sessions_paused = 0;
    (view.connections, view.through) = (0, 0);
}

fn show_node(
    own: &StatusHandle,
    map: &FleetMap,
    fleet_comparison: &FleetComparison,
    peer: &Peer,
) -> conman_proto::Node {
    let mine = peer.name == map.me();
    let announced = peer.announcement.as_ref();
    let view = if mine {
        Some(own.view())
    } else {
        announced.and_then(|announced| announced.view.clone())
    };
    let mut view = view.unwrap_or_else(|| conman_proto::Node::unannounced(&peer.name));
    if !mine {
        leave_what_runs(&mut view, peer.standing);
    }
    view.fleet = Some(NodeInFleet {
        standing: map.standing(peer),
        draining: announced.is_some_and(|announced| announced.draining),
        cut_off: fleet_comparison.cut_off.contains(&peer.name),
        clock_ahead_ms: fleet_comparison.clock_ahead_ms(peer),
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
