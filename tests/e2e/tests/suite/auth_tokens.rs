//! Who may do what: every route for every scope, the token file as it changes, and what listens
//! beyond this host.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::Duration;

use conman_e2e::{
    Answer, Api, Conman, EventStream, answer, docker_shared, eventually, websocket, with,
};
use conman_linux::Signal;
use conman_proto::{ConnectToken, EXEC_PROTOCOL, Node, NodeState, SessionState};
use futures_util::StreamExt as _;
use http::header::{CONTENT_TYPE, WWW_AUTHENTICATE};
use http::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(60);

/// An `ExecRequest` that says hello, as it stands in a query.
const HELLO: &str = "%7B%22command%22%3A%5B%22echo%22%2C%22hello%22%5D%7D";

/// What a route asks of its caller, weakest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Needs {
    Nothing,
    Read,
    Frontend,
    Admin,
}
use Needs::{Admin, Frontend, Nothing, Read};

/// One route: what it needs, a request that would do harm, and one that is harmless with the
/// status that it is answered with.
struct Rule {
    method: &'static str,
    route: &'static str,
    needs: Needs,
    harm: (&'static str, Option<Value>),
    harmless: (&'static str, Option<Value>),
    status: u16,
}

fn look(route: &'static str, path: &'static str, needs: Needs) -> Rule {
    Rule {
        method: "get",
        route,
        needs,
        harm: (path, None),
        harmless: (path, None),
        status: 200,
    }
}

fn act(
    method: &'static str,
    route: &'static str,
    needs: Needs,
    harm: (&'static str, Option<Value>),
    harmless: (&'static str, Option<Value>),
    status: u16,
) -> Rule {
    Rule {
        method,
        route,
        needs,
        harm,
        harmless,
        status,
    }
}

fn rules() -> Vec<Rule> {
    let tiny = || Some(json!({"template": "tiny"}));
    let kill = || Some(json!({"command": ["kill", "-9", "1"]}));
    let id = "/v1/sessions/{id}";
    let exec = "/v1/sessions/{id}/exec";
    vec![
        look("/healthz", "/healthz", Nothing),
        look("/readyz", "/readyz", Nothing),
        look("/", "/", Read),
        look("/metrics", "/metrics", Read),
        look("/v1/openapi.json", "/v1/openapi.json", Read),
        look("/v1/templates", "/v1/templates", Read),
        look("/v1/nodes", "/v1/nodes", Read),
        look("/v1/nodes/{id}", "/v1/nodes/self", Read),
        Rule {
            status: 404,
            ..look("/v1/nodes/{id}/drain", "/v1/nodes/self/drain", Read)
        },
        Rule {
            status: 404,
            ..look("/v1/nodes/{id}/rebalance", "/v1/nodes/self/rebalance", Read)
        },
        look("/v1/events", "/v1/events?follow=false", Read),
        look("/v1/images", "/v1/images", Read),
        act(
            "get",
            "/v1/images/{name}",
            Read,
            ("/v1/images/absent:1", None),
            ("/v1/images/absent:1", None),
            404,
        ),
        act(
            "post",
            "/v1/images",
            Admin,
            ("/v1/images", Some(json!({"pull": "localhost:1/never:1"}))),
            ("/v1/images", Some(json!({"pull": "No-Reference"}))),
            422,
        ),
        act(
            "delete",
            "/v1/images/{name}",
            Admin,
            ("/v1/images/absent:1", None),
            ("/v1/images/absent:1", None),
            404,
        ),
        act(
            "post",
            "/v1/gc",
            Admin,
            ("/v1/gc", None),
            ("/v1/gc", None),
            200,
        ),
        look("/v1/sessions", "/v1/sessions", Read),
        look(id, "/v1/sessions/s", Read),
        look(
            "/v1/sessions/{id}/timeline",
            "/v1/sessions/s/timeline",
            Read,
        ),
        look("/v1/sessions/{id}/logs", "/v1/sessions/s/logs", Frontend),
        act(
            "post",
            "/v1/sessions",
            Frontend,
            ("/v1/sessions", tiny()),
            ("/v1/sessions", Some(json!({"template": "absent"}))),
            422,
        ),
        act(
            "patch",
            id,
            Frontend,
            ("/v1/sessions/s", Some(json!({"labels": {"a": "b"}}))),
            ("/v1/sessions/absent", Some(json!({"labels": {"a": "b"}}))),
            404,
        ),
        act(
            "put",
            id,
            Frontend,
            ("/v1/sessions/never", tiny()),
            ("/v1/sessions/s", tiny()),
            200,
        ),
        act(
            "delete",
            id,
            Frontend,
            ("/v1/sessions/s", None),
            ("/v1/sessions/absent", None),
            404,
        ),
        act(
            "post",
            exec,
            Frontend,
            ("/v1/sessions/s/exec", kill()),
            ("/v1/sessions/s/exec", Some(json!({"command": ["true"]}))),
            200,
        ),
        act(
            "get",
            exec,
            Frontend,
            (
                "/v1/sessions/s/exec?request=%7B%22command%22%3A%5B%22true%22%5D%7D",
                None,
            ),
            (
                "/v1/sessions/s/exec?request=%7B%22command%22%3A%5B%22true%22%5D%7D",
                None,
            ),
            426,
        ),
        act(
            "get",
            "/v1/sessions/{id}/attach",
            Frontend,
            ("/v1/sessions/s/attach", None),
            ("/v1/sessions/s/attach", None),
            426,
        ),
        look("/v1/sessions/{id}/execs", "/v1/sessions/s/execs", Frontend),
        act(
            "post",
            "/v1/sessions/{id}/execs",
            Frontend,
            (
                "/v1/sessions/s/execs",
                Some(json!({"command": ["kill", "-9", "1"], "tty": true})),
            ),
            ("/v1/sessions/s/execs", Some(json!({"command": ["true"]}))),
            422,
        ),
        act(
            "get",
            "/v1/sessions/{id}/execs/{exec}",
            Frontend,
            ("/v1/sessions/s/execs/0123456789ab", None),
            ("/v1/sessions/s/execs/0123456789ab", None),
            404,
        ),
        act(
            "get",
            "/v1/sessions/{id}/execs/{exec}/attach",
            Frontend,
            ("/v1/sessions/s/execs/0123456789ab/attach", None),
            ("/v1/sessions/s/execs/0123456789ab/attach", None),
            426,
        ),
        act(
            "post",
            "/v1/sessions/{id}/execs/{exec}/signal",
            Frontend,
            ("/v1/sessions/s/execs/0123456789ab/signal", None),
            ("/v1/sessions/s/execs/0123456789ab/signal", None),
            404,
        ),
        act(
            "delete",
            "/v1/sessions/{id}/execs/{exec}",
            Frontend,
            ("/v1/sessions/s/execs/0123456789ab", None),
            ("/v1/sessions/s/execs/0123456789ab", None),
            404,
        ),
        act(
            "post",
            "/v1/sessions/{id}/token",
            Frontend,
            ("/v1/sessions/s/token", Some(json!({}))),
            ("/v1/sessions/s/token", Some(json!({}))),
            200,
        ),
        act(
            "delete",
            "/v1/nodes/{id}",
            Admin,
            ("/v1/nodes/self", None),
            ("/v1/nodes/absent", None),
            404,
        ),
        act(
            "post",
            "/v1/nodes/{id}/drain",
            Admin,
            ("/v1/nodes/self/drain", Some(json!({}))),
            ("/v1/nodes/self/drain", Some(json!({"dry_run": true}))),
            200,
        ),
        act(
            "post",
            "/v1/nodes/{id}/undrain",
            Admin,
            ("/v1/nodes/self/undrain", None),
            ("/v1/nodes/self/undrain", None),
            200,
        ),
        act(
            "post",
            "/v1/nodes/{id}/preempt",
            Admin,
            ("/v1/nodes/self/preempt", Some(json!({}))),
            ("/v1/nodes/self/preempt", Some(json!({"dry_run": true}))),
            200,
        ),
        look("/v1/nodes/{id}/stats", "/v1/nodes/self/stats", Read),
        look("/v1/sessions/{id}/stats", "/v1/sessions/s/stats", Read),
        look(
            "/v1/sessions/{id}/processes",
            "/v1/sessions/s/processes",
            Frontend,
        ),
        look("/v1/sessions/{id}/links", "/v1/sessions/s/links", Read),
        act(
            "post",
            "/v1/sessions/{id}/links",
            Admin,
            ("/v1/sessions/s/links", Some(json!({"to": "bridge:absent"}))),
            (
                "/v1/sessions/absent/links",
                Some(json!({"to": "bridge:absent"})),
            ),
            404,
        ),
        act(
            "delete",
            "/v1/sessions/{id}/links/{name}",
            Admin,
            ("/v1/sessions/s/links/eth1", None),
            ("/v1/sessions/absent/links/eth1", None),
            404,
        ),
        act(
            "post",
            "/v1/nodes/{id}/rebalance",
            Admin,
            ("/v1/nodes/self/rebalance", Some(json!({}))),
            ("/v1/nodes/self/rebalance", Some(json!({"dry_run": true}))),
            200,
        ),
        act(
            "post",
            "/v1/nodes/{id}/cordon",
            Admin,
            ("/v1/nodes/absent/cordon", None),
            ("/v1/nodes/absent/cordon", None),
            404,
        ),
        act(
            "post",
            "/v1/nodes/{id}/uncordon",
            Admin,
            ("/v1/nodes/absent/uncordon", None),
            ("/v1/nodes/absent/uncordon", None),
            404,
        ),
        act(
            "post",
            "/v1/sessions/{id}/pause",
            Frontend,
            ("/v1/sessions/absent/pause", None),
            ("/v1/sessions/absent/pause", None),
            404,
        ),
        act(
            "post",
            "/v1/sessions/{id}/resume",
            Frontend,
            ("/v1/sessions/absent/resume", None),
            ("/v1/sessions/absent/resume", None),
            404,
        ),
        act(
            "post",
            "/v1/sessions/{id}/restart",
            Frontend,
            ("/v1/sessions/absent/restart", None),
            ("/v1/sessions/absent/restart", None),
            404,
        ),
        act(
            "post",
            "/v1/sessions/{id}/kill",
            Frontend,
            ("/v1/sessions/absent/kill", Some(json!({"signal": "TERM"}))),
            ("/v1/sessions/absent/kill", Some(json!({"signal": "TERM"}))),
            404,
        ),
        act(
            "delete",
            "/v1/sessions/{id}/files",
            Frontend,
            ("/v1/sessions/absent/files?path=/x", None),
            ("/v1/sessions/absent/files?path=/x", None),
            404,
        ),
        act(
            "get",
            "/v1/sessions/{id}/files",
            Frontend,
            ("/v1/sessions/absent/files?path=/x", None),
            ("/v1/sessions/absent/files?path=/x", None),
            404,
        ),
        act(
            "put",
            "/v1/sessions/{id}/files",
            Frontend,
            ("/v1/sessions/absent/files?path=/x", None),
            ("/v1/sessions/absent/files?path=/x", None),
            404,
        ),
        act(
            "get",
            "/v1/sessions/{id}/files/watch",
            Frontend,
            ("/v1/sessions/absent/files/watch?path=/", None),
            ("/v1/sessions/absent/files/watch?path=/", None),
            404,
        ),
        act(
            "get",
            "/v1/sessions/{id}/files/list",
            Frontend,
            ("/v1/sessions/absent/files/list?path=/", None),
            ("/v1/sessions/absent/files/list?path=/", None),
            404,
        ),
        act(
            "post",
            "/v1/sessions/{id}/files/mkdir",
            Frontend,
            (
                "/v1/sessions/absent/files/mkdir",
                Some(json!({"path": "/x"})),
            ),
            (
                "/v1/sessions/absent/files/mkdir",
                Some(json!({"path": "/x"})),
            ),
            404,
        ),
        act(
            "post",
            "/v1/sessions/{id}/files/move",
            Frontend,
            (
                "/v1/sessions/absent/files/move",
                Some(json!({"from": "/x", "to": "/y"})),
            ),
            (
                "/v1/sessions/absent/files/move",
                Some(json!({"from": "/x", "to": "/y"})),
            ),
            404,
        ),
        act(
            "get",
            "/v1/sessions/{id}/ports/{port}/connect",
            Frontend,
            ("/v1/sessions/absent/ports/80/connect", None),
            ("/v1/sessions/absent/ports/80/connect", None),
            426,
        ),
        act(
            "post",
            "/v1/nodes/{id}/readmit",
            Admin,
            ("/v1/nodes/self/readmit", None),
            ("/v1/nodes/self/readmit", None),
            200,
        ),
    ]
}

/// A caller: what it brings, and what that is good for; `None` when it is good for nothing.
struct Caller {
    name: &'static str,
    api: Api,
    scope: Option<Needs>,
}

async fn callers(conman: &Conman) -> Vec<Caller> {
    let admin = conman.api().with_token(conman.token("admin"));
    let connect: ConnectToken = admin
        .post("/v1/sessions/s/token", &json!({}))
        .await
        .expect(StatusCode::OK);
    let wrong = format!("cmn_admin_{}", "x".repeat(43));
    let nearly = format!("{}x", conman.token("admin"));
    let caller = |name, token: Option<&str>, scope| {
        let api = conman.api();
        let api = token.map_or(api.clone(), |token| api.with_token(token));
        Caller { name, api, scope }
    };
    vec![
        caller("nobody", None, None),
        caller("a wrong token", Some(&wrong), None),
        caller("a token with a letter more", Some(&nearly), None),
        caller("a connect token", Some(&connect.token), None),
        caller("read", Some(conman.token("read")), Some(Read)),
        caller("frontend", Some(conman.token("frontend")), Some(Frontend)),
        caller("admin", Some(conman.token("admin")), Some(Admin)),
    ]
}

async fn with_every_scope(docker: &conman_e2e::Docker) -> Conman {
    Conman::builder()
        .token("read", "read")
        .token("frontend", "frontend")
        .token("admin", "admin")
        .start(docker)
        .await
}

/// What the answer must be to who may not; `None` to who may.
fn refusal(caller: &Caller, needs: Needs) -> Option<(u16, &'static str)> {
    match caller.scope {
        _ if needs == Nothing => None,
        None => Some((401, "unauthenticated")),
        Some(scope) if scope < needs => Some((403, "forbidden")),
        Some(_) => None,
    }
}

fn assert_refused(answer: &Answer, (status, slug): (u16, &str), what: &str) {
    assert_eq!(answer.status, status, "{what}: {}", answer.text());
    let problem = answer.problem();
    assert_eq!(problem.slug(), slug, "{what}");
    assert!(!problem.detail.is_empty() && problem.instance.is_some());
    let challenge = answer.headers.get(WWW_AUTHENTICATE);
    let challenge = challenge.map(|value| value.to_str().expect("text"));
    let expected = (status == 401).then_some("Bearer realm=\"conman\"");
    assert_eq!(challenge, expected, "{what}");
}

#[tokio::test]
async fn every_route_is_open_to_the_scopes_that_it_needs_and_to_no_other() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = with_every_scope(&docker).await;
    let admin = conman.api().with_token(conman.token("admin"));
    let started = admin.ensure("s", &json!({"template": "tiny"})).await;

    let served = admin.get("/v1/openapi.json").await.json();
    let served: BTreeSet<(String, String)> = served["paths"]
        .as_object()
        .expect("paths")
        .iter()
        .flat_map(|(route, item)| {
            let methods = item.as_object().expect("methods").keys();
            methods.map(move |method| (route.clone(), method.clone()))
        })
        .collect();
    let rules = rules();
    let ruled: BTreeSet<(String, String)> = rules
        .iter()
        .map(|rule| (rule.route.to_owned(), rule.method.to_owned()))
        .collect();
    assert_eq!(
        served, ruled,
        "a route without a rule, or a rule without a route"
    );

    let callers = callers(&conman).await;
    for rule in &rules {
        let method: Method = rule.method.to_uppercase().parse().expect("a method");
        let (path, body) = &rule.harm;
        for caller in &callers {
            let what = format!("{} for {method} {path}", caller.name);
            if let Some(refusal) = refusal(caller, rule.needs) {
                let refused = caller.api.send(method.clone(), path, body.as_ref()).await;
                assert_refused(&refused, refusal, &what);
                if method == Method::GET {
                    let head = caller.api.send(Method::HEAD, path, None).await;
                    assert_eq!(head.status, refusal.0, "{what}, HEAD");
                }
            }
        }
    }
    let left: SessionState = admin.session("s").await.state;
    let generation = admin.session("s").await.generation;
    assert_eq!(
        (left, generation),
        (SessionState::Running, started.session.generation)
    );
    let never = admin.get("/v1/sessions/never").await;
    assert_eq!(never.status, StatusCode::NOT_FOUND, "a refused PUT made it");
    let node: Node = admin.get("/v1/nodes/self").await.expect(StatusCode::OK);
    assert_eq!(node.state, NodeState::Live);

    for rule in &rules {
        let method: Method = rule.method.to_uppercase().parse().expect("a method");
        let (path, body) = &rule.harmless;
        for caller in &callers {
            if refusal(caller, rule.needs).is_none() {
                let answer = caller.api.send(method.clone(), path, body.as_ref()).await;
                let what = format!("{} for {method} {path}", caller.name);
                assert_eq!(answer.status, rule.status, "{what}: {}", answer.text());
            }
        }
    }
}

#[tokio::test]
async fn what_is_no_route_tells_nothing_to_who_is_not_known() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = with_every_scope(&docker).await;
    for (method, path) in [
        (Method::GET, "/v1/no-such-route"),
        (Method::GET, "/v1/sessions/Not%20A%20Name"),
        (Method::GET, "/../etc/passwd"),
        (Method::PATCH, "/v1/sessions"),
        (Method::OPTIONS, "/v1/sessions"),
        (Method::POST, "/healthz/"),
        (Method::GET, "//healthz"),
        (Method::GET, "/%68ealthz"),
    ] {
        let refused = conman.api().send(method.clone(), path, None).await;
        let what = format!("{method} {path}");
        assert_refused(&refused, (401, "unauthenticated"), &what);
        let known = conman.api().with_token(conman.token("frontend"));
        let answer = known.send(method, path, None).await;
        let status = answer.status.as_u16();
        assert!(
            [400, 404, 405].contains(&status),
            "{what}: {}",
            answer.text()
        );
        assert_eq!(answer.headers[CONTENT_TYPE], "application/problem+json");
    }
}

#[tokio::test]
async fn a_header_that_is_not_one_bearer_token_opens_nothing() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = with_every_scope(&docker).await;
    let api = conman.api();
    let token = conman.token("admin");
    for value in [
        String::new(),
        "Bearer".to_owned(),
        "Bearer ".to_owned(),
        token.to_owned(),
        format!("Basic {token}"),
        format!("Bearer {token}, Bearer {token}"),
        format!("Bearer  {token}x"),
        format!("Bearer {}", "x".repeat(20_000)),
    ] {
        let request = api.request(Method::GET, "/v1/sessions", None);
        let refused = answer(&api, with(request, "authorization", &value)).await;
        assert_refused(&refused, (401, "unauthenticated"), &value);
        assert!(!refused.text().contains(token), "{}", refused.text());
    }
    let mut twice = api
        .clone()
        .with_token(token)
        .request(Method::GET, "/v1/sessions", None);
    let same = twice.headers()["authorization"].clone();
    twice.headers_mut().append("authorization", same);
    assert_refused(
        &answer(&api, twice).await,
        (401, "unauthenticated"),
        "twice",
    );
    // Nor does the token in another place.
    let in_query = api.get(&format!("/v1/sessions?conman_token={token}")).await;
    assert_refused(&in_query, (401, "unauthenticated"), "in the query");
    let request = api.request(Method::GET, "/v1/sessions", None);
    let in_cookie = with(request, "cookie", &format!("conman_session={token}"));
    assert_refused(
        &answer(&api, in_cookie).await,
        (401, "unauthenticated"),
        "a cookie",
    );
    // The scheme's case and the space around do not matter (RFC 9110, section 11.1).
    let request = api.request(Method::GET, "/v1/sessions", None);
    let other_case = with(request, "authorization", &format!("bEARER   {token}"));
    assert_eq!(answer(&api, other_case).await.status, StatusCode::OK);
}

#[tokio::test]
async fn websockets_and_streams_of_events_are_open_to_their_scopes_alone() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = with_every_scope(&docker).await;
    let admin = conman.api().with_token(conman.token("admin"));
    admin.ensure("s", &json!({"template": "tiny"})).await;
    for caller in callers(&conman).await {
        let what = caller.name;
        let path = format!("/v1/sessions/s/exec?request={HELLO}");
        let request = caller.api.request(Method::GET, &path, None);
        let opened = websocket(&caller.api, request, &[EXEC_PROTOCOL]).await;
        match (opened, refusal(&caller, Frontend)) {
            (Err(refused), Some(refusal)) => assert_refused(&refused, refusal, what),
            (Ok((headers, mut socket)), None) => {
                assert_eq!(headers["sec-websocket-protocol"], EXEC_PROTOCOL);
                let said = async {
                    loop {
                        let message = socket.next().await.expect("the command answers");
                        let data = message.expect("a message").into_data();
                        if data.first() == Some(&1) {
                            break data;
                        }
                    }
                };
                let said = timeout(PATIENCE, said).await.expect("in time");
                assert_eq!(&said[1..], b"hello\n", "{what}");
            }
            (Err(refused), None) => panic!("{what} is refused: {}", refused.text()),
            (Ok(_), Some(_)) => panic!("{what} runs commands"),
        }
        if let Some(refusal) = refusal(&caller, Read) {
            let refused = caller.api.get("/v1/events?after=0").await;
            assert_refused(&refused, refusal, what);
        } else {
            let mut stream = EventStream::open(&caller.api, "/v1/events?after=0", None).await;
            assert!(stream.next().await.is_some(), "{what}");
        }
    }
}

/// The token file of one installation, as an administrator edits it.
struct Tokens<'conman> {
    conman: &'conman Conman,
    path: PathBuf,
}

impl Tokens<'_> {
    fn of(conman: &Conman) -> Tokens<'_> {
        let path = conman.directory().join("tokens.toml");
        Tokens { conman, path }
    }

    fn write(&self, text: &str, mode: u32) {
        fs::write(&self.path, text).expect("the token file can be written");
        fs::set_permissions(&self.path, Permissions::from_mode(mode)).expect("chmod");
    }

    /// A new token's text and the entry for the file.
    async fn make(&self, name: &str) -> (String, String) {
        let arguments = [
            "auth",
            "new-token",
            "--json",
            "--name",
            name,
            "--scope",
            "read",
        ];
        let made = self.conman.cli(&arguments).await;
        let made: Value = serde_json::from_str(made.success()).expect("JSON");
        let field = |name: &str| made[name].as_str().expect("text").to_owned();
        (field("token"), field("entry"))
    }

    /// Has the daemon read the file again, and waits until it tells about it.
    async fn reload(&self, words: &str) -> String {
        let before = self.conman.log().matches(words).count();
        self.conman.signal(Signal::SIGHUP);
        let what = format!("the log says `{words}`");
        eventually(&what, PATIENCE, async || {
            self.conman.log().matches(words).count() > before
        })
        .await;
        let log = self.conman.log();
        let told = log.rfind(words).expect("it is there");
        log[told..].to_owned()
    }

    async fn status(&self, token: &str) -> u16 {
        let api = self.conman.api().with_token(token);
        api.get("/v1/sessions").await.status.as_u16()
    }
}

#[tokio::test]
async fn the_token_file_is_read_again_on_sighup_and_a_bad_one_changes_nothing() {
    const READ: &str = "reloaded the token file";
    const KEPT: &str = "cannot reload the token file; keeping the former tokens";
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::builder()
        .token("first", "read")
        .start(&docker)
        .await;
    let tokens = Tokens::of(&conman);
    let first = conman.token("first");
    let (second, entry) = tokens.make("second").await;
    let original = fs::read_to_string(&tokens.path).expect("the token file can be read");

    tokens.write(&format!("{original}\n{entry}\n"), 0o600);
    assert_eq!(
        tokens.status(&second).await,
        401,
        "nobody has said that it is there"
    );
    tokens.reload(READ).await;
    assert_eq!(
        (tokens.status(first).await, tokens.status(&second).await),
        (200, 200)
    );

    tokens.write(&entry, 0o600);
    tokens.reload(READ).await;
    assert_eq!(
        (tokens.status(first).await, tokens.status(&second).await),
        (401, 200)
    );

    let (third, third_entry) = tokens.make("third").await;
    let both = format!("{entry}\n{third_entry}\n");
    let path = tokens.path.display().to_string();
    for (text, mode, words) in [
        (format!("{both}\n[[token]\n"), 0o600, format!("{path}:10: ")),
        (
            format!("{both}\nsha = 1\n"),
            0o600,
            "unknown field `sha`".to_owned(),
        ),
        (both.clone(), 0o644, "mode 0644".to_owned()),
        (both.clone(), 0o644, format!("chmod 600 {path}")),
        (both.clone(), 0o620, "mode 0620".to_owned()),
    ] {
        tokens.write(&text, mode);
        let told = tokens.reload(KEPT).await;
        assert!(told.contains(&words), "{words} is missing in: {told}");
        assert_eq!(
            (tokens.status(&second).await, tokens.status(&third).await),
            (200, 401)
        );
    }
    fs::remove_file(&tokens.path).expect("the token file can be removed");
    let told = tokens.reload(KEPT).await;
    assert!(
        told.contains(&path) && told.contains("No such file"),
        "{told}"
    );
    assert_eq!(tokens.status(&second).await, 200);

    tokens.write(&both, 0o600);
    tokens.reload(READ).await;
    assert_eq!(
        (tokens.status(&second).await, tokens.status(&third).await),
        (200, 200)
    );
    tokens.write("# none at present\n", 0o600);
    tokens.reload(READ).await;
    assert_eq!(
        (tokens.status(&second).await, tokens.status(&third).await),
        (401, 401)
    );

    let log = conman.log();
    for token in [first, &second, &third] {
        assert!(!log.contains(token), "a token stands in the log");
    }
}

#[tokio::test]
async fn a_daemon_does_not_start_with_a_token_file_that_others_may_read_or_that_is_broken() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let mut conman = Conman::builder().token("one", "admin").prepare(&docker);
    let path = conman.directory().join("tokens.toml");
    let good = fs::read_to_string(&path).expect("the token file can be read");
    for (text, mode, words) in [
        (good.as_str(), 0o644, "mode 0644"),
        (good.as_str(), 0o640, "chmod 600"),
        (
            "[[token]]\nname = \"x\"\n",
            0o600,
            "tokens.toml:1: missing field `scope`",
        ),
    ] {
        fs::write(&path, text).expect("the token file can be written");
        fs::set_permissions(&path, Permissions::from_mode(mode)).expect("chmod");
        conman.spawn();
        let ended = conman.wait_ended().await;
        assert_eq!(ended.code(), Some(2), "{}", conman.log());
        let log = conman.log();
        assert!(
            log.contains("auth.tokens_file") && log.contains(words),
            "{log}"
        );
        assert!(!conman.state_dir().exists(), "something was begun");
    }
    fs::write(&path, &good).expect("the token file can be written");
    conman.launch().await;
    let token = conman.token("one").to_owned();
    let known = conman.api().with_token(&token);
    assert_eq!(known.get("/v1/sessions").await.status, StatusCode::OK);
}

/// Has both listeners listen on every address of this host.
fn listen_everywhere(conman: &Conman) {
    let path = conman.config_path();
    let text = fs::read_to_string(&path).expect("the config can be read");
    let text = text
        .replace("api = \"127.0.0.1:", "api = \"0.0.0.0:")
        .replace("sessions = \"127.0.0.1:", "sessions = \"0.0.0.0:");
    fs::write(&path, text).expect("the config can be written");
}

/// The status line and the rest of the answer to a request to another address than 127.0.0.1.
async fn ask(port: u16, head: &str) -> String {
    let exchange = async {
        let mut stream = TcpStream::connect(("127.0.0.2", port))
            .await
            .expect("it listens there too");
        let request = format!("GET {head}\r\nHost: 127.0.0.2:{port}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("answered");
        answer
    };
    timeout(PATIENCE, exchange).await.expect("in time")
}

#[tokio::test]
async fn beyond_loopback_a_daemon_listens_with_tokens_and_not_without() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let mut open = Conman::builder().prepare(&docker);
    listen_everywhere(&open);
    open.spawn();
    let ended = open.wait_ended().await;
    let log = open.log();
    assert_eq!(ended.code(), Some(2), "{log}");
    for words in [
        "listen.api",
        "listen.sessions",
        "conman auth new-token",
        "auth.tokens_file",
    ] {
        assert!(log.contains(words), "{words} is missing in: {log}");
    }
    assert!(!open.state_dir().exists(), "something was begun");
    TcpListener::bind(open.api_address()).expect("nobody listens there");

    let mut closed = Conman::builder().token("web", "frontend").prepare(&docker);
    listen_everywhere(&closed);
    closed.launch().await;
    let port = closed.api_address().port();
    let ready = ask(port, "/readyz HTTP/1.1").await;
    assert!(ready.starts_with("HTTP/1.1 200"), "{ready}");
    let anonymous = ask(port, "/v1/sessions HTTP/1.1").await;
    assert!(anonymous.starts_with("HTTP/1.1 401"), "{anonymous}");
    let token = format!("Authorization: Bearer {}", closed.token("web"));
    let known = ask(port, &format!("/v1/sessions HTTP/1.1\r\n{token}")).await;
    assert!(known.starts_with("HTTP/1.1 200"), "{known}");
    let session = ask(closed.sessions_address().port(), "/s/a/ HTTP/1.1").await;
    assert!(session.starts_with("HTTP/1.1 401"), "{session}");
}
