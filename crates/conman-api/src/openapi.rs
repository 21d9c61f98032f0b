//! Completes the description that the routes' annotations give: the problem responses that all
//! routes share, the required scope, and the document's metadata.

use std::collections::BTreeMap;

use conman_proto::{ExecRequest, PROBLEM_CONTENT_TYPE, Problem};
use serde_json::json;
use utoipa::openapi::extensions::ExtensionsBuilder;
use utoipa::openapi::path::{Operation, PathItem};
use utoipa::openapi::response::ResponseBuilder;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{ContentBuilder, HeaderBuilder, InfoBuilder, LicenseBuilder, OpenApi};
use utoipa::openapi::{ObjectBuilder, OpenApiBuilder, Ref, RefOr, Required, Response, Type};
use utoipa::{PartialSchema as _, ToSchema as _};

use crate::access::Needed;

/// Name of the one security scheme.
const BEARER: &str = "bearer";

/// Sent below the router, before there is a request to describe.
const HEAD_TOO_LARGE: &str = "431";

const DESCRIPTION: &str = "Sessions, events and nodes of conman. Errors are RFC 9457 problem \
    details; their `type` is `urn:conman:problem:<slug>`. Times are RFC 3339, durations and sizes \
    carry their unit in the name. Requests with unknown fields or parameters are refused, \
    responses may grow fields.";

/// The document without any path.
pub(crate) fn frame() -> OpenApi {
    let info = InfoBuilder::new()
        .title("conman")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some(DESCRIPTION))
        .license(Some(
            LicenseBuilder::new()
                .name("Apache-2.0")
                .identifier(Some("Apache-2.0"))
                .build(),
        ))
        .build();
    OpenApiBuilder::new().info(info).build()
}

/// Adds to every operation of `api` who may call it, and the answers from outside its handler.
pub(crate) fn complete(api: &mut OpenApi, needed: Needed) {
    for item in api.paths.paths.values_mut() {
        for operation in operations(item) {
            require(operation, needed);
            add_shared_responses(operation, needed);
        }
    }
}

/// Adds what the annotations omit or cannot express.
pub(crate) fn finish(api: &mut OpenApi) {
    for item in api.paths.paths.values_mut() {
        operations(item).for_each(describe_json_parameters);
    }
    let components = api.components.get_or_insert_default();
    components.add_security_scheme(
        BEARER,
        SecurityScheme::Http(
            HttpBuilder::new()
                .scheme(HttpAuthScheme::Bearer)
                .description(Some(
                    "A token of the node's token file, with scope read, frontend or admin; each \
                     includes the ones before it. Requests on the admin socket need none.",
                ))
                .build(),
        ),
    );
    components
        .schemas
        .insert(Problem::name().into_owned(), Problem::schema());
    let mut schemas = Vec::new();
    Problem::schemas(&mut schemas);
    components.schemas.extend(schemas);
}

fn operations(item: &mut PathItem) -> impl Iterator<Item = &mut Operation> {
    [
        &mut item.get,
        &mut item.put,
        &mut item.post,
        &mut item.patch,
        &mut item.delete,
    ]
    .into_iter()
    .flatten()
}

fn require(operation: &mut Operation, needed: Needed) {
    let Needed::Scope(scope) = needed else {
        operation.security = Some(vec![SecurityRequirement::default()]);
        return;
    };
    operation.security = Some(vec![SecurityRequirement::new::<_, [&str; 0], &str>(
        BEARER,
        [],
    )]);
    let scope = ExtensionsBuilder::new()
        .add("x-conman-scope", json!(scope.as_str()))
        .build();
    operation.extensions.get_or_insert_default().merge(scope);
}

fn add_shared_responses(operation: &mut Operation, needed: Needed) {
    let mut shared: BTreeMap<&str, &str> = [
        ("400", "bad-path, bad-query or bad-request"),
        (
            HEAD_TOO_LARGE,
            "The request's head is too large; this answer has no body",
        ),
        ("500", "internal: a bug in conman"),
        ("503", "timed-out or shutting-down"),
    ]
    .into();
    if needed != Needed::Nothing {
        shared.insert("401", "unauthenticated");
        shared.insert(
            "403",
            "forbidden: the token's scope, the Host or the Origin",
        );
    }
    if let Some(body) = &mut operation.request_body {
        // An absent body is an empty object, and no other request has a required field.
        let required = [
            "exec",
            "start_exec",
            "add_image",
            "make_directory",
            "move_file",
        ];
        if operation
            .operation_id
            .as_deref()
            .is_none_or(|id| !required.contains(&id))
            && let RefOr::T(body) = body
        {
            body.required = Some(Required::False);
        }
        shared.insert("408", "body-too-slow");
        shared.insert("413", "body-too-large");
        shared.insert("415", "unsupported-media-type");
        shared.insert("422", "bad-body");
    }
    let responses = &mut operation.responses.responses;
    for (status, description) in shared {
        match responses.get_mut(status) {
            Some(RefOr::T(own)) => own.description = format!("{}; {description}", own.description),
            Some(RefOr::Ref(_)) => {}
            None => {
                let response = ResponseBuilder::new().description(description).build();
                responses.insert(status.to_owned(), RefOr::T(response));
            }
        }
    }
    for (status, response) in responses {
        if let RefOr::T(response) = response
            && status.starts_with(['4', '5'])
            && status != HEAD_TOO_LARGE
        {
            describe_problem(status, response);
        }
    }
}

/// A parameter whose schema is an object is JSON in the query, not one parameter a field.
fn describe_json_parameters(operation: &mut Operation) {
    for parameter in operation.parameters.iter_mut().flatten() {
        let RefOr::T(parameter) = parameter else {
            continue;
        };
        let request = Ref::from_schema_name(ExecRequest::name());
        if parameter.schema == Some(RefOr::Ref(request.clone())) {
            parameter.schema = None;
            let content = ContentBuilder::new().schema(Some(request)).build();
            parameter
                .content
                .insert("application/json".to_owned(), content.into());
        }
    }
}

fn describe_problem(status: &str, response: &mut Response) {
    let content = ContentBuilder::new()
        .schema(Some(Ref::from_schema_name(Problem::name())))
        .build();
    response
        .content
        .insert(PROBLEM_CONTENT_TYPE.to_owned(), content.into());
    let mut header = |name: &str, kind: Type, description: &str| {
        let schema = ObjectBuilder::new().schema_type(kind);
        let header = HeaderBuilder::new()
            .schema(Some(schema))
            .description(Some(description))
            .build();
        response.headers.insert(name.to_owned(), header.into());
    };
    match status {
        "401" => header(
            "WWW-Authenticate",
            Type::String,
            "The scheme to authenticate with.",
        ),
        "503" => header(
            "Retry-After",
            Type::Integer,
            "Seconds after which to try again.",
        ),
        _ => {}
    }
}
