//! Where a session of a fleet is, and why it is there or nowhere.

use conman_proto::{NodeReason, NodeStanding, Session, SessionInFleet, SessionOwnership, Timeline};

use super::advice::RESTARTS;
use super::chapter::Chapter;
use super::without_stop;
use crate::human::printable;

/// Reasons of nodes that are listed; more are only counted.
const REASONS_TOLD: usize = 5;

/// Where it is, if its node's report is missing or no longer counts.
pub(super) fn headline(timeline: &Timeline, session: Option<&Session>) -> Option<String> {
    let fleet = timeline.fleet.as_ref()?;
    let id = &timeline.id;
    let node = fleet.node.as_deref().map(printable)?;
    match fleet.ownership {
        SessionOwnership::Lost => Some(format!(
            "{id} is not running: its node {node} was declared dead, and no other has started it \
             since."
        )),
        SessionOwnership::Owned if is_silent(fleet) => Some(format!(
            "{id} is on {node}, which has been silent for a while."
        )),
        SessionOwnership::Owned if session.is_none() => {
            Some(format!("{id} is on {node}, which does not answer for it."))
        }
        SessionOwnership::Released if session.is_none() => Some(format!(
            "{id} is not running: it ended on {node}, which cannot be reached."
        )),
        SessionOwnership::Nobody
        | SessionOwnership::Owned
        | SessionOwnership::Released
        | SessionOwnership::Unknown => None,
    }
}

/// Why it is where it is, and which nodes could not be reached.
pub(super) fn present(timeline: &Timeline) -> Vec<String> {
    let Some(fleet) = &timeline.fleet else {
        return Vec::new();
    };
    let mut sentences = Vec::new();
    let node = fleet.node.as_deref().map(printable).unwrap_or_default();
    if fleet.ownership == SessionOwnership::Owned {
        match fleet.standing {
            Some(NodeStanding::Silent) => sentences.push(format!(
                "{node} has not renewed its ownership: what runs there is frozen, and when \
                 {node} is declared dead, any node may start the session."
            )),
            Some(NodeStanding::Fenced) => sentences.push(format!(
                "The ownership of {node} has lapsed: what runs there is frozen until it is renewed."
            )),
            Some(NodeStanding::Late) => sentences.push(format!(
                "{node} is late to renew its ownership; if that stays so, what runs there is frozen."
            )),
            Some(NodeStanding::Joining) => sentences.push(format!(
                "{node} has just joined, and takes over what ran there before."
            )),
            Some(NodeStanding::Live) => {}
            None => sentences.push(format!("{node} is not among the nodes of the fleet.")),
        }
    }
    if fleet.ownership == SessionOwnership::Lost {
        sentences.push(format!(
            "Its shim froze what ran on {node} before {node} was declared dead, so that it runs \
             nowhere now."
        ));
    }
    let is_free = matches!(
        fleet.ownership,
        SessionOwnership::Lost | SessionOwnership::Released
    );
    if is_free && fleet.takers.is_empty() && !fleet.refused.is_empty() {
        let reasons = listed(&fleet.refused, " ");
        sentences.push(format!("No node would start it now: {reasons}."));
    }
    if let Some(error) = &fleet.registry_error {
        sentences.push(format!(
            "The registry cannot be asked who owns it: {}.",
            without_stop(&printable(error))
        ));
    }
    for NodeReason { node, why } in fleet.unasked.iter().take(REASONS_TOLD) {
        sentences.push(format!(
            "{} could not be asked what it knows: {}.",
            printable(node),
            without_stop(&printable(why))
        ));
    }
    if let Some(more @ 1..) = fleet.unasked.len().checked_sub(REASONS_TOLD) {
        sentences.push(format!("Nor could {more} more nodes."));
    }
    sentences
}

/// Advice about a session without a node, or with a silent one.
pub(super) fn next(chapter: &Chapter<'_>) -> Option<Vec<String>> {
    let timeline = chapter.timeline;
    let fleet = timeline.fleet.as_ref()?;
    let id = &timeline.id;
    headline(timeline, chapter.session)?;
    let nodes = "`conman nodes` shows the state of the nodes.".to_owned();
    let is_owned = fleet.ownership == SessionOwnership::Owned;
    let advice = match (is_owned, fleet.takers.first()) {
        (true, _) => {
            "Wait: it continues when its node does, or is started again elsewhere.".to_owned()
        }
        (false, _) if chapter.restarts() => RESTARTS.to_owned(),
        (false, Some(taker)) => format!(
            "`conman run {id}` starts it again, on {} as it looks now; so does a connection, where \
             its template allows that.",
            printable(taker)
        ),
        (false, None) => format!("`conman run {id}` starts it again once a node has room."),
    };
    Some(vec![advice, nodes])
}

fn is_silent(fleet: &SessionInFleet) -> bool {
    matches!(
        fleet.standing,
        Some(NodeStanding::Silent | NodeStanding::Fenced)
    )
}

fn listed(reasons: &[NodeReason], between: &str) -> String {
    let told = reasons.iter().take(REASONS_TOLD);
    let mut told: Vec<String> = told
        .map(|reason| {
            format!(
                "{}{between}{}",
                printable(&reason.node),
                printable(&reason.why)
            )
        })
        .collect();
    if let Some(more @ 1..) = reasons.len().checked_sub(REASONS_TOLD) {
        told.push(format!("and {more} more"));
    }
    told.join("; ")
}
