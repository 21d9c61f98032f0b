//! Every route, grouped by the scope it needs, with its description.

mod attach;
mod drain;
mod events;
mod exec;
mod execs;
mod file_orders;
mod file_watch;
mod files;
mod images;
mod links;
mod logs;
mod nodes;
pub(crate) mod peers;
mod ports;
mod probes;
mod processes;
mod session_changes;
mod session_orders;
pub(crate) mod sessions;
mod stats;
mod templates;
mod tokens;

use axum::Router;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::{get, post};
use conman_auth::Scope;
use conman_fleet::node_api;
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouter, UtoipaMethodRouterExt as _};
use utoipa_axum::routes;

use crate::access::{self, Needed};
use crate::forwarding::{self, BodyLimit};
use crate::json_body::{MAX_BODY_BYTES, MAX_EXEC_BODY_BYTES};
use crate::{ApiState, layers, openapi};

pub(crate) use probes::{healthz, not_joined};

/// The routes with their description. A route that `quick` does not bound bounds itself or
/// streams; the scope is checked before a handler runs.
pub(crate) fn all() -> OpenApiRouter<ApiState> {
    let open = OpenApiRouter::new()
        .routes(quick(routes!(probes::healthz)))
        .routes(quick(routes!(probes::readyz)));
    let read = OpenApiRouter::new()
        .routes(quick(routes!(sessions::list)))
        .routes(home(quick(routes!(sessions::get))))
        .routes(home(routes!(stats::session)))
        .routes(home(routes!(links::list)))
        .routes(at_node(quick(routes!(stats::node))))
        .routes(quick(routes!(events::timeline)))
        .routes(routes!(events::events))
        .routes(quick(routes!(nodes::list)))
        .routes(quick(routes!(nodes::get)))
        .routes(at_node(quick(routes!(drain::get))))
        .routes(at_node(quick(routes!(drain::get_rebalance))))
        .routes(quick(routes!(templates::list)))
        .routes(quick(routes!(images::list)))
        .routes(quick(routes!(images::get)))
        .routes(quick(routes!(probes::description)))
        .routes(quick(routes!(probes::metrics)))
        .routes(quick(routes!(probes::index)));
    let frontend = OpenApiRouter::new()
        .routes(home(routes!(
            sessions::ensure,
            sessions::stop,
            session_changes::update
        )))
        .routes(named(routes!(session_changes::create)))
        .routes(home(routes!(logs::logs)))
        .routes(home_of(
            MAX_EXEC_BODY_BYTES,
            routes!(exec::exec, exec::exec_interactive),
        ))
        .routes(home(routes!(files::read, file_orders::remove)))
        .routes(streamed(routes!(files::write)))
        .routes(home(routes!(file_orders::list)))
        .routes(home(routes!(file_watch::watch)))
        .routes(home(routes!(file_orders::make_directory)))
        .routes(home(routes!(file_orders::rename)))
        .routes(home(routes!(attach::attach)))
        .routes(home(routes!(attach::attach_exec)))
        .routes(home(routes!(execs::start, execs::list)))
        .routes(home(routes!(execs::get, execs::end)))
        .routes(home(routes!(execs::signal)))
        .routes(home(routes!(ports::connect)))
        .routes(home(routes!(processes::list)))
        .routes(home(routes!(session_orders::pause)))
        .routes(home(routes!(session_orders::resume)))
        .routes(home(routes!(session_orders::restart)))
        .routes(home(routes!(session_orders::kill)))
        .routes(quick(routes!(tokens::make)));
    let admin = OpenApiRouter::new()
        .routes(home(routes!(links::attach)))
        .routes(home(routes!(links::detach)))
        .routes(quick(routes!(nodes::remove)))
        .routes(at_node(routes!(nodes::preempt)))
        .routes(at_node(quick(routes!(drain::drain))))
        .routes(at_node(quick(routes!(drain::undrain))))
        .routes(at_node(quick(routes!(drain::rebalance))))
        .routes(at_node(quick(routes!(nodes::cordon))))
        .routes(at_node(quick(routes!(nodes::uncordon))))
        .routes(routes!(images::add))
        .routes(quick(routes!(images::remove)))
        .routes(routes!(images::collect))
        .routes(at_node(quick(routes!(nodes::readmit))));
    OpenApiRouter::with_openapi(openapi::frame())
        .merge(group(open, Needed::Nothing))
        .merge(group(read, Needed::Scope(Scope::Read)))
        .merge(group(frontend, Needed::Scope(Scope::Frontend)))
        .merge(group(admin, Needed::Scope(Scope::Admin)))
}

fn quick(routes: UtoipaMethodRouter<ApiState>) -> UtoipaMethodRouter<ApiState> {
    routes.layer(from_fn(layers::quick))
}

/// A route about one session: the session's node answers.
fn home(routes: UtoipaMethodRouter<ApiState>) -> UtoipaMethodRouter<ApiState> {
    home_of(MAX_BODY_BYTES, routes)
}

/// Likewise, with a larger limit of the body.
fn home_of(max_bytes: usize, routes: UtoipaMethodRouter<ApiState>) -> UtoipaMethodRouter<ApiState> {
    routes.layer(from_fn_with_state(
        BodyLimit(max_bytes),
        forwarding::to_owner,
    ))
}

/// A route that makes a session without a given name: the node that starts it answers.
fn named(routes: UtoipaMethodRouter<ApiState>) -> UtoipaMethodRouter<ApiState> {
    routes.layer(from_fn_with_state(
        BodyLimit(MAX_BODY_BYTES),
        forwarding::with_generated_id,
    ))
}

/// A route about one session whose body has any size: the session's node reads it.
fn streamed(routes: UtoipaMethodRouter<ApiState>) -> UtoipaMethodRouter<ApiState> {
    routes.layer(from_fn(forwarding::stream_to_owner))
}

/// A route about one node: that node answers.
fn at_node(routes: UtoipaMethodRouter<ApiState>) -> UtoipaMethodRouter<ApiState> {
    routes.layer(from_fn_with_state(
        BodyLimit(MAX_BODY_BYTES),
        forwarding::to_node,
    ))
}

/// The routes for other nodes only, which are not in the description.
pub(crate) fn for_peers() -> Router<ApiState> {
    let read = Router::new()
        .route(node_api::EVENTS, get(peers::events))
        .route(node_api::TIMELINE, get(peers::timeline))
        .route_layer(from_fn_with_state(
            Needed::Scope(Scope::Read),
            access::require,
        ));
    let frontend = Router::new()
        .route(node_api::READY, post(peers::ready))
        .route(node_api::RESTART, post(peers::restart))
        .route_layer(from_fn_with_state(
            Needed::Scope(Scope::Frontend),
            access::require,
        ));
    read.merge(frontend)
}

fn group(mut routes: OpenApiRouter<ApiState>, needed: Needed) -> OpenApiRouter<ApiState> {
    openapi::complete(routes.get_openapi_mut(), needed);
    routes.route_layer(from_fn_with_state(needed, access::require))
}
