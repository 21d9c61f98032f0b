//! Who may attach to what: refusals of the WebSocket and of kept commands, over a real connection,
//! on a runtime without terminals. What attaching does is tried where there are some.

use crate::stage::{Api, PATIENCE, Stage};
use conman_api::{ServeOptions, serve_tcp};
use conman_auth::Scope;
use conman_proto::{ATTACH_PROTOCOL, EXEC_PROTOCOL, Problem};
use conman_watchdog::TaskProgress;
use http::header::{AUTHORIZATION, HOST, SEC_WEBSOCKET_PROTOCOL};
use http::{Method, StatusCode};
use tokio::net::TcpListener;
use tokio_tungstenite::connect_async;
use tokio_tungstenite::tungstenite::Error;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_util::sync::CancellationToken;

/// The API on a port of its own.
struct Server {
    address: std::net::SocketAddr,
    shutdown: CancellationToken,
}

impl Server {
    async fn start(api: &Api) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
        let address = listener.local_addr().expect("an address");
        let shutdown = CancellationToken::new();
        let options = ServeOptions::default();
        let serving = serve_tcp(
            listener,
            api.tcp_router(),
            options,
            shutdown.clone(),
            TaskProgress::unwatched("API"),
        );
        tokio::spawn(serving);
        Self { address, shutdown }
    }

    /// Why nobody is attached.
    async fn refusal(&self, path: &str, token: Option<&str>, protocol: &str) -> (u16, String) {
        let uri = format!("ws://{}/v1/sessions/{path}", self.address);
        let mut request = uri.into_client_request().expect("a request");
        let headers = request.headers_mut();
        // The guard knows the listener by its configured port.
        headers.insert(HOST, "127.0.0.1:7700".parse().expect("valid"));
        if let Some(token) = token {
            let bearer = format!("Bearer {token}");
            headers.insert(AUTHORIZATION, bearer.parse().expect("valid"));
        }
        headers.insert(SEC_WEBSOCKET_PROTOCOL, protocol.parse().expect("valid"));
        let connecting = tokio::time::timeout(PATIENCE, connect_async(request));
        match connecting.await.expect("in time") {
            Err(Error::Http(response)) => {
                let status = response.status().as_u16();
                let body = response.body().clone().unwrap_or_default();
                let problem = serde_json::from_slice::<Problem>(&body);
                let slug = problem.map(|problem| problem.slug().to_owned());
                (status, slug.unwrap_or_default())
            }
            other => panic!("attached, or cut off: {other:?}"),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

#[tokio::test]
async fn nobody_attaches_without_a_token_of_the_scope_that_commands_need() {
    let stage = Stage::new();
    let api = stage.boot().await;
    api.start("a").await;
    let server = Server::start(&api).await;
    let refused = |token| server.refusal("a/attach", token, ATTACH_PROTOCOL);
    assert_eq!(refused(None).await.0, 401);
    assert_eq!(refused(Some("nonsense")).await.0, 401);
    assert_eq!(refused(Some(api.token(Scope::Read))).await.0, 403);
    let frontend = refused(Some(api.token(Scope::Frontend))).await;
    assert_eq!(frontend.0, 409);
    for (method, path) in [
        (Method::GET, "/v1/sessions/a/execs"),
        (Method::POST, "/v1/sessions/a/execs"),
        (Method::GET, "/v1/sessions/a/execs/0123456789ab"),
        (Method::DELETE, "/v1/sessions/a/execs/0123456789ab"),
        (Method::POST, "/v1/sessions/a/execs/0123456789ab/signal"),
    ] {
        let request = api.request(Scope::Read, method.clone(), path);
        let answer = api.send(request).await;
        assert_eq!(answer.status, StatusCode::FORBIDDEN, "{method} {path}");
    }
}

#[tokio::test]
async fn what_cannot_be_attached_to_says_why() {
    let stage = Stage::new();
    let api = stage.boot().await;
    api.start("a").await;
    let server = Server::start(&api).await;
    let token = Some(api.token(Scope::Frontend));
    for (path, protocol, status, slug) in [
        ("a/attach", ATTACH_PROTOCOL, 409, "no-terminal"),
        ("b/attach", ATTACH_PROTOCOL, 404, "no-such-session"),
        ("a/attach", EXEC_PROTOCOL, 426, "upgrade-required"),
        (
            "a/execs/0123456789ab/attach",
            ATTACH_PROTOCOL,
            422,
            "not-supported",
        ),
        ("a/attach?rows=0", ATTACH_PROTOCOL, 400, "bad-query"),
    ] {
        let refusal = server.refusal(path, token, protocol).await;
        // tungstenite keeps of a body what came with the head, perhaps nothing.
        assert_eq!(refusal.0, status, "{path}");
        assert!(
            refusal.1.is_empty() || refusal.1 == slug,
            "{path}: {}",
            refusal.1
        );
    }
    let kept = r#"{"command": ["sh"], "tty": true}"#;
    let path = "/v1/sessions/a/execs";
    let answer = api.call(Method::POST, path, kept).await;
    assert_eq!(answer.problem().slug(), "not-supported");
    let asked = r#"{"template": "idle", "tty": true}"#;
    let path = "/v1/sessions/c";
    let answer = api.call(Method::PUT, path, asked).await;
    let problem = answer.problem();
    assert_eq!(problem.slug(), "bad-spec");
    assert_eq!(problem.errors[0].field, "tty");
}
