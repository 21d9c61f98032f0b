//! Connect tokens, with which a frontend lets its user into one session.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use conman_auth::MintError;
use conman_proto::{ConnectToken, ConnectTokenRequest, SessionId};
use jiff::Timestamp;

use crate::ApiState;
use crate::json_body::JsonBody;
use crate::path_params::SessionPath;
use crate::problem::{ApiError, IntoApiError as _, Kind};

const DEFAULT_TTL_S: u32 = 300;

/// The query parameter that carries a token to the sessions listener.
const IN_URL: &str = "conman_token";

/// Make a connect token
///
/// A short-lived token that opens connections to this session and nothing else. The session need
/// not run yet, nor exist: a connection with the token may start it where its template allows.
#[utoipa::path(
    post, path = "/v1/sessions/{id}/token", tag = "sessions", operation_id = "make_connect_token",
    params(("id" = SessionId, Path, description = "The session's name.")),
    request_body = ConnectTokenRequest,
    responses((status = 200, description = "The token.", body = ConnectToken))
)]
pub(crate) async fn make(
    State(state): State<ApiState>,
    SessionPath(id): SessionPath,
    JsonBody(asked): JsonBody<ConnectTokenRequest>,
) -> Result<Json<ConnectToken>, ApiError> {
    let ttl = Duration::from_secs(asked.ttl_s.unwrap_or(DEFAULT_TTL_S).into());
    let minted = state
        .connect_tokens
        .mint(&id, ttl, Timestamp::now())
        .map_err(|error| match error {
            MintError::Ttl { max_s } => {
                Kind::BAD_BODY.in_field("ttl_s", format!("must be from 1 to {max_s}"))
            }
            MintError::Random => Kind::HOST_FAILED.because(error.to_string()),
        })?;
    let has_port = state
        .node
        .sessions()
        .get(&id)
        .is_none_or(|session| session.url.is_some());
    let url = has_port.then(|| {
        let page = state.node.sessions().browser_url(&id);
        format!("{page}?{IN_URL}={}", minted.token)
    });
    Ok(Json(ConnectToken {
        token: minted.token,
        expires_at: minted.expires_at,
        url,
    }))
}
