//! The journal: a resumable event stream, a page of it, and one session's part.

use std::convert::Infallible;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse as _, Response};
use conman_proto::{Event, EventKind, EventPage, SessionId, Timeline};
use conman_registry::MAX_EVENT_PAGE;
use futures_util::{Stream, StreamExt as _};
use http::{HeaderMap, Uri};

use crate::ApiState;
use crate::path_params::SessionPath;
use crate::problem::ApiError;
use crate::query::Query;

/// Comments on an idle stream, so that proxies keep it open and a vanished client is found.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Longest wait for events to become durable before they are read.
const SETTLE: Duration = Duration::from_secs(1);

/// Largest sequence number that JSON readers keep exact.
const MAX_SEQ: u64 = (1 << 53) - 1;

const DEFAULT_PAGE: u64 = 100;
const MAX_PAGE: u64 = MAX_EVENT_PAGE as u64;

/// What happens on the node
///
/// Server-sent events, one JSON `Event` each, with the event's `seq` as its id: a client that
/// reconnects with `Last-Event-ID` (or `?after=`) goes on where it was, also after a restart of
/// the daemon. Without either the stream begins with what happens next; `?after=0` begins with
/// the oldest event kept. An event of kind `events_lost` stands where events are missing, with any
/// filter. A position that this journal never had begins with the oldest event kept.
///
/// With `?follow=false` the answer is one page of events after `after` as JSON.
#[utoipa::path(
    get, path = "/v1/events", tag = "events", operation_id = "get_events",
    params(
        ("after" = Option<u64>, Query, maximum = 9_007_199_254_740_991_u64, description =
            "Only events with a greater `seq`. `Last-Event-ID` wins over it."),
        ("Last-Event-ID" = Option<u64>, Header, nullable = false, maximum = 9_007_199_254_740_991_u64, description =
            "The last event seen; EventSource sends it when it reconnects."),
        ("session" = Option<SessionId>, Query, description = "Only events of this session."),
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
        (status = 503, description = "registry-failed"),
    )
)]
pub(crate) async fn events(
    State(state): State<ApiState>,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let mut query = Query::of(&uri);
    let after = query.number("after", 0, MAX_SEQ);
    let session = query.parsed("session", str::parse::<SessionId>);
    let follow = query.flag("follow", true);
    let limit = query.number("limit", 1, MAX_PAGE);
    if follow && limit.is_some() {
        query.mistake("limit", "needs `follow=false`");
    }
    let last_seen = last_event_id(&headers, &mut query);
    query.finish()?;
    let after = last_seen.or(after);
    if follow {
        return Ok(stream_from(&state, after, session).await?.into_response());
    }
    settle(&state).await;
    let limit = limit.unwrap_or(DEFAULT_PAGE);
    let page = page(&state, after.unwrap_or(0), limit, session.as_ref()).await?;
    Ok(Json(page).into_response())
}

/// What happened to a session
///
/// Its events, oldest first, and every phase of its latest start with its duration. A session
/// that was forgotten keeps its timeline while the journal holds its events.
#[utoipa::path(
    get, path = "/v1/sessions/{id}/timeline", tag = "events", operation_id = "get_timeline",
    params(("id" = SessionId, Path, description = "The session's name.")),
    responses(
        (status = 200, description = "The timeline.", body = Timeline),
        (status = 404, description = "no-such-session"),
        (status = 503, description = "registry-failed"),
    )
)]
pub(crate) async fn timeline(
    State(state): State<ApiState>,
    SessionPath(id): SessionPath,
    uri: Uri,
) -> Result<Json<Timeline>, ApiError> {
    Query::of(&uri).finish()?;
    settle(&state).await;
    let timeline = state.node.journal().timeline(&id).await?;
    if timeline.events.is_empty() && state.node.get(&id).is_none() {
        return Err(super::sessions::no_such_session(&id));
    }
    Ok(Json(timeline))
}

/// Waits a moment for what the caller's own earlier requests brought about to become durable,
/// and thus visible.
async fn settle(state: &ApiState) {
    // What a slow disk has not written by then is shown to whoever asks later.
    let _ = tokio::time::timeout(SETTLE, state.node.journal().flush()).await;
}

fn last_event_id(headers: &HeaderMap, query: &mut Query) -> Option<u64> {
    let value = headers.get("last-event-id")?;
    let seq = value
        .to_str()
        .ok()
        .and_then(|text| text.parse::<u64>().ok());
    if seq.is_none_or(|seq| seq > MAX_SEQ) {
        query.mistake(
            "Last-Event-ID",
            "must be the id of an event that this node sent",
        );
        return None;
    }
    seq
}

async fn stream_from(
    state: &ApiState,
    asked: Option<u64>,
    session: Option<SessionId>,
) -> Result<Sse<impl Stream<Item = Result<SseEvent, Infallible>> + use<>>, ApiError> {
    let journal = state.node.journal();
    let last_seq = journal.page(asked.unwrap_or(0), 1).await?.last_seq;
    let after = match asked {
        None => last_seq,
        // The journal that had this position was lost: everything here is news.
        Some(asked) if asked > last_seq => 0,
        Some(asked) => asked,
    };
    let events = journal
        .follow(after)
        .filter(move |event| std::future::ready(is_for(event, session.as_ref())))
        .map(|event| Ok(to_sse(&event)))
        .take_until(state.closing.clone().cancelled_owned());
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)))
}

/// A page of at most `limit` events of `session`, or of everything. With a session, pages of the
/// journal are read until enough are found.
async fn page(
    state: &ApiState,
    after: u64,
    limit: u64,
    session: Option<&SessionId>,
) -> Result<EventPage, ApiError> {
    let journal = state.node.journal();
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let Some(session) = session else {
        return Ok(journal.page(after, limit).await?);
    };
    let mut found = Vec::new();
    let mut position = after;
    let mut truncated = None;
    loop {
        let page = journal.page(position, MAX_EVENT_PAGE).await?;
        let truncated = *truncated.get_or_insert(page.truncated);
        let end = page.events.last().map(|event| event.seq);
        let wanted = page
            .events
            .into_iter()
            .filter(|event| is_for(event, Some(session)));
        found.extend(wanted.take(limit - found.len()));
        match end {
            Some(end) if found.len() < limit => position = end,
            _ => {
                return Ok(EventPage {
                    events: found,
                    last_seq: page.last_seq,
                    truncated,
                });
            }
        }
    }
}

fn is_for(event: &Event, session: Option<&SessionId>) -> bool {
    session.is_none_or(|session| event.session.as_ref() == Some(session))
        || event.kind == EventKind::EventsLost
}

fn to_sse(event: &Event) -> SseEvent {
    // Plain data always becomes JSON, and JSON has no line breaks of its own.
    let data = serde_json::to_string(event).unwrap_or_default();
    SseEvent::default().id(event.seq.to_string()).data(data)
}
