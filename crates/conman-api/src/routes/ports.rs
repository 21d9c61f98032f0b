//! TCP connections to the ports of a session.

use std::io;
use std::time::Duration;

use axum::extract::State;
use axum::extract::ws::WebSocketUpgrade;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::response::Response;
use conman_core::ActivityKind;
use conman_proto::{PORT_PROTOCOL, SessionId};
use tokio::time::timeout;

use crate::node_errors::route_error;
use crate::path_params::PortPath;
use crate::problem::{ApiError, IntoApiError as _, Kind};
use crate::query::NoQuery;
use crate::web_socket::accept;
use crate::{ApiState, port_socket};

/// Bound on the time that a session takes to accept a connection.
const CONNECT: Duration = Duration::from_secs(10);

/// Connect to a port
///
/// A WebSocket with subprotocol `conman.port.v1`, whose binary messages are the bytes of a TCP connection. An
/// empty message ends the direction of its sender. Like every connection it starts or awaits the session,
/// where its template allows that, and keeps it from being idle.
#[utoipa::path(
    get, path = "/v1/sessions/{id}/ports/{port}/connect", tag = "sessions",
    operation_id = "connect_port",
    params(
        ("id" = SessionId, Path, description = "The session's name."),
        ("port" = u16, Path, minimum = 1, maximum = 65_535, description = "Its `port`, or one of its `ports`."),
    ),
    responses(
        (status = 101, description = "Connected."),
        (status = 404, description = "no-such-session or no-such-port"),
        (status = 409, description = "session-ended or no-port"),
        (status = 426, description = "upgrade-required"),
        (status = 502, description = "connection-refused or connect-failed"),
        (status = 503, description = "session-not-ready, session-stuck or crowded"),
        (status = 504, description = "connect-timeout"),
    )
)]
pub(crate) async fn connect(
    State(state): State<ApiState>,
    PortPath(id, port): PortPath,
    _: NoQuery,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, ApiError> {
    let upgrade = accept(upgrade, PORT_PROTOCOL, "")?;
    let route = state.node.access().route(&id, true).await;
    let route = route.map_err(|error| route_error(&error))?;
    if !route.has_port(port, false) {
        return Err(Kind::NO_SUCH_PORT.because(format!(
            "session `{id}` does not have port {port}: add it to `ports` of its template or spec"
        )));
    }
    let activity = route.activity.begin_as(ActivityKind::Forward);
    let stream = match timeout(CONNECT, route.connect(port)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {
            return Err(Kind::CONNECTION_REFUSED.because(format!(
                "session `{id}` runs, but nothing in it accepts connections on port {port}"
            )));
        }
        Ok(Err(error)) => {
            let why = format!("no connection to port {port} of session `{id}`: {error}");
            return Err(Kind::CONNECT_FAILED.because(why));
        }
        Err(_elapsed) => {
            return Err(Kind::CONNECT_TIMEOUT.because(format!(
                "port {port} of session `{id}` accepted no connection within {} s",
                CONNECT.as_secs()
            )));
        }
    };
    let closing = state.closing.clone();
    Ok(upgrade.on_upgrade(move |socket| port_socket::carry(socket, stream, activity, closing)))
}
