//! The HTTP API: routes, errors as problem details, and their OpenAPI description.
//!
//! [`router`] is the whole API as an axum router over a running [`Node`]; [`serve_tcp`] and
//! [`serve_unix`] put it on a listener with bounds on connections, headers and time. The crate
//! owns no state and no policy: a handler reads the request, calls the node, and writes the
//! answer. Requests about another node's sessions are forwarded (`forwarding`).
//!
//! A request passes, outermost first: an id, a log line and a metric; problems written out;
//! preflights of allowed pages answered (CORS); panics caught; the caller authenticated
//! ([`ApiGuard`]); the route's scope checked; a time limit, unless the route bounds itself or
//! streams; the handler.
//!
//! Tasks: one for each connection and listener, in [`serve_tcp`] and [`serve_unix`]; one for each
//! interactive command once its WebSocket is open; one for each pull with progress reports, which
//! continues without its caller. The crate has no channels; those of a command come bounded from
//! the runtime. Streams and sockets end when [`ApiState::closing`] is cancelled.
#![forbid(unsafe_code)]

mod access;
mod api_backend;
mod body_mistakes;
mod cors;
mod events;
mod exec_collect;
mod exec_request;
mod exec_socket;
mod field_errors;
mod fleet_comparison;
mod fleet_list;
mod fleet_timeline;
mod forwarding;
mod hidden_env;
mod image_errors;
mod image_view;
mod json_body;
mod json_value;
mod layers;
mod log_lines;
mod node_errors;
mod openapi;
mod path_params;
mod port_socket;
mod problem;
mod query;
mod remedies;
mod routes;
mod server;
mod upload;
mod web_socket;

use std::sync::{Arc, LazyLock};

use axum::Router;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::get;
use conman_auth::{ApiGuard, ConnectTokens};
use conman_fleet::FleetMap;
use conman_image::ImageKeeper;
use conman_node::Node;
use conman_registry::Standing;
use metrics_exporter_prometheus::PrometheusHandle;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tower_http::catch_panic::CatchPanicLayer;

pub use api_backend::ApiBackend;
pub use events::StreamPlaces;
pub use node_errors::{locate_problem, route_problem};
pub use routes::peers::Ready;
pub use server::{Peer, ServeOptions, serve_node, serve_tcp, serve_unix};

/// State shared by the handlers.
#[derive(Clone)]
pub struct ApiState {
    /// The node that handlers call.
    pub node: Arc<Node>,
    /// Authenticates callers.
    pub guard: Arc<ApiGuard>,
    /// The other nodes; `None` outside a fleet.
    pub fleet: Option<Arc<FleetMap>>,
    /// Makes connect tokens.
    pub connect_tokens: Arc<ConnectTokens>,
    /// The image store.
    pub images: ImageKeeper,
    /// Renders `/metrics`; the installer of the recorder runs its upkeep.
    pub metrics: PrometheusHandle,
    /// The places for streams of the fleet's events.
    pub streams: StreamPlaces,
    /// Cancelled when the daemon stops: ends event and log streams and interactive commands, which
    /// have no time limit.
    pub closing: CancellationToken,
}

impl ApiState {
    /// The other nodes, if the node is in a fleet.
    pub(crate) fn others(&self) -> Option<&Arc<FleetMap>> {
        self.fleet.as_ref().filter(|map| !map.is_alone())
    }
}

impl std::fmt::Debug for ApiState {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("ApiState").finish_non_exhaustive()
    }
}

/// The listener that a request came by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Listener {
    /// The API listener: if tokens are configured, one is required.
    Tcp,
    /// The admin socket: the peer's credentials count.
    Admin,
    /// The listener for other nodes, which vouch for their callers.
    Peers,
}

/// The API for one of the listeners.
pub fn router(state: ApiState, listener: Listener) -> Router {
    let (mut routes, _) = routes::all().split_for_parts();
    if listener == Listener::Peers {
        routes = routes.merge(routes::for_peers());
    }
    let routes = routes
        .with_state(state.clone())
        .layer(from_fn_with_state(
            (state.clone(), listener),
            access::authenticate,
        ))
        .layer(CatchPanicLayer::custom(layers::panicked))
        .layer(from_fn(layers::note_route));
    let routes = if listener == Listener::Tcp && state.guard.allows_pages() {
        let cors = cors::layer(Arc::clone(&state.guard));
        routes.layer(from_fn_with_state((state, cors), cors::share))
    } else {
        routes
    };
    // A separate router: the inner one adds `Allow` to its answer only after its layers.
    Router::new()
        .fallback_service(routes)
        .layer(from_fn(layers::outermost))
}

/// Answers instead of the API while the node has not joined its fleet: that it is alive, and why
/// it is not ready.
pub fn joining_router(standing: watch::Receiver<Standing>) -> Router {
    let waiting = move || {
        let refusal = routes::not_joined(&standing.borrow(), None);
        std::future::ready(refusal)
    };
    let routes = Router::new()
        .route("/healthz", get(routes::healthz))
        .fallback(waiting)
        .layer(CatchPanicLayer::custom(layers::panicked))
        .layer(from_fn(layers::note_route));
    Router::new()
        .fallback_service(routes)
        .layer(from_fn(layers::outermost))
}

/// The description of the API.
#[must_use]
pub fn openapi() -> utoipa::openapi::OpenApi {
    let mut api = routes::all().into_openapi();
    openapi::finish(&mut api);
    api
}

/// The description as it is served and stored in `proto/openapi.json`.
fn openapi_json() -> &'static str {
    static JSON: LazyLock<String> = LazyLock::new(|| {
        let mut json = openapi().to_pretty_json().unwrap_or_default();
        json.push('\n');
        json
    });
    &JSON
}
