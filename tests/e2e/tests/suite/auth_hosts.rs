//! What a page of elsewhere can make a browser send: another `Host`, by a name that suddenly leads
//! here (DNS rebinding), and WebSockets, which no same-origin policy holds back.

use std::time::Duration;

use bytes::Bytes;
use conman_e2e::{
    Api, Conman, Docker, ECHO_TEMPLATE, answer, docker_shared, eventually, log_with, websocket,
    with,
};
use conman_proto::{ConnectToken, EXEC_PROTOCOL};
use http::header::{LOCATION, SET_COOKIE};
use http::{Method, Request, StatusCode};
use http_body_util::Full;
use serde_json::json;

const PATIENCE: Duration = Duration::from_secs(60);

/// An `ExecRequest` that makes a file, as it stands in a query.
const TOUCH: &str = "%7B%22command%22%3A%5B%22touch%22%2C%22%2Ftmp%2Ftouched%22%5D%7D";

/// A conman that knows a name and an origin more, with the sessions `a` and `b`.
async fn conman(docker: &Docker, tokens: bool) -> Conman {
    let builder = Conman::builder()
        .set("listen", "hosts = [\"box.example\"]")
        .set("listen", "allowed_origins = [\"https://app.example\"]")
        .toml(ECHO_TEMPLATE);
    let builder = if tokens {
        builder.token("admin", "admin")
    } else {
        builder
    };
    let conman = builder.start(docker).await;
    for id in ["a", "b"] {
        conman
            .admin()
            .ensure(id, &json!({"template": "echo"}))
            .await;
    }
    conman
}

/// The API as somebody uses it who may do everything.
fn entitled(conman: &Conman, tokens: bool) -> Api {
    if tokens {
        conman.api().with_token(conman.token("admin"))
    } else {
        conman.api()
    }
}

#[tokio::test]
async fn a_name_that_was_made_to_lead_here_gets_nothing_from_the_api() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    for tokens in [false, true] {
        let conman = conman(&docker, tokens).await;
        let api = entitled(&conman, tokens);
        let port = conman.api_address().port();
        let get = |path: &str, host: &str| with(api.request(Method::GET, path, None), "host", host);
        for host in [
            format!("127.0.0.1:{port}"),
            format!("localhost:{port}"),
            format!("[::1]:{port}"),
            format!("box.example:{port}"),
            "BOX.example".to_owned(),
        ] {
            let served = answer(&api, get("/v1/sessions", &host)).await;
            assert_eq!(served.status, StatusCode::OK, "{host}: {}", served.text());
        }
        for host in [
            format!("evil.example:{port}"),
            "evil.example".to_owned(),
            format!("localhost.evil.example:{port}"),
            format!("127.0.0.1.evil.example:{port}"),
            format!("a.box.example:{port}"),
            format!("notlocalhost:{port}"),
            format!("10.1.2.3:{port}"),
            format!("[fd00::1]:{port}"),
        ] {
            for path in ["/v1/sessions", "/healthz", "/v1/openapi.json"] {
                let request = get(path, &host);
                let request = with(request, "x-forwarded-host", "127.0.0.1");
                let refused = answer(&api, with(request, "forwarded", "host=127.0.0.1")).await;
                assert_eq!(refused.status, StatusCode::FORBIDDEN, "{host} {path}");
                assert_eq!(refused.problem().slug(), "host-refused");
            }
            // Its own page: the origin is that of the name, so that only the name gives it away.
            let request = get("/v1/sessions", &host);
            let refused = answer(&api, with(request, "origin", &format!("http://{host}"))).await;
            assert_eq!(refused.status, StatusCode::FORBIDDEN, "{host}");
            let mut delete = get("/v1/sessions/a", &host);
            *delete.method_mut() = Method::DELETE;
            assert_eq!(answer(&api, delete).await.status, StatusCode::FORBIDDEN);
        }
        for host in [
            "",
            "a b",
            "127.0.0.1:x",
            "127.0.0.1:70000",
            "user@127.0.0.1",
        ] {
            let refused = answer(&api, get("/v1/sessions", host)).await;
            assert_eq!(refused.status, StatusCode::BAD_REQUEST, "{host}");
        }
        let mut twice = api.request(Method::GET, "/v1/sessions", None);
        let second = "evil.example".parse().expect("a header's value");
        twice.headers_mut().append("host", second);
        assert_eq!(answer(&api, twice).await.status, StatusCode::BAD_REQUEST);
        let absolute = api.request(Method::GET, "http://evil.example/v1/sessions", None);
        assert_eq!(answer(&api, absolute).await.status, StatusCode::BAD_REQUEST);
        api.session("a").await;
    }
}

#[tokio::test]
async fn a_name_that_was_made_to_lead_here_gets_nothing_from_a_session() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = conman(&docker, false).await;
    let sessions = conman.sessions();
    let port = conman.sessions_address().port();
    let get =
        |path: &str, host: &str| with(sessions.request(Method::GET, path, None), "host", host);
    for (host, path) in [
        (format!("evil.example:{port}"), "/s/a/evil"),
        (format!("a.evil.example:{port}"), "/s/a/evil"),
        ("a.localhost.evil.example".to_owned(), "/s/a/evil"),
        (format!("10.1.2.3:{port}"), "/s/a/evil"),
    ] {
        let request = with(get(path, &host), "x-forwarded-host", "127.0.0.1");
        let refused = answer(&sessions, request).await;
        assert_eq!(
            refused.status,
            StatusCode::FORBIDDEN,
            "{host}: {}",
            refused.text()
        );
        assert_eq!(refused.problem().slug(), "host-refused");
        let dialled = websocket(&sessions, get(path, &host), &[]).await;
        let refused = dialled.expect_err("refused");
        assert_eq!(refused.status, StatusCode::FORBIDDEN, "{host}");
    }
    for (host, path) in [
        (format!("a.localhost:{port}"), "/by-host"),
        (format!("127.0.0.1:{port}"), "/s/a/by-address"),
        (format!("box.example:{port}"), "/s/a/by-name"),
    ] {
        let served = answer(&sessions, get(path, &host)).await;
        assert_eq!(served.status, StatusCode::OK, "{host}: {}", served.text());
    }
    let log = log_with(&conman.api(), "a", "/by-name").await;
    assert!(
        log.contains("/by-host") && log.contains("/by-address"),
        "{log}"
    );
    assert!(!log.contains("evil"), "{log}");
}

#[tokio::test]
async fn only_pages_of_the_api_itself_and_of_allowed_origins_run_commands_by_websocket() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    for tokens in [false, true] {
        let conman = conman(&docker, tokens).await;
        let api = entitled(&conman, tokens);
        let (own, sessions) = (conman.api_address(), conman.sessions_address());
        let path = format!("/v1/sessions/a/exec?request={TOUCH}");
        let dial = async |origins: &[&str]| {
            let mut request = api.request(Method::GET, &path, None);
            for origin in origins {
                let value = origin.parse().expect("a header's value");
                request.headers_mut().append("origin", value);
            }
            websocket(&api, request, &[EXEC_PROTOCOL]).await
        };
        for foreign in [
            &["https://evil.example"][..],
            &["null"],
            &["https://app.example.evil.example"],
            &["http://app.example"],
            &["https://app.example:444"],
            &["file://"],
            &[&format!("http://{sessions}")],
            &[&format!("http://a.localhost:{}", sessions.port())],
            &["http://127.0.0.1"],
            &["https://app.example", "https://evil.example"],
        ] {
            let refused = dial(foreign).await.expect_err("refused");
            assert_eq!(refused.status, StatusCode::FORBIDDEN, "{foreign:?}");
            assert_eq!(refused.problem().slug(), "origin-refused");
        }
        let look = json!({"command": ["ls", "/tmp"]});
        let seen = api.post("/v1/sessions/a/exec", &look).await;
        assert_eq!(seen.json()["stdout"], "", "a refused page's command ran");
        let mut open = Vec::new();
        for admitted in [
            &[][..],
            &["https://app.example"],
            &[&format!("http://{own}")],
        ] {
            match dial(admitted).await {
                // A command ends with its client.
                Ok(socket) => open.push(socket),
                Err(refused) => panic!("{admitted:?}: {}", refused.text()),
            }
        }
        eventually("the command has run", PATIENCE, async || {
            let seen = api.post("/v1/sessions/a/exec", &look).await;
            seen.json()["stdout"] == "touched\n"
        })
        .await;
    }
}

/// The ways by which a browser comes to a session: nothing but its place, the cookie, a token that
/// the page itself has.
async fn ways(conman: &Conman, tokens: bool) -> Vec<(&'static str, String)> {
    if !tokens {
        return vec![("accept", "*/*".to_owned())];
    }
    let api = entitled(conman, tokens);
    let made = api.post("/v1/sessions/a/token", &json!({})).await;
    let made: ConnectToken = made.expect(StatusCode::OK);
    let sessions = conman.sessions();
    let target = format!("/?conman_token={}", made.token);
    let redirect = answer(&sessions, of_a(conman, &target)).await;
    assert_eq!(redirect.headers[LOCATION], "/");
    let line = redirect.headers[SET_COOKIE].to_str().expect("text");
    let cookie = line.split(';').next().expect("a cookie").to_owned();
    vec![
        ("cookie", cookie),
        ("authorization", format!("Bearer {}", made.token)),
    ]
}

fn of_a(conman: &Conman, target: &str) -> Request<Full<Bytes>> {
    let port = conman.sessions_address().port();
    let request = conman.sessions().request(Method::GET, target, None);
    with(request, "host", &format!("a.localhost:{port}"))
}

#[tokio::test]
async fn only_its_own_pages_and_those_of_allowed_origins_open_a_sessions_websocket() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    for tokens in [false, true] {
        let conman = conman(&docker, tokens).await;
        let (sessions, port) = (conman.sessions(), conman.sessions_address().port());
        for (name, value) in ways(&conman, tokens).await {
            let from = |origin: &str, target: &str| {
                with(with(of_a(&conman, target), name, &value), "origin", origin)
            };
            for foreign in [
                "https://evil.example".to_owned(),
                "null".to_owned(),
                format!("http://b.localhost:{port}"),
                format!("http://localhost:{port}"),
                format!("http://a.localhost:{}", conman.api_address().port()),
                format!("http://{}", conman.api_address()),
                "http://app.example".to_owned(),
            ] {
                let dialled = websocket(&sessions, from(&foreign, "/evil"), &[]).await;
                let refused = dialled.expect_err("refused");
                assert_eq!(refused.status, StatusCode::FORBIDDEN, "{foreign} by {name}");
                assert_eq!(refused.problem().slug(), "origin-refused");
                let mut post = from(&foreign, "/evil");
                *post.method_mut() = Method::POST;
                let refused = answer(&sessions, post).await;
                assert_eq!(refused.status, StatusCode::FORBIDDEN, "{foreign} by {name}");
                // Reading needs a token that the page itself has.
                let read = answer(&sessions, from(&foreign, "/read")).await;
                let expected = if name == "authorization" { 200 } else { 403 };
                assert_eq!(
                    read.status,
                    expected,
                    "{foreign} by {name}: {}",
                    read.text()
                );
            }
            for admitted in [
                format!("http://a.localhost:{port}"),
                "https://app.example".to_owned(),
            ] {
                let opened = websocket(&sessions, from(&admitted, "/good"), &[]).await;
                let why = opened.err().map(|refused| refused.text());
                assert_eq!(why, None, "{admitted} by {name}");
                let read = answer(&sessions, from(&admitted, "/good")).await;
                assert_eq!(read.status, StatusCode::OK, "{admitted} by {name}");
            }
        }
        let log = log_with(&entitled(&conman, tokens), "a", "GET /good").await;
        assert!(!log.contains("/evil"), "{log}");
    }
}
