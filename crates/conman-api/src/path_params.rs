//! Path parameters; their refusal is a problem that states the rule.

use std::fmt::Display;
use std::str::FromStr;

use axum::extract::rejection::PathRejection;
use axum::extract::{FromRequestParts, Path};
use conman_image::ImageName;
use conman_proto::{ExecId, InterfaceName, SessionId};
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
        parsed("id", &segment(parts, state).await?).map(Self)
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
            _ => Err(Kind::BAD_PATH.in_field("port", "is a number from 1 to 65535")),
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
        Ok(Self(id, parsed("exec", &exec)?))
    }
}

/// `{id}` and `{name}` of an attached link's path.
#[derive(Debug)]
pub(crate) struct LinkPath(pub(crate) SessionId, pub(crate) InterfaceName);

impl<S: Send + Sync> FromRequestParts<S> for LinkPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let (id, name) = session_and(parts, state).await?;
        Ok(Self(id, parsed("name", &name)?))
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
        parsed("name", &segment(parts, state).await?).map(Self)
    }
}

/// A session's id and the next parameter of the path.
async fn session_and<S: Send + Sync>(
    parts: &mut Parts,
    state: &S,
) -> Result<(SessionId, String), ApiError> {
    let path = Path::<(String, String)>::from_request_parts(parts, state).await;
    let Path((id, next)) = path.map_err(unreadable)?;
    Ok((parsed("id", &id)?, next))
}

async fn segment<S: Send + Sync>(parts: &mut Parts, state: &S) -> Result<String, ApiError> {
    let path = Path::<String>::from_request_parts(parts, state).await;
    path.map(|Path(text)| text).map_err(unreadable)
}

fn unreadable(rejection: PathRejection) -> ApiError {
    Kind::BAD_PATH.in_field("id", field_errors::cut(&rejection.body_text()))
}

fn parsed<T: FromStr<Err: Display>>(field: &str, text: &str) -> Result<T, ApiError> {
    text.parse::<T>()
        .map_err(|error| Kind::BAD_PATH.in_field(field, error.to_string()))
}
