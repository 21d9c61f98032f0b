//! Path parameters; their refusal is a problem that states the rule.

use axum::extract::{FromRequestParts, Path};
use conman_image::ImageName;
use conman_proto::{ExecId, InterfaceName, NetworkError, SessionId};
use http::request::Parts;

use crate::problem::{ApiError, IntoApiError as _, Kind};
use crate::query::NoQuery;
use crate::{ApiState, field_errors};

/// `{id}` of a session's path.
#[derive(Debug)]
pub(crate) struct SessionPath(pub(crate) SessionId);

impl<S: Send + Sync> FromRequestParts<S> for SessionPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let text = segment(parts, state).await?;
        text.parse()
            .map(Self)
            .map_err(|error: conman_proto::SessionIdError| bad_id(error.to_string()))
    }
}

/// `{id}` and `{port}` of the path of a session's port.
#[derive(Debug)]
pub(crate) struct PortPath(pub(crate) SessionId, pub(crate) u16);

impl<S: Send + Sync> FromRequestParts<S> for PortPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let (id, port) = session_and(parts, state).await?;
        match port.parse() {
            Ok(port) if port > 0 => Ok(Self(id, port)),
            _ => Err(bad("port", "is a number from 1 to 65535".to_owned())),
        }
    }
}

/// `{id}` and `{exec}` of a kept command's path.
#[derive(Debug)]
pub(crate) struct ExecPath(pub(crate) SessionId, pub(crate) ExecId);

impl<S: Send + Sync> FromRequestParts<S> for ExecPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let (id, exec) = session_and(parts, state).await?;
        let exec = exec.parse().map_err(|error| bad("exec", error))?;
        Ok(Self(id, exec))
    }
}

/// `{id}` and `{name}` of an attached link's path.
#[derive(Debug)]
pub(crate) struct LinkPath(pub(crate) SessionId, pub(crate) InterfaceName);

impl<S: Send + Sync> FromRequestParts<S> for LinkPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let (id, name) = session_and(parts, state).await?;
        let name = name.parse();
        let name = name.map_err(|error: NetworkError| bad("name", error.to_string()))?;
        Ok(Self(id, name))
    }
}

/// `{id}` of a node's path: its name, or `self`.
#[derive(Debug)]
pub(crate) struct NodePath(String);

impl NodePath {
    pub(crate) fn name(&self) -> &str {
        &self.0
    }

    /// Refuses every node but the one called `own`.
    pub(crate) fn require(&self, own: &str) -> Result<(), ApiError> {
        if self.0 == "self" || self.0 == own {
            return Ok(());
        }
        let given = field_errors::cut(&self.0);
        Err(Kind::NO_SUCH_NODE.because(format!(
            "there is no node `{given}`; this one is `{own}`, or `self`"
        )))
    }
}

impl<S: Send + Sync> FromRequestParts<S> for NodePath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        segment(parts, state).await.map(Self)
    }
}

/// The path of this node, of a request that has no query.
#[derive(Debug)]
pub(crate) struct OwnNode;

impl FromRequestParts<ApiState> for OwnNode {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &ApiState) -> Result<Self, ApiError> {
        NoQuery::from_request_parts(parts, state).await?;
        let node = NodePath::from_request_parts(parts, state).await?;
        node.require(state.node.name()).map(|()| Self)
    }
}

/// `{name}` of an image's path.
#[derive(Debug)]
pub(crate) struct ImagePath(pub(crate) ImageName);

impl<S: Send + Sync> FromRequestParts<S> for ImagePath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let text = segment(parts, state).await?;
        text.parse()
            .map(Self)
            .map_err(|error: conman_image::ImageNameError| bad("name", error.to_string()))
    }
}

/// A session's id and the next parameter of the path.
async fn session_and<S: Send + Sync>(
    parts: &mut Parts,
    state: &S,
) -> Result<(SessionId, String), ApiError> {
    let path = Path::<(String, String)>::from_request_parts(parts, state).await;
    let Path((id, next)) =
        path.map_err(|rejection| bad_id(field_errors::cut(&rejection.body_text())))?;
    let id = id
        .parse()
        .map_err(|error: conman_proto::SessionIdError| bad_id(error.to_string()))?;
    Ok((id, next))
}

async fn segment<S: Send + Sync>(parts: &mut Parts, state: &S) -> Result<String, ApiError> {
    Path::<String>::from_request_parts(parts, state)
        .await
        .map(|Path(text)| text)
        .map_err(|rejection| bad_id(field_errors::cut(&rejection.body_text())))
}

fn bad_id(message: String) -> ApiError {
    bad("id", message)
}

fn bad(field: &str, message: String) -> ApiError {
    Kind::BAD_PATH.with_fields(vec![conman_proto::FieldError {
        field: field.to_owned(),
        message,
    }])
}
