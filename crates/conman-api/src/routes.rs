//! Every route, grouped by the scope it needs, with its description.

mod attach;
mod events;
mod exec;
mod images;
mod logs;
mod nodes;
mod probes;
mod sessions;
mod templates;
mod tokens;

use axum::middleware::{from_fn, from_fn_with_state};
use conman_auth::Scope;
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouter, UtoipaMethodRouterExt as _};
use utoipa_axum::routes;

use crate::access::{self, Needed};
use crate::layers;
use crate::{ApiState, openapi};

/// The routes with their description. A route that is not bounded by `quick` bounds itself or
/// streams; the scope is checked before a handler runs.
pub(crate) fn all() -> OpenApiRouter<ApiState> {
    let open = OpenApiRouter::new()
        .routes(quick(routes!(probes::healthz)))
        .routes(quick(routes!(probes::readyz)));
    let read = OpenApiRouter::new()
        .routes(quick(routes!(sessions::list)))
        .routes(quick(routes!(sessions::get)))
        .routes(quick(routes!(events::timeline)))
        .routes(routes!(events::events))
        .routes(quick(routes!(nodes::list)))
        .routes(quick(routes!(nodes::get)))
        .routes(quick(routes!(templates::list)))
        .routes(quick(routes!(images::list)))
        .routes(quick(routes!(images::get)))
        .routes(quick(routes!(probes::description)))
        .routes(quick(routes!(probes::metrics)))
        .routes(quick(routes!(probes::index)));
    let frontend = OpenApiRouter::new()
        .routes(routes!(sessions::ensure, sessions::stop))
        .routes(routes!(logs::logs))
        .routes(routes!(exec::exec, exec::exec_interactive))
        .routes(routes!(attach::attach))
        .routes(routes!(attach::keep, attach::list))
        .routes(routes!(attach::end))
        .routes(quick(routes!(tokens::make)));
    let admin = OpenApiRouter::new()
        .routes(routes!(nodes::preempt))
        .routes(routes!(images::add))
        .routes(quick(routes!(images::remove)))
        .routes(routes!(images::collect))
        .routes(quick(routes!(nodes::readmit)));
    OpenApiRouter::with_openapi(openapi::frame())
        .merge(group(open, Needed::Nothing))
        .merge(group(read, Needed::Scope(Scope::Read)))
        .merge(group(frontend, Needed::Scope(Scope::Frontend)))
        .merge(group(admin, Needed::Scope(Scope::Admin)))
}

fn quick(routes: UtoipaMethodRouter<ApiState>) -> UtoipaMethodRouter<ApiState> {
    routes.layer(from_fn(layers::quick))
}

fn group(mut routes: OpenApiRouter<ApiState>, needed: Needed) -> OpenApiRouter<ApiState> {
    openapi::complete(routes.get_openapi_mut(), needed);
    routes.route_layer(from_fn_with_state(needed, access::require))
}
