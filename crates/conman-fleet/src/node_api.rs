//! Paths that only nodes request, served on the listener for nodes.

use conman_proto::{Generation, SessionId};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

/// Makes a session ready (POST).
pub const READY: &str = "/peer/sessions/{id}/ready";
/// Restarts a session that lost its node (POST).
pub const RESTART: &str = "/peer/sessions/{id}/restart";
/// A node's journal of a session (GET).
pub const TIMELINE: &str = "/peer/sessions/{id}/timeline";
/// A page of a node's events (GET).
pub const EVENTS: &str = "/peer/events";

/// [`READY`]: `may_start` if a connection may start it, `is_lost` if its `former` node is lost.
pub(crate) fn ready(id: &SessionId, may_start: bool, former: &str, is_lost: bool) -> String {
    let from = utf8_percent_encode(former, NON_ALPHANUMERIC);
    format!("/peer/sessions/{id}/ready?start={may_start}&lost={is_lost}&from={from}")
}

/// [`RESTART`] of the generation that was on the `former` node; `elsewhere` if another node may
/// have the image.
pub(crate) fn restart(
    id: &SessionId,
    former: &str,
    generation: Generation,
    elsewhere: bool,
) -> String {
    let from = utf8_percent_encode(former, NON_ALPHANUMERIC);
    format!("/peer/sessions/{id}/restart?from={from}&generation={generation}&elsewhere={elsewhere}")
}

/// [`TIMELINE`] of one session.
#[must_use]
pub fn timeline(id: &SessionId) -> String {
    format!("/peer/sessions/{id}/timeline")
}
