//! Where a session of a fleet is, and why it is there or on no node.

use conman_proto::{NodeReason, NodeStanding, Session, SessionOwnership, Timeline};

use super::advice::Case;

/// Nodes that are listed with their reasons; more are only counted.
const MAX_NODES: usize = 5;

/// The case and the headline of a session whose node's report is missing or no longer counts.
pub(super) fn unreported(
    timeline: &Timeline,
    session: Option<&Session>,
) -> Option<(Case<'static>, String)> {
    let fleet = timeline.fleet.as_ref()?;
    let (id, node) = (&timeline.id, fleet.node.as_deref()?);
    let is_silent = matches!(
        fleet.standing,
        Some(NodeStanding::Silent | NodeStanding::Fenced)
    );
    let (case, place) = match fleet.ownership {
        SessionOwnership::Lost => (
            Case::NoNode,
            format!("is not running: its node {node} was declared dead, and no other started it"),
        ),
        SessionOwnership::Owned if is_silent => (
            Case::Unreachable,
            format!("is on {node}, which has been silent for a while"),
        ),
        SessionOwnership::Owned if session.is_none() => (
            Case::Unreachable,
            format!("is on {node}, which does not answer for it"),
        ),
        SessionOwnership::Released if session.is_none() => (
            Case::NoNode,
            format!("is not running: it ended on {node}, which cannot be reached"),
        ),
        SessionOwnership::Nobody
        | SessionOwnership::Owned
        | SessionOwnership::Released
        | SessionOwnership::Unknown => return None,
    };
    Some((case, format!("{id} {place}")))
}

/// Why it is where it is, and which nodes could not be reached.
pub(super) fn facts(timeline: &Timeline) -> Vec<String> {
    let Some(fleet) = &timeline.fleet else {
        return Vec::new();
    };
    let mut facts = Vec::new();
    let node = fleet.node.as_deref().unwrap_or_default();
    match fleet.ownership {
        SessionOwnership::Owned if fleet.standing != Some(NodeStanding::Live) => {
            facts.push(format!("{node} {}", in_words(fleet.standing)));
        }
        SessionOwnership::Lost => facts.push(format!(
            "The shim of {node} froze what ran there before {node} was declared dead: it runs nowhere"
        )),
        _ => {}
    }
    let is_owned = fleet.ownership == SessionOwnership::Owned;
    if !is_owned && fleet.takers.is_empty() && !fleet.refused.is_empty() {
        let nodes = listed(&fleet.refused);
        facts.push(format!("No node would start it now: {nodes}"));
    }
    if let Some(error) = &fleet.registry_error {
        facts.push(format!(
            "The registry cannot be asked which node owns it: {error}"
        ));
    }
    if !fleet.unreachable_nodes.is_empty() {
        let nodes = listed(&fleet.unreachable_nodes);
        facts.push(format!("Events may be missing, of: {nodes}"));
    }
    facts
}

/// What a node's standing means for the sessions that it owns.
fn in_words(standing: Option<NodeStanding>) -> &'static str {
    match standing {
        Some(NodeStanding::Live) => "is live",
        Some(NodeStanding::Joining) => "has just joined, and takes over what ran there before",
        Some(NodeStanding::Late) => {
            "is late to renew its ownership; if that stays so, what runs there is frozen"
        }
        Some(NodeStanding::Silent) => {
            "has not renewed its ownership: what runs there is frozen, and once it is declared dead \
             any node may start the session"
        }
        Some(NodeStanding::Fenced) => {
            "has no ownership at present: what runs there is frozen until it is renewed"
        }
        None => "is not among the nodes of the fleet",
    }
}

fn listed(nodes: &[NodeReason]) -> String {
    let named = nodes.iter().take(MAX_NODES);
    let mut named: Vec<String> = named
        .map(|NodeReason { node, why }| format!("{node} ({why})"))
        .collect();
    if let Some(more @ 1..) = nodes.len().checked_sub(MAX_NODES) {
        named.push(format!("{more} more"));
    }
    named.join(", ")
}
