//! Events: a resumable stream, a page of it, and one session's part.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Extension, State};
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse as _, Response};
use conman_auth::{Caller, CallerOrigin};
use conman_fleet::Passage;
use conman_proto::{Event, EventKind, EventPage, SessionId, SessionOwnership, Timeline};
use conman_registry::MAX_EVENT_PAGE;
use futures_util::{Stream, StreamExt as _, stream};
use http::HeaderMap;
use tokio_util::sync::CancellationToken;

use crate::events::{
    EventFilter, FleetEvents, Merged, PageRequest, Position, page, read_fleet_page,
};
use crate::forwarding::ByPeer;
use crate::path_params::SessionPath;
use crate::problem::{ApiError, IntoApiError as _, Kind};
use crate::query::Query;
use crate::{ApiState, fleet_timeline};

/// Interval of comments on an idle stream: they keep proxies from closing it and detect lost
/// clients.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Longest wait for events to become durable before they are read.
const SETTLE: Duration = Duration::from_secs(3);

const DEFAULT_PAGE: u64 = 100;
const MAX_PAGE: u64 = MAX_EVENT_PAGE as u64;

/// What happens
///
/// Server-sent events, one JSON `Event` each, of all nodes of the fleet. Events of one node are in
/// their order; those of several nodes come as they arrive. The stream's ids are opaque; a
/// client that reconnects with `Last-Event-ID` (or `?after=`) continues from its position on every
/// node, also after restarts of daemons and through another node. The first message has only an id,
/// so that this works before the first event, too. Without a position the stream begins with the next
/// event; `?after=0` begins with the oldest stored events.
///
/// Events of nodes that join later are included from then on, and from up to 30 s earlier, because
/// clocks may differ by as much. An `events_lost` event marks events that are lost for good. A
/// `node_unreachable` event names a node whose events are missing, and why; they follow after
/// `node_reached`. A position that a journal never had begins with an `events_lost` event and then its
/// oldest one. Phases of starts (`session_phase`) come only to clients that name that kind.
///
/// With `local=true`, and on a node without a fleet, the stream has only this node's events, and their
/// ids are their `seq`.
///
/// With `?follow=false` the answer is one page of events after `after` as JSON, ordered by time.
#[utoipa::path(
    get, path = "/v1/events", tag = "events", operation_id = "get_events",
    params(
        ("after" = inline(Option<EventPosition>), Query, description =
            "Only events behind this position: the id of an event, the `cursor` of a page, or 0. \
             `Last-Event-ID` wins over it."),
        ("Last-Event-ID" = inline(Option<EventPosition>), Header, nullable = false, description =
            "The last event seen; EventSource sends it when it reconnects."),
        ("session" = Option<SessionId>, Query, description = "Only events of this session."),
        ("node" = Option<String>, Query, description = "Only events of this node, or `self`."),
        ("kind" = Option<Vec<EventKind>>, Query, description =
            "Only events of this kind; repeated: of any of them. Missing events are reported in any \
             case. Absent: all but `session_phase`."),
        ("local" = Option<bool>, Query, description =
            "`true`: ask no other node."),
        ("follow" = Option<bool>, Query, description =
            "`false`: answer one page instead of a stream."),
        ("limit" = Option<u32>, Query, minimum = 1, maximum = 1_000, description =
            "Most events on the page, 100 when absent; only with `follow=false`."),
    ),
    responses(
        (status = 200, description = "The stream, or the page.", content(
            (String = "text/event-stream"),
            (EventPage = "application/json"),
        )),
        (status = 404, description = "no-such-node"),
        (status = 429, description = "too-many-own-streams"),
        (status = 503, description = "registry-failed or too-many-streams"),
    )
)]
pub(crate) async fn events(
    State(state): State<ApiState>,
    Extension(caller): Extension<Caller>,
    by_peer: Option<Extension<ByPeer>>,
    mut query: Query,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let after = query.parsed("after", str::parse::<Position>);
    let filter = filter(&mut query);
    let node = query.one("node");
    let local = query.flag("local", false);
    let follow = query.flag("follow", true);
    let limit = query.number("limit", 1, MAX_PAGE);
    if follow && limit.is_some() {
        query.mistake("limit", "needs `follow=false`");
    }
    if local && node.is_some() {
        query.mistake(
            "node",
            "cannot be combined with `local`, which means the receiving node",
        );
    }
    let last_seen = last_event_id(&headers, &mut query);
    query.finish()?;
    let only = only_of(&state, node)?;
    let after = last_seen.or(after);
    let limit = usize::try_from(limit.unwrap_or(DEFAULT_PAGE)).unwrap_or(usize::MAX);
    settle(&state).await;
    let journal = state.node.journal();
    // A forwarded request is not forwarded again.
    let others = state.others().filter(|_| by_peer.is_none() && !local);
    let Some(map) = others else {
        let after = after.map(|position| own_position(&state, &position));
        if follow {
            return Ok(stream_from(&state, after, filter).await?.into_response());
        }
        let request = PageRequest {
            after: after.unwrap_or(0),
            limit,
            filter,
            waits: false,
        };
        return Ok(Json(page(journal, &request).await?).into_response());
    };
    let is_here = matches!(caller.origin, CallerOrigin::AdminSocket { .. });
    let events = FleetEvents {
        map: Arc::clone(map),
        only,
        filter,
        caller,
    };
    if !follow {
        // A page without a position begins with the oldest event.
        let after = after.unwrap_or(Position::Own(0));
        let page = read_fleet_page(events, journal, &state.streams, (after, limit)).await?;
        return Ok(Json(page).into_response());
    }
    let merged = Merged::open(events, journal, &state.streams, after).await?;
    // An operator on this machine depends on no load balancer.
    let passage = (!is_here).then(|| Passage::begin(state.node.leave()));
    Ok(merged_stream(&state, merged, passage).into_response())
}

/// `0`, the id of an event, or the `cursor` of a page.
#[derive(utoipa::ToSchema)]
#[schema(
    pattern = "^([0-9]{1,15}|f1-[0-9a-f]{1,12}(-[0-9a-f]{1,12}\\.[0-9a-f]{1,12}){0,256})$",
    example = "0"
)]
#[expect(dead_code, reason = "it describes a parameter")]
struct EventPosition(String);

fn filter(query: &mut Query) -> EventFilter {
    let session = query.parsed("session", str::parse::<SessionId>);
    let kinds = query.each("kind", |text| {
        let kind = text.parse::<EventKind>();
        kind.map_err(|error| format!("`{text}` {error}"))
    });
    EventFilter {
        session,
        kinds,
        since_ms: 0,
    }
}

/// The only node whose events are requested.
fn only_of(state: &ApiState, node: Option<String>) -> Result<Option<String>, ApiError> {
    let Some(node) = node else {
        return Ok(None);
    };
    let me = state.node.name();
    if node == "self" || node == me {
        return Ok(Some(me.to_owned()));
    }
    let peers = state.others().map(|map| map.fleet().peers());
    if peers.is_some_and(|peers| peers.iter().any(|peer| peer.name == node)) {
        return Ok(Some(node));
    }
    Err(Kind::NO_SUCH_NODE.because(format!(
        "there is no node `{}`; `self` is this one, and /v1/nodes lists all",
        crate::field_errors::cut(&node)
    )))
}

/// The meaning of a position in this node's journal.
fn own_position(state: &ApiState, position: &Position) -> u64 {
    match position {
        Position::Own(seq) => *seq,
        Position::Fleet(cursor) => cursor.seq(state.node.name()).unwrap_or(0),
    }
}

/// What happened to a session
///
/// Its events on all nodes, oldest first, every phase of its latest start with its duration, and
/// how the fleet stands to it. Nodes that cannot be asked are named. A session that was forgotten
/// keeps its timeline while a journal holds its events.
#[utoipa::path(
    get, path = "/v1/sessions/{id}/timeline", tag = "events", operation_id = "get_timeline",
    params(
        ("id" = SessionId, Path, description = "The session's name."),
        ("local" = Option<bool>, Query, description = "`true`: ask no other node."),
    ),
    responses(
        (status = 200, description = "The timeline.", body = Timeline),
        (status = 404, description = "no-such-session"),
        (status = 503, description = "registry-failed"),
    )
)]
pub(crate) async fn timeline(
    State(state): State<ApiState>,
    Extension(caller): Extension<Caller>,
    by_peer: Option<Extension<ByPeer>>,
    SessionPath(id): SessionPath,
    mut query: Query,
) -> Result<Json<Timeline>, ApiError> {
    let local = query.flag("local", false);
    query.finish()?;
    settle(&state).await;
    let mut timeline = state.node.journal().timeline(&id).await?;
    if let Some(map) = state.others().filter(|_| by_peer.is_none() && !local) {
        timeline = fleet_timeline::gather(&state.node, map, &caller, timeline).await;
    }
    let is_known = timeline
        .fleet
        .as_ref()
        .is_some_and(|fleet| fleet.ownership != SessionOwnership::Nobody);
    if timeline.events.is_empty() && !is_known && state.node.sessions().get(&id).is_none() {
        return Err(super::sessions::no_such_session(&id));
    }
    Ok(Json(timeline))
}

/// Waits a moment until the effects of the caller's earlier requests are durable, and thus
/// visible.
pub(super) async fn settle(state: &ApiState) {
    // Events that a slow disk has not written by then are visible to later requests.
    let _ = tokio::time::timeout(SETTLE, state.node.journal().flush()).await;
}

fn last_event_id(headers: &HeaderMap, query: &mut Query) -> Option<Position> {
    let value = headers.get("last-event-id")?;
    let position = value.to_str().ok().and_then(|text| text.parse().ok());
    if position.is_none() {
        query.mistake("Last-Event-ID", "must be the id of an event");
    }
    position
}

fn merged_stream(
    state: &ApiState,
    merged: Merged,
    passage: Option<Passage>,
) -> Sse<impl Stream<Item = Result<SseEvent, Infallible>> + use<>> {
    let first = SseEvent::default().id(merged.cursor().to_string());
    let events = stream::unfold(merged, |mut merged| async move {
        let event = merged.next().await;
        let message = to_sse(&event, &merged.cursor().to_string());
        Some((Ok(message), merged))
    });
    let events = stream::iter([Ok(first)])
        .chain(events)
        .take_until(ends(state.closing.clone(), passage));
    Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE))
}

/// Returns when the daemon stops, or when the node leaves and closes what passes through it.
async fn ends(closing: CancellationToken, passage: Option<Passage>) {
    let leaves = async {
        match passage {
            Some(mut passage) => passage.closes().await,
            None => std::future::pending().await,
        }
    };
    closing.run_until_cancelled(leaves).await;
}

async fn stream_from(
    state: &ApiState,
    asked: Option<u64>,
    filter: EventFilter,
) -> Result<Sse<impl Stream<Item = Result<SseEvent, Infallible>> + use<>>, ApiError> {
    let journal = state.node.journal();
    let after = match asked {
        None => journal.page(0, 1).await?.last_seq,
        Some(asked) => asked,
    };
    let events = journal
        .follow(after)
        .filter(move |event| std::future::ready(filter.wants(event)))
        .map(|event| Ok(to_sse(&event, &event.seq.to_string())));
    let events = stream::iter([Ok(SseEvent::default().id(after.to_string()))])
        .chain(events)
        .take_until(state.closing.clone().cancelled_owned());
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)))
}

fn to_sse(event: &Event, id: &str) -> SseEvent {
    // Plain data always becomes JSON, and JSON contains no line breaks.
    let data = serde_json::to_string(event).unwrap_or_default();
    SseEvent::default().id(id).data(data)
}
