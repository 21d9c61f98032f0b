//! Connect tokens: each way to bring one opens its session, for its time, and none of them reaches
//! the program in the session.

use std::time::Duration;

use bytes::Bytes;
use conman_e2e::{
    Answer, Api, Conman, Docker, ECHO_TEMPLATE, answer, docker_shared, eventually, log_with,
    websocket, with,
};
use conman_proto::ConnectToken;
use futures_util::StreamExt as _;
use http::header::{AUTHORIZATION, COOKIE, LOCATION, SET_COOKIE, WWW_AUTHENTICATE};
use http::{Method, Request, StatusCode};
use http_body_util::Full;
use serde_json::json;
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(60);

/// What no program may ever be shown, beside the credentials themselves.
const OURS: [&str; 3] = ["conman_token", "conman.token", "conman_session"];

/// A conman with tokens and two sessions that tell what they are sent.
struct Stage {
    conman: Conman,
    frontend: Api,
}

impl Stage {
    async fn start(docker: &Docker) -> Self {
        let conman = Conman::builder()
            .token("read", "read")
            .token("frontend", "frontend")
            .toml(ECHO_TEMPLATE)
            .start(docker)
            .await;
        let frontend = conman.api().with_token(conman.token("frontend"));
        for id in ["a", "b"] {
            frontend.ensure(id, &json!({"template": "echo"})).await;
        }
        Self { conman, frontend }
    }

    async fn token(&self, id: &str, ttl_s: u32) -> ConnectToken {
        let path = format!("/v1/sessions/{id}/token");
        let made = self.frontend.post(&path, &json!({"ttl_s": ttl_s})).await;
        made.expect(StatusCode::OK)
    }

    /// A GET for the session's own host.
    fn get(&self, id: &str, target: &str) -> Request<Full<Bytes>> {
        let port = self.conman.sessions_address().port();
        let request = self.conman.sessions().request(Method::GET, target, None);
        with(request, "host", &format!("{id}.localhost:{port}"))
    }

    async fn send(&self, request: Request<Full<Bytes>>) -> Answer {
        answer(&self.conman.sessions(), request).await
    }

    /// What the program was sent to open a WebSocket, and the subprotocol that was selected.
    async fn dial(
        &self,
        request: Request<Full<Bytes>>,
        protocols: &[&str],
    ) -> Result<(String, Option<String>), Answer> {
        let (headers, mut socket) = websocket(&self.conman.sessions(), request, protocols).await?;
        let message = timeout(PATIENCE, socket.next()).await.expect("in time");
        let message = message.expect("the program answers").expect("a message");
        let selected = headers.get("sec-websocket-protocol");
        let selected = selected.map(|value| value.to_str().expect("text").to_owned());
        Ok((message.into_text().expect("text").to_string(), selected))
    }

    /// Exchanges a token for a cookie: where the browser is sent, and the cookie's whole line.
    async fn exchange(&self, request: Request<Full<Bytes>>) -> (String, String) {
        let redirect = self.send(request).await;
        assert_eq!(
            redirect.status,
            StatusCode::SEE_OTHER,
            "{}",
            redirect.text()
        );
        let text = |name| {
            let mut values = redirect.headers.get_all(name).iter();
            let value = values.next().expect("it is there").to_str().expect("text");
            assert!(values.next().is_none(), "twice");
            value.to_owned()
        };
        (text(LOCATION), text(SET_COOKIE))
    }
}

fn bearer(request: Request<Full<Bytes>>, token: &str) -> Request<Full<Bytes>> {
    with(request, AUTHORIZATION.as_str(), &format!("Bearer {token}"))
}

/// The head that the program was sent, in which nothing of these is.
fn head_without(text: &str, secrets: &[&str]) -> Vec<String> {
    let lower = text.to_ascii_lowercase();
    for secret in secrets.iter().chain(&OURS) {
        let secret = secret.to_ascii_lowercase();
        assert!(
            !lower.contains(&secret),
            "{secret} has reached the program: {text}"
        );
    }
    text.trim_end().lines().map(str::to_owned).collect()
}

/// A field of a head, by its name in lower case.
fn field<'head>(head: &'head [String], name: &str) -> Option<&'head str> {
    head.iter().skip(1).find_map(|line| {
        let (own, value) = line.split_once(':')?;
        own.eq_ignore_ascii_case(name).then(|| value.trim())
    })
}

fn assert_unauthenticated(answer: &Answer, word: &str) {
    assert_eq!(answer.status, StatusCode::UNAUTHORIZED, "{}", answer.text());
    let problem = answer.problem();
    assert_eq!(problem.slug(), "unauthenticated");
    assert!(
        problem.detail.contains(word),
        "{word} is missing in: {}",
        problem.detail
    );
    let challenge = answer.headers.get(WWW_AUTHENTICATE);
    let challenge = challenge.expect("a challenge (RFC 9110, section 15.5.2)");
    assert!(challenge.to_str().expect("text").starts_with("Bearer"));
}

#[tokio::test]
async fn a_token_in_a_header_opens_its_session_and_stays_outside_of_it() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let stage = Stage::start(&docker).await;
    let token = stage.token("a", 300).await.token;
    let frontend = stage.conman.token("frontend").to_owned();
    for credential in [&token, &frontend] {
        let answer = stage
            .send(bearer(stage.get("a", "/x?y=1"), credential))
            .await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
        let head = head_without(&answer.text(), &[credential]);
        assert_eq!(head[0], "GET /x?y=1 HTTP/1.1");
        assert_eq!(field(&head, "authorization"), None);

        let by_path = stage.conman.sessions();
        let by_path = bearer(by_path.request(Method::GET, "/s/a/x?y=1", None), credential);
        let answer = stage.send(by_path).await;
        let head = head_without(&answer.text(), &[credential]);
        assert_eq!(head[0], "GET /x?y=1 HTTP/1.1");

        let dialled = stage
            .dial(bearer(stage.get("a", "/socket"), credential), &["chat"])
            .await;
        let (head, selected) = dialled.unwrap_or_else(|refusal| panic!("{}", refusal.text()));
        let head = head_without(&head, &[credential]);
        assert_eq!(field(&head, "authorization"), None);
        assert_eq!(field(&head, "sec-websocket-protocol"), Some("chat"));
        assert_eq!(selected.as_deref(), Some("chat"));
    }
    // A scope that may only look does not connect.
    let read = stage.conman.token("read");
    let refused = stage.send(bearer(stage.get("a", "/"), read)).await;
    assert_eq!(refused.status, StatusCode::FORBIDDEN);
    assert_eq!(refused.problem().slug(), "forbidden");
}

#[tokio::test]
async fn a_token_among_the_subprotocols_opens_a_websocket_and_stays_outside_of_it() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let stage = Stage::start(&docker).await;
    let token = stage.token("a", 300).await.token;
    let ours = format!("conman.token.{token}");
    let dial = async |offered: &[&str]| {
        let dialled = stage.dial(stage.get("a", "/socket"), offered).await;
        let (head, selected) = dialled.unwrap_or_else(|refusal| panic!("{}", refusal.text()));
        let head = head_without(&head, &[&token]);
        let offer = field(&head, "sec-websocket-protocol").map(str::to_owned);
        (offer, selected)
    };
    let chat = Some("chat".to_owned());
    for offered in [
        [ours.as_str(), "chat", "chat.v2"],
        ["chat", &ours, "chat.v2"],
    ] {
        let (offer, selected) = dial(&offered).await;
        assert_eq!(offer.as_deref(), Some("chat, chat.v2"));
        assert_eq!(selected, chat, "the program's choice");
    }
    // A browser gives a connection up in which none of what it offered was selected.
    assert_eq!(dial(&[&ours]).await, (None, Some(ours.clone())));

    // It is a way for WebSockets, and for the session that it names.
    let other = stage
        .dial(stage.get("b", "/socket"), &[&ours, "chat"])
        .await;
    assert_unauthenticated(&other.expect_err("refused"), "another");
    let none = stage.dial(stage.get("a", "/socket"), &["chat"]).await;
    assert_unauthenticated(&none.expect_err("refused"), "token");
}

#[tokio::test]
async fn a_token_in_the_url_is_exchanged_once_for_a_cookie_of_this_host_alone() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let stage = Stage::start(&docker).await;
    let token = stage.token("a", 300).await.token;
    let target = format!("/deep/er?x=1&conman_token={token}&y=%20");
    let (location, line) = stage.exchange(stage.get("a", &target)).await;
    assert_eq!(location, "/deep/er?x=1&y=%20");
    let attributes: Vec<&str> = line.split(';').map(str::trim).collect();
    let (cookie, attributes) = attributes.split_first().expect("a cookie");
    assert_eq!(
        attributes,
        ["Path=/", "Max-Age=43200", "HttpOnly", "SameSite=Lax"]
    );
    let (name, value) = cookie.split_once('=').expect("a cookie");
    assert_eq!(name, "conman_session");
    assert_ne!(
        value, token,
        "what stood in a URL must not live on as a cookie"
    );

    let with_cookies = |id: &str, cookies: &str| with(stage.get(id, "/"), "cookie", cookies);
    let both = format!("own=1; {cookie}; other=\"2\"");
    let answer = stage.send(with_cookies("a", &both)).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    let head = head_without(&answer.text(), &[&token, value]);
    assert_eq!(field(&head, "cookie"), Some("own=1; other=\"2\""));
    assert_eq!(
        answer.headers[SET_COOKIE], "own=program",
        "the program's own"
    );

    // The program's own bearer token passes beside a cookie.
    let own = bearer(with_cookies("a", cookie), "the-programs-own");
    let head = head_without(&stage.send(own).await.text(), &[value]);
    assert_eq!(
        field(&head, "authorization"),
        Some("Bearer the-programs-own")
    );
    assert_eq!(field(&head, "cookie"), None);

    // As a browser sends it with a WebSocket of the session's own page.
    let port = stage.conman.sessions_address().port();
    let own = format!("http://a.localhost:{port}");
    let dialled = stage
        .dial(with(with_cookies("a", &both), "origin", &own), &["chat"])
        .await;
    let (head, selected) = dialled.unwrap_or_else(|refusal| panic!("{}", refusal.text()));
    let head = head_without(&head, &[&token, value]);
    assert_eq!(field(&head, "cookie"), Some("own=1; other=\"2\""));
    assert_eq!(selected.as_deref(), Some("chat"));

    // The cookie is for one session, is no token, and the token is no cookie.
    assert_unauthenticated(&stage.send(with_cookies("b", cookie)).await, "cookie");
    assert_unauthenticated(
        &stage.send(bearer(stage.get("a", "/"), value)).await,
        "token",
    );
    let token_as_cookie = format!("conman_session={token}");
    let refused = stage.send(with_cookies("a", &token_as_cookie)).await;
    assert_unauthenticated(&refused, "cookie");
}

#[tokio::test]
async fn the_url_that_comes_with_a_token_leads_a_browser_to_the_sessions_own_host() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let stage = Stage::start(&docker).await;
    let made = stage.token("a", 300).await;
    let url = made.url.expect("the session has a port");
    let port = stage.conman.sessions_address().port();
    let own = format!("http://a.localhost:{port}");
    let target = url.strip_prefix(&own).expect("the session's own host");
    let (location, line) = stage.exchange(stage.get("a", target)).await;
    assert_eq!(location, "/");
    let cookie = line.split(';').next().expect("a cookie");
    let answer = stage
        .send(with(stage.get("a", "/"), "cookie", cookie))
        .await;
    assert_eq!(answer.status, StatusCode::OK);
    head_without(&answer.text(), &[&made.token, cookie]);
    // Even if a browser sent it there.
    let elsewhere = with(stage.get("b", "/"), "cookie", cookie);
    assert_unauthenticated(&stage.send(elsewhere).await, "cookie");
}

#[tokio::test]
async fn where_browsers_may_use_paths_the_url_of_a_token_and_its_cookie_keep_to_the_path() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    for browser_paths in [true, false] {
        let conman = Conman::builder()
            .set("listen", &format!("browser_paths = {browser_paths}"))
            .set("listen", "url = \"http://sessions.example/s/{id}/\"")
            .set("listen", "hosts = [\"sessions.example\"]")
            .toml(ECHO_TEMPLATE)
            .start(&docker)
            .await;
        let api = conman.api();
        api.ensure("a", &json!({"template": "echo"})).await;
        let made = api.post("/v1/sessions/a/token", &json!({})).await;
        let made: ConnectToken = made.expect(StatusCode::OK);
        let url = made.url.expect("the session has a port");
        let target = url.strip_prefix("http://sessions.example");
        let sessions = conman.sessions();
        let get = |target: &str| sessions.request(Method::GET, target, None);
        let redirect = answer(&sessions, get(target.expect("as configured"))).await;
        assert_eq!(redirect.headers[LOCATION], "/s/a/");
        let line = redirect.headers[SET_COOKIE].to_str().expect("text");
        assert!(line.contains("; Path=/s/a;"), "{line}");
        let cookie = line.split(';').next().expect("a cookie");
        let page = answer(&sessions, with(get("/s/a/"), "cookie", cookie)).await;
        if browser_paths {
            assert_eq!(page.status, StatusCode::OK, "{}", page.text());
        } else {
            assert_eq!(page.status, StatusCode::FORBIDDEN, "{}", page.text());
            assert!(page.text().contains("a.localhost"), "{}", page.text());
        }
    }
}

#[tokio::test]
async fn where_sessions_are_shown_by_https_the_cookie_keeps_to_it() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::builder()
        .set("listen", "domain = \"sessions.example\"")
        .set("listen", "url = \"https://{id}.sessions.example/\"")
        .toml(ECHO_TEMPLATE)
        .start(&docker)
        .await;
    let api = conman.api();
    api.ensure("a", &json!({"template": "echo"})).await;
    let made = api.post("/v1/sessions/a/token", &json!({})).await;
    let made: ConnectToken = made.expect(StatusCode::OK);
    let url = made.url.expect("the session has a port");
    let target = url.strip_prefix("https://a.sessions.example");
    let sessions = conman.sessions();
    let request = sessions.request(Method::GET, target.expect("as configured"), None);
    let redirect = answer(&sessions, with(request, "host", "a.sessions.example")).await;
    assert_eq!(
        redirect.status,
        StatusCode::SEE_OTHER,
        "{}",
        redirect.text()
    );
    assert_eq!(redirect.headers[LOCATION], "/");
    let line = redirect.headers[SET_COOKIE].to_str().expect("text");
    assert!(line.ends_with("; HttpOnly; SameSite=Lax; Secure"), "{line}");
}

#[tokio::test]
async fn a_token_in_the_url_of_what_cannot_be_redirected_is_taken_out_too() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let stage = Stage::start(&docker).await;
    let token = stage.token("a", 300).await.token;
    let target = format!("/socket?conman_token={token}&x=1");
    let dialled = stage.dial(stage.get("a", &target), &["chat"]).await;
    let (head, _) = dialled.unwrap_or_else(|refusal| panic!("{}", refusal.text()));
    assert_eq!(
        head_without(&head, &[&token])[0],
        "GET /socket?x=1 HTTP/1.1"
    );

    let mut post = stage.get("a", &target);
    *post.method_mut() = Method::POST;
    let answer = stage.send(post).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    assert_eq!(
        head_without(&answer.text(), &[&token])[0],
        "POST /socket?x=1 HTTP/1.1"
    );

    // In every spelling that conman takes for its own, and several at once.
    let target = format!("/?conman_token=bad&conman_token={token}&conman_token");
    let (location, _) = stage.exchange(stage.get("a", &target)).await;
    assert_eq!(location, "/");
    // What the program logs is the operator's to read: no token stands there either.
    let log = log_with(&stage.frontend, "a", "POST /socket?x=1").await;
    head_without(&log, &[&token]);
    assert!(
        !stage.conman.log().contains(&token),
        "the token is in the daemon's log"
    );
}

#[tokio::test]
async fn a_bad_credential_beside_a_good_one_is_taken_out_as_well() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let stage = Stage::start(&docker).await;
    let (good, other) = (
        stage.token("a", 300).await.token,
        stage.token("b", 300).await.token,
    );
    let read = stage.conman.token("read").to_owned();
    let removed = format!("cmn_frontend_{}", "x".repeat(43));
    let offered = [
        &*format!("conman.token.{other}"),
        "chat",
        &*format!("conman.token.{good}"),
        "conman.token.",
    ]
    .map(str::to_owned);
    let offered: Vec<&str> = offered.iter().map(String::as_str).collect();
    for bad in [&removed, &read, &other] {
        let request = stage.get("a", &format!("/socket?conman_token={other}"));
        let request = with(
            request,
            COOKIE.as_str(),
            &format!("conman_session={other}; own=1"),
        );
        let dialled = stage.dial(bearer(request, bad), &offered).await;
        let (head, _) = dialled.unwrap_or_else(|refusal| panic!("{}", refusal.text()));
        let head = head_without(&head, &[&good, &other, &read, &removed]);
        assert_eq!(head[0], "GET /socket HTTP/1.1");
        assert_eq!(field(&head, "sec-websocket-protocol"), Some("chat"));
        assert_eq!(field(&head, "cookie"), Some("own=1"));
        assert_eq!(field(&head, "authorization"), None);
    }
}

#[tokio::test]
async fn a_token_opens_one_session_for_its_time_and_nothing_else() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let mut stage = Stage::start(&docker).await;
    assert_unauthenticated(&stage.send(stage.get("a", "/")).await, "conman_token");
    let (token, other) = (
        stage.token("a", 300).await.token,
        stage.token("b", 300).await.token,
    );
    let with_token = |token: &str| bearer(stage.get("a", "/"), token);

    assert_unauthenticated(&stage.send(with_token(&other)).await, "another");
    let in_url = stage.get("a", &format!("/?conman_token={other}"));
    assert_unauthenticated(&stage.send(in_url).await, "another");
    let mut changed = token.clone();
    let last = changed.pop().expect("a letter");
    changed.push(if last == 'A' { 'B' } else { 'A' });
    for wrong in [
        changed,
        format!("{token}x"),
        "v4.local.".to_owned(),
        "x".repeat(4_000),
    ] {
        let refused = stage.send(with_token(&wrong)).await;
        assert_unauthenticated(&refused, "token");
        assert!(!refused.text().contains(&wrong), "{}", refused.text());
    }

    let short = stage.token("a", 1).await.token;
    let expired = async || {
        let answer = stage.send(with_token(&short)).await;
        answer.status == StatusCode::UNAUTHORIZED && answer.problem().detail.contains("expired")
    };
    eventually("the token expires", PATIENCE, expired).await;
    let in_url = stage.get("a", &format!("/?conman_token={short}"));
    assert_unauthenticated(&stage.send(in_url).await, "expired");
    let ours = format!("conman.token.{short}");
    let dialled = stage.dial(stage.get("a", "/"), &[&ours, "chat"]).await;
    assert_unauthenticated(&dialled.expect_err("refused"), "expired");
    for ttl_s in [0, 86_401] {
        let refused = stage
            .frontend
            .post("/v1/sessions/a/token", &json!({"ttl_s": ttl_s}))
            .await;
        assert_eq!(refused.status, StatusCode::UNPROCESSABLE_ENTITY);
        assert!(refused.problem().detail.contains("ttl_s"));
    }

    // Only the session itself, not the API: not even about it.
    let api = stage.conman.api().with_token(&token);
    for path in ["/v1/sessions/a", "/v1/sessions/a/logs", "/v1/events"] {
        assert_unauthenticated(&api.get(path).await, "token");
    }
    // The key outlives the daemon, and the session does, too.
    stage.conman.restart_after_crash().await;
    let answer = stage.send(bearer(stage.get("a", "/"), &token)).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
}

#[tokio::test]
async fn a_token_of_another_installation_opens_nothing() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let (one, other) = (Stage::start(&docker).await, Stage::start(&docker).await);
    let token = other.token("a", 300).await.token;
    let refused = one.send(bearer(one.get("a", "/"), &token)).await;
    assert_unauthenticated(&refused, "not one of this node's");
    let target = format!("/?conman_token={token}");
    let (_, line) = other.exchange(other.get("a", &target)).await;
    let cookie = line.split(';').next().expect("a cookie");
    let refused = one.send(with(one.get("a", "/"), "cookie", cookie)).await;
    assert_unauthenticated(&refused, "cookie");
}
