//! Ensure, get, list and stop sessions.

use axum::Json;
use axum::extract::{Extension, Request, State};
use axum::response::{IntoResponse as _, Response};
use conman_auth::Caller;
use conman_core::listing::{
    DEFAULT_LIMIT, LabelFilter, ListQuery, MAX_LABEL_FILTERS, MAX_LIMIT, parse_state,
};
use conman_proto::{
    EnsureResponse, Session, SessionId, SessionList, SessionRequest, SessionState, StopReport,
};
use http::StatusCode;

use crate::json_body::{self, MAX_BODY_BYTES};
use crate::path_params::SessionPath;
use crate::problem::{ApiError, IntoApiError as _, Kind};
use crate::query::{NoQuery, Query};
use crate::{ApiState, access, fleet_list, forwarding, hidden_env};

/// Ensure that a session runs
///
/// Starts the session, or returns it when it runs already; joins a start that is under way. A
/// running session's spec is never changed: `spec_matches` tells whether it has the one asked
/// for. A stopped or failed session is started again.
#[utoipa::path(
    put, path = "/v1/sessions/{id}", tag = "sessions", operation_id = "ensure_session",
    params(
        ("id" = SessionId, Path, description = "The session's name, chosen by the frontend."),
        ("wait" = Option<bool>, Query, description =
            "Answer once the session is ready (the default), or at once."),
        ("node_label" = inline(Option<Vec<NodeLabel>>), Query, max_items = 16, description =
            "Only on a node with this label, as `key=value`; repeated: with all of them. Added to \
             the spec's `node_labels`."),
    ),
    request_body = SessionRequest,
    responses(
        (status = 200, description = "It runs.", body = EnsureResponse),
        (status = 202, description = "It is starting; only with `wait=false`.",
            body = EnsureResponse),
        (status = 409, description = "session-stopping or session-stuck"),
        (status = 422, description = "bad-spec, no-such-image or start-refused"),
        (status = 502, description = "start-failed"),
        (status = 504, description = "start-not-ready or start-timed-out"),
        (status = 503, description =
            "runtime-unavailable, registry-failed, node-full, host-full, node-preempted, \
             node-recovering, no-node, node-unreachable or session-moves"),
    )
)]
pub(crate) async fn ensure(
    State(state): State<ApiState>,
    SessionPath(id): SessionPath,
    query: Query,
    request: Request,
) -> Result<Response, ApiError> {
    ensure_as(&state, &id, query, request).await
}

pub(super) async fn ensure_as(
    state: &ApiState,
    id: &SessionId,
    mut query: Query,
    request: Request,
) -> Result<Response, ApiError> {
    let wait = query.flag("wait", true);
    let node_labels = forwarding::labels_of(&mut query);
    query.finish()?;
    let mut asked: SessionRequest = json_body::read(request, MAX_BODY_BYTES).await?;
    // Stored with the session, which may be restarted on another node.
    if !node_labels.is_empty() {
        asked
            .node_labels
            .get_or_insert_default()
            .extend(node_labels);
    }
    let answer = state.node.sessions().ensure(id, &asked, wait).await?;
    let status = match answer.session.state {
        SessionState::Starting => StatusCode::ACCEPTED,
        _ => StatusCode::OK,
    };
    Ok((status, Json(answer)).into_response())
}

/// Show a session
///
/// Callers of scope `read` get `***` for the values of `env`.
#[utoipa::path(
    get, path = "/v1/sessions/{id}", tag = "sessions", operation_id = "get_session",
    params(("id" = SessionId, Path, description = "The session's name.")),
    responses(
        (status = 200, description = "The session.", body = Session),
        (status = 404, description = "no-such-session"),
    )
)]
pub(crate) async fn get(
    State(state): State<ApiState>,
    SessionPath(id): SessionPath,
    Extension(caller): Extension<Caller>,
    _: NoQuery,
) -> Result<Json<Session>, ApiError> {
    let session = state.node.sessions().get(&id);
    let session = session.ok_or_else(|| no_such_session(&id))?;
    Ok(Json(hidden_env::of_session(&caller, session)))
}

/// Stop a session
///
/// Kills the session and answers once it is proven dead and released in the registry. Of a fleet's
/// node that does not answer, the session is ended once that node is declared dead; this waits for
/// that, for 30 s at most. Whatever the spec's `on_node_loss` says, a stopped session is not
/// restarted, one that could not be killed yet included.
#[utoipa::path(
    delete, path = "/v1/sessions/{id}", tag = "sessions", operation_id = "stop_session",
    params(
        ("id" = SessionId, Path, description = "The session's name."),
        ("forget" = Option<bool>, Query, description =
            "Forget the session, too, so that it is no longer shown."),
        ("force" = Option<bool>, Query, description =
            "Kill it at once, without `stop_signal` and `stop_grace_ms`."),
    ),
    responses(
        (status = 200, description = "It is dead and released.", body = StopReport),
        (status = 202, description = "A process of it could not be killed yet; `reason` tells why.",
            body = StopReport),
        (status = 404, description = "no-such-session"),
        (status = 503, description = "registry-failed, node-unreachable or session-moves"),
    )
)]
pub(crate) async fn stop(
    State(state): State<ApiState>,
    SessionPath(id): SessionPath,
    Extension(caller): Extension<Caller>,
    mut query: Query,
) -> Result<Response, ApiError> {
    let forget = query.flag("forget", false);
    let force = query.flag("force", false);
    query.finish()?;
    let why = stopped_by(&caller);
    let sessions = state.node.sessions();
    let report = match force {
        true => sessions.stop(&id, &why).await?,
        false => sessions.stop_gently(&id, &why).await?,
    };
    let status = if report.state.is_ended() {
        if forget {
            sessions.forget_ended(&id).await.map_err(|error| {
                let why = format!("session `{id}` has ended and is not forgotten: {error}");
                Kind::NO_REGISTRY.because(why)
            })?;
        }
        StatusCode::OK
    } else {
        StatusCode::ACCEPTED
    };
    Ok((status, Json(report)).into_response())
}

/// The reason of a session that this caller has ended.
pub(crate) fn stopped_by(caller: &Caller) -> String {
    format!("stopped by {}", access::in_words(caller))
}

pub(crate) fn no_such_session(id: &SessionId) -> ApiError {
    Kind::NO_SUCH_SESSION.because(format!("there is no session `{id}`"))
}

/// `key=value`.
#[derive(utoipa::ToSchema)]
#[schema(
    pattern = "^[a-z0-9._/-]{1,63}=[^\\u0000]{0,253}$",
    example = "pool=gpu"
)]
#[expect(dead_code, reason = "it describes a parameter; the forwarder reads it")]
pub(super) struct NodeLabel(String);

/// `key=value`, or `key` for any value.
#[derive(utoipa::ToSchema)]
#[schema(
    pattern = "^[a-z0-9._/-]{1,63}(=[^\\u0000]{0,253})?$",
    example = "team=blue"
)]
#[expect(dead_code, reason = "it describes a parameter")]
struct LabelText(String);

/// List sessions
///
/// Ordered by id, a page at a time. Callers of scope `read` get `***` for the values of `env`.
#[utoipa::path(
    get, path = "/v1/sessions", tag = "sessions", operation_id = "list_sessions",
    params(
        ("state" = Option<Vec<SessionState>>, Query, description =
            "Only sessions in this state; repeated: in any of them."),
        ("node" = Option<String>, Query, description = "Only sessions of this node, or `self`."),
        ("label" = inline(Option<Vec<LabelText>>), Query, max_items = 16, description =
            "Only sessions with this label: `key=value`, or `key` with any value; repeated: with \
             all of them."),
        ("limit" = Option<u32>, Query, minimum = 1, maximum = 1_000, description =
            "Most sessions on the page, 100 when absent."),
        ("cursor" = Option<SessionId>, Query, description = "`next` of the page before."),
    ),
    responses((status = 200, description = "A page.", body = SessionList))
)]
pub(crate) async fn list(
    State(state): State<ApiState>,
    Extension(caller): Extension<Caller>,
    query: Query,
) -> Result<Json<SessionList>, ApiError> {
    let query = list_query(query, state.node.name())?;
    let own = state.node.sessions();
    let mut list = match state.others() {
        Some(map) => fleet_list::sessions(own, map, &query).await,
        None => own.list(&query),
    };
    let sessions = list.sessions.into_iter();
    list.sessions = sessions
        .map(|session| hidden_env::of_session(&caller, session))
        .collect();
    Ok(Json(list))
}

fn list_query(mut query: Query, me: &str) -> Result<ListQuery, ApiError> {
    let states = query.each("state", parse_state);
    let node = query.one("node");
    let labels = query.each("label", str::parse::<LabelFilter>);
    if labels.len() > MAX_LABEL_FILTERS {
        query.mistake("label", format!("at most {MAX_LABEL_FILTERS} are allowed"));
    }
    let limit = query.number("limit", 1, MAX_LIMIT as u64);
    let after = query.parsed("cursor", |text| {
        let after = text.parse::<SessionId>();
        after.map_err(|_| "must be the `next` of an earlier page")
    });
    query.finish()?;
    Ok(ListQuery {
        states,
        node: node.map(|node| if node == "self" { me.to_owned() } else { node }),
        labels,
        limit: limit.map_or(DEFAULT_LIMIT, |limit| limit as usize),
        after,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(query: &str) -> Result<ListQuery, ApiError> {
        let uri = format!("/v1/sessions?{query}").parse().expect("a URI");
        list_query(Query::of(&uri), "n1")
    }

    #[test]
    fn a_query_is_read_whole() {
        let query = parsed(
            "state=running&state=stuck&label=team=blue=ish&label=gpu&node=self&limit=1000&cursor=abc",
        )
        .expect("a query");
        assert_eq!(query.states, [SessionState::Running, SessionState::Stuck]);
        assert_eq!(
            query.labels,
            [
                LabelFilter {
                    key: "team".to_owned(),
                    value: Some("blue=ish".to_owned())
                },
                LabelFilter {
                    key: "gpu".to_owned(),
                    value: None
                },
            ]
        );
        assert_eq!((query.limit, query.node.as_deref()), (1_000, Some("n1")));
        assert_eq!(query.after.expect("a cursor").as_str(), "abc");
    }

    #[test]
    fn every_mistake_of_a_query_is_told_with_what_is_allowed() {
        let refused = parsed("state=runing&limit=1001&cursor=../x&label=UPPER&lable=x");
        let refused = refused.expect_err("five mistakes");
        let mistakes = &refused.problem().errors;
        assert_eq!(mistakes.len(), 5, "{mistakes:?}");
        let message = |field: &str| {
            let mistake = mistakes.iter().find(|mistake| mistake.field == field);
            mistake.expect(field).message.clone()
        };
        for (field, part) in [
            ("state", "did you mean `running`?"),
            ("limit", "1 to 1000"),
            ("lable", "did you mean `label`?"),
        ] {
            assert!(message(field).contains(part), "{mistakes:?}");
        }
        for limit in ["0", "-1"] {
            assert!(parsed(&format!("limit={limit}")).is_err(), "{limit}");
        }
    }
}
