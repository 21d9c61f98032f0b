//! Pages of the configured origins read what the API answers, and no other pages do.

use crate::stage::{ALLOWED_ORIGIN, Stage, plain, session};
use axum::body::Body;
use conman_auth::Scope;
use http::header::{
    ACCESS_CONTROL_ALLOW_CREDENTIALS, ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS,
    ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE,
    ACCESS_CONTROL_REQUEST_HEADERS, ACCESS_CONTROL_REQUEST_METHOD, HOST, ORIGIN, VARY,
};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode};

/// Every header with which a page may be allowed something.
const ALLOWING: [HeaderName; 6] = [
    ACCESS_CONTROL_ALLOW_CREDENTIALS,
    ACCESS_CONTROL_ALLOW_HEADERS,
    ACCESS_CONTROL_ALLOW_METHODS,
    ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS,
    ACCESS_CONTROL_MAX_AGE,
];

fn with(mut request: Request<Body>, name: HeaderName, value: &str) -> Request<Body> {
    let value = HeaderValue::from_str(value).expect("a header's value");
    request.headers_mut().insert(name, value);
    request
}

fn of_page(request: Request<Body>, origin: &str) -> Request<Body> {
    with(request, ORIGIN, origin)
}

fn preflight(uri: &str, origin: &str, method: &str) -> Request<Body> {
    let request = of_page(plain(Method::OPTIONS, uri), origin);
    let request = with(request, ACCESS_CONTROL_REQUEST_METHOD, method);
    with(
        request,
        ACCESS_CONTROL_REQUEST_HEADERS,
        "authorization,content-type",
    )
}

fn list(headers: &HeaderMap, name: &HeaderName) -> Vec<String> {
    let values = headers.get_all(name).iter();
    let texts = values.map(|value| value.to_str().expect("text").to_ascii_lowercase());
    let mut items: Vec<String> = texts
        .flat_map(|text| {
            text.split(',')
                .map(|item| item.trim().to_owned())
                .collect::<Vec<_>>()
        })
        .collect();
    items.sort();
    items.dedup();
    items
}

#[tokio::test]
async fn a_preflight_of_an_allowed_page_is_answered_without_a_token() {
    let stage = Stage::new();
    let api = stage.boot().await;
    for (uri, method) in [
        ("/v1/sessions/a", "PUT"),
        ("/v1/sessions/a", "DELETE"),
        ("/v1/sessions/a/exec", "POST"),
        ("/v1/events?follow=true", "GET"),
    ] {
        let answer = api.send(preflight(uri, ALLOWED_ORIGIN, method)).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
        assert!(answer.body.is_empty());
        let headers = &answer.headers;
        assert_eq!(headers[ACCESS_CONTROL_ALLOW_ORIGIN], ALLOWED_ORIGIN);
        let allowed = list(headers, &ACCESS_CONTROL_ALLOW_METHODS);
        assert_eq!(allowed, ["delete", "get", "patch", "post", "put"]);
        let allowed = list(headers, &ACCESS_CONTROL_ALLOW_HEADERS);
        assert_eq!(allowed, ["authorization", "content-type", "last-event-id"]);
        assert_eq!(headers[ACCESS_CONTROL_MAX_AGE], "600");
        assert!(!headers.contains_key(ACCESS_CONTROL_ALLOW_CREDENTIALS));
        let vary = list(headers, &VARY);
        assert!(vary.contains(&"origin".to_owned()), "{vary:?}");
        assert!(headers.contains_key("x-request-id"));
    }
    // A preflight does nothing.
    assert_eq!(api.get(&session("a")).await.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_page_of_another_origin_is_allowed_nothing_by_its_preflight() {
    let stage = Stage::new();
    let api = stage.boot().await;
    for origin in [
        "https://evil.example",
        "http://app.example",
        "https://app.example:8443",
        "https://app.example.evil.example",
        "http://a.localhost:7701",
        "null",
        "*",
    ] {
        let answer = api
            .send(preflight("/v1/sessions/a", origin, "DELETE"))
            .await;
        assert_eq!(answer.problem().slug(), "origin-refused", "{origin}");
        for name in ALLOWING {
            assert!(!answer.headers.contains_key(&name), "{origin}: {name}");
        }
    }
    let rebound = with(
        preflight("/v1/sessions/a", ALLOWED_ORIGIN, "DELETE"),
        HOST,
        "evil.example:7700",
    );
    let answer = api.send(rebound).await;
    assert_eq!(answer.problem().slug(), "host-refused");
    assert!(!answer.headers.contains_key(ACCESS_CONTROL_ALLOW_ORIGIN));
}

#[tokio::test]
async fn an_allowed_page_reads_answers_and_refusals_and_needs_a_token_like_everybody() {
    let stage = Stage::new();
    let api = stage.boot().await;
    let request = |uri| api.request(Scope::Read, Method::GET, uri);
    for (request, status) in [
        (request("/v1/sessions"), 200),
        (request("/v1/sessions/absent"), 404),
        (request("/v1/no-such-route"), 404),
        (
            api.request(Scope::Read, Method::DELETE, "/v1/sessions/a"),
            403,
        ),
        (plain(Method::GET, "/v1/sessions"), 401),
        (plain(Method::GET, "/healthz"), 200),
    ] {
        let answer = api.send(of_page(request, ALLOWED_ORIGIN)).await;
        assert_eq!(answer.status, status, "{}", answer.text());
        let headers = &answer.headers;
        assert_eq!(headers[ACCESS_CONTROL_ALLOW_ORIGIN], ALLOWED_ORIGIN);
        let exposed = list(headers, &ACCESS_CONTROL_EXPOSE_HEADERS);
        assert_eq!(exposed, ["location", "retry-after", "x-request-id"]);
        assert!(!headers.contains_key(ACCESS_CONTROL_ALLOW_CREDENTIALS));
    }
}

#[tokio::test]
async fn answers_to_others_allow_no_page_and_say_that_they_depend_on_the_origin() {
    let stage = Stage::new();
    let api = stage.boot().await;
    let request = || api.request(Scope::Read, Method::GET, "/v1/sessions");
    let own = of_page(request(), "http://127.0.0.1:7700");
    let foreign = of_page(request(), "https://evil.example");
    for (request, status) in [(request(), 200), (own, 200), (foreign, 403)] {
        let answer = api.send(request).await;
        assert_eq!(answer.status, status, "{}", answer.text());
        assert!(!answer.headers.contains_key(ACCESS_CONTROL_ALLOW_ORIGIN));
        let vary = list(&answer.headers, &VARY);
        assert!(vary.contains(&"origin".to_owned()), "{vary:?}");
    }
    let mut twice = of_page(request(), ALLOWED_ORIGIN);
    let second = HeaderValue::from_static("https://evil.example");
    twice.headers_mut().append(ORIGIN, second);
    let answer = api.send(twice).await;
    assert_eq!(answer.problem().slug(), "origin-refused");
    assert!(!answer.headers.contains_key(ACCESS_CONTROL_ALLOW_ORIGIN));
}

#[tokio::test]
async fn an_options_request_that_is_no_preflight_is_judged_like_any_other() {
    let stage = Stage::new();
    let api = stage.boot().await;
    let anonymous = api.send(plain(Method::OPTIONS, "/v1/sessions")).await;
    assert_eq!(anonymous.problem().slug(), "unauthenticated");
    let known = api.request(Scope::Frontend, Method::OPTIONS, "/v1/sessions");
    let answer = api.send(of_page(known, ALLOWED_ORIGIN)).await;
    assert_eq!(answer.status, StatusCode::METHOD_NOT_ALLOWED);
}

#[tokio::test]
async fn the_admin_socket_shares_nothing_with_any_page() {
    let stage = Stage::new();
    let api = stage.boot().await;
    for request in [
        preflight("/v1/sessions/a", ALLOWED_ORIGIN, "PUT"),
        of_page(plain(Method::GET, "/v1/sessions"), ALLOWED_ORIGIN),
    ] {
        let answer = api.send_to_admin(request, 0).await;
        assert_eq!(answer.problem().slug(), "origin-refused");
        for name in ALLOWING {
            assert!(!answer.headers.contains_key(&name), "{name}");
        }
    }
}
