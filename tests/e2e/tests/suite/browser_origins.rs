//! The rules about origins, with a browser that keeps its own half of them: Chromium, headless.

use std::convert::Infallible;
use std::net::SocketAddr;

use bytes::Bytes;
use conman_e2e::{
    Chromium, Conman, Docker, ECHO_TEMPLATE, answer, chromium, docker_shared, log_with, with,
};
use conman_proto::{ConnectToken, Session, SessionState};
use http::{Method, Response, StatusCode};
use http_body_util::Full;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// A domain whose hosts Chromium takes for one site, as those of a real domain are, and does not
/// trust enough to send them `Sec-Fetch-*`.
const DOMAIN: &str = "sessions.test";

/// What the pages' scripts are written with: each tells what became of it as a text.
const SCRIPT: &str = r#"
    const read = (url, options) => fetch(url, options).then(
        async answer => `${answer.status} ${await answer.text()}`, error => `failed: ${error.name}`);
    const dial = (url, ...protocols) => new Promise(done => {
        const socket = new WebSocket(url, protocols);
        socket.onmessage = event => { done(`opened ${socket.protocol} ${event.data}`); socket.close(); };
        socket.onerror = () => done("failed");
    });
    const load = (kind, url) => new Promise(done => {
        const element = document.createElement(kind);
        element.onload = () => done("loaded");
        element.onerror = () => done("failed");
        element.src = url;
        document.body.append(element);
    });
    // What a page without an origin gets: its requests come from `null`.
    const sandboxed = script => new Promise(done => {
        const frame = document.createElement("iframe");
        addEventListener("message", event => done(event.data), {once: true});
        frame.sandbox = "allow-scripts";
        frame.srcdoc = `<script>(async () => { ${script} })().then(
            told => parent.postMessage(told, "*"))<` + `/script>`;
        document.body.append(frame);
    });
    const post = url => new Promise(done => {
        const frame = document.createElement("iframe"), form = document.createElement("form");
        frame.name = "frame";
        frame.onload = () => done("answered");
        form.action = url; form.method = "post"; form.target = "frame";
        document.body.append(frame, form);
        form.submit();
    });
"#;

/// Runs a script within the page that is open.
async fn run(browser: &mut Chromium, body: &str) -> Value {
    browser.evaluate(&format!("{SCRIPT}\n{body}")).await
}

/// The same for scripts that tell a text.
async fn told(browser: &mut Chromium, body: &str) -> String {
    let value = run(browser, body).await;
    let text = value.as_str().map(str::to_owned);
    text.unwrap_or_else(|| panic!("{body} gives {value}"))
}

/// A conman whose sessions are below `domain`.
struct Stage {
    conman: Conman,
    domain: &'static str,
}

impl Stage {
    async fn start(docker: &Docker, domain: &'static str, tokens: bool, origins: &[&str]) -> Self {
        let builder = Conman::builder()
            .set("listen", &format!("domain = \"{domain}\""))
            .set("listen", &format!("allowed_origins = {origins:?}"))
            .toml(ECHO_TEMPLATE);
        let builder = if tokens {
            builder.token("frontend", "frontend")
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
        Self { conman, domain }
    }

    /// The address of a session as its user's browser knows it, without scheme.
    fn host(&self, id: &str) -> String {
        let port = self.conman.sessions_address().port();
        format!("{id}.{}:{port}", self.domain)
    }

    async fn connect_token(&self, id: &str) -> String {
        let path = format!("/v1/sessions/{id}/token");
        let made = self.conman.admin().post(&path, &json!({})).await;
        made.expect::<ConnectToken>(StatusCode::OK).token
    }

    /// What the program in a session was asked for, everything until now included.
    async fn asked_of(&self, id: &str) -> String {
        let admin = self.conman.admin();
        let sessions = self.conman.sessions();
        let token = self.connect_token(id).await;
        let last = sessions.request(Method::GET, &format!("/s/{id}/the-last"), None);
        let last = with(last, "authorization", &format!("Bearer {token}"));
        let told = answer(&sessions, last).await;
        assert_eq!(told.status, StatusCode::OK, "{}", told.text());
        log_with(&admin, id, "/the-last").await
    }
}

/// Serves an empty page at an origin of its own, as a frontend does.
struct Frontend {
    address: SocketAddr,
    accepting: JoinHandle<()>,
}

impl Drop for Frontend {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Frontend {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("a bound address");
        let accepting = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let service = service_fn(|_| async {
                        let page = Bytes::from_static(b"<!doctype html><title>frontend</title>");
                        let response = Response::builder()
                            .header("content-type", "text/html")
                            .body(Full::new(page));
                        Ok::<_, Infallible>(response.expect("valid"))
                    });
                    // A browser that goes away is its own affair.
                    let _ = http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service)
                        .await;
                });
            }
        });
        Self { address, accepting }
    }

    fn origin(&self) -> String {
        format!("http://{}", self.address)
    }
}

#[tokio::test]
async fn a_sessions_page_loads_with_its_parts_and_speaks_to_its_own_session() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let Some(mut browser) = chromium(DOMAIN).await else {
        return;
    };
    for domain in ["localhost", DOMAIN] {
        let stage = Stage::start(&docker, domain, false, &[]).await;
        let own = stage.host("a");
        browser.open(&format!("http://{own}/page")).await;
        let loaded = run(&mut browser, "return globalThis.loaded").await;
        assert_eq!(loaded, true, "the page's part");
        let head = told(&mut browser, "return read('/here?x=1')").await;
        assert!(head.starts_with("200 GET /here?x=1 HTTP/1.1"), "{head}");
        let posted = told(
            &mut browser,
            "return read('/here', {method: 'POST', body: 'x'})",
        )
        .await;
        assert!(posted.starts_with("200 POST /here HTTP/1.1"), "{posted}");
        let dial = format!("return dial('ws://{own}/socket', 'chat')");
        let dialled = told(&mut browser, &dial).await;
        assert!(
            dialled.starts_with("opened chat GET /socket HTTP/1.1"),
            "{dialled}"
        );
    }
}

#[tokio::test]
async fn a_sessions_page_reaches_no_other_session_and_not_the_api() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let Some(mut browser) = chromium(DOMAIN).await else {
        return;
    };
    // Without tokens, where being on this host is all that it takes: the origin alone protects.
    for domain in ["localhost", DOMAIN] {
        let stage = Stage::start(&docker, domain, false, &[]).await;
        let (other, api) = (stage.host("b"), stage.conman.api_address());
        browser
            .open(&format!("http://{}/page", stage.host("a")))
            .await;
        for url in [
            format!("http://{other}/evil"),
            format!("http://{}/s/b/evil", stage.conman.sessions_address()),
            format!("http://{api}/v1/sessions"),
            format!("http://localhost:{}/v1/sessions", api.port()),
            format!("http://{api}/healthz"),
        ] {
            let fetched = told(&mut browser, &format!("return read('{url}')")).await;
            assert_eq!(fetched, "failed: TypeError", "{url}");
            let options = "{method: 'DELETE', headers: {'content-type': 'application/json'}}";
            let deleted = told(&mut browser, &format!("return read('{url}', {options})")).await;
            assert_eq!(deleted, "failed: TypeError", "{url}");
        }
        // What a page may send without asking first, though it never sees the answer.
        let simple = "{method: 'POST', mode: 'no-cors', body: '{}'}";
        for url in [
            format!("http://{other}/evil"),
            format!("http://{api}/v1/nodes/self/preempt"),
            format!("http://{api}/v1/sessions/a/token"),
        ] {
            told(&mut browser, &format!("return read('{url}', {simple})")).await;
            told(&mut browser, &format!("return post('{url}')")).await;
            let beacon = format!("return navigator.sendBeacon('{url}', '{{}}')");
            run(&mut browser, &beacon).await;
        }
        let exec = "v1/sessions/b/exec?request=%7B%22command%22%3A%5B%22true%22%5D%7D";
        for url in [
            format!("ws://{other}/evil"),
            format!("ws://{}/s/b/evil", stage.conman.sessions_address()),
            format!("ws://{api}/{exec}"),
        ] {
            let dial = format!("return dial('{url}', 'conman.exec.v1')");
            assert_eq!(told(&mut browser, &dial).await, "failed", "{url}");
        }
        for url in [
            format!("http://{}/evil", stage.host("a")),
            format!("http://{other}/evil"),
            format!("http://{api}/v1/sessions"),
        ] {
            let script = format!(
                "const told = await fetch('{url}').then(() => 'read', error => error.name); \
                 const socket = new WebSocket('{url}'.replace('http', 'ws')); \
                 return told + ' ' + await new Promise(done => {{ \
                     socket.onopen = () => done('opened'); socket.onerror = () => done('failed'); }})"
            );
            let sandboxed = told(&mut browser, &format!("return sandboxed(`{script}`)")).await;
            assert_eq!(sandboxed, "TypeError failed", "{url}");
        }
        if domain == "localhost" {
            // The browser tells who asks only where it trusts the host.
            for kind in ["img", "script"] {
                let load = format!("return load('{kind}', 'http://{other}/evil')");
                assert_eq!(told(&mut browser, &load).await, "failed", "{kind}");
            }
        }
        for id in ["a", "b"] {
            let asked = stage.asked_of(id).await;
            assert!(!asked.contains("evil"), "{asked}");
        }
        let admin = stage.conman.admin();
        for id in ["a", "b"] {
            let session: Session = admin.session(id).await;
            assert_eq!(session.state, SessionState::Running, "{id} on {domain}");
        }
    }
}

#[tokio::test]
async fn the_cookie_of_a_token_is_out_of_scripts_reach_and_sent_to_its_own_host_alone() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let Some(mut browser) = chromium(DOMAIN).await else {
        return;
    };
    for domain in ["localhost", DOMAIN] {
        let stage = Stage::start(&docker, domain, true, &[]).await;
        let (own, other) = (stage.host("a"), stage.host("b"));
        browser.open(&format!("http://{own}/page")).await;
        let refused = told(&mut browser, "return document.body.innerText").await;
        assert!(refused.contains("unauthenticated"), "{refused}");

        let token = stage.connect_token("a").await;
        browser
            .open(&format!("http://{own}/page?x=1&conman_token={token}"))
            .await;
        let place = told(&mut browser, "return location.href").await;
        assert_eq!(place, format!("http://{own}/page?x=1"));
        assert_eq!(run(&mut browser, "return globalThis.loaded").await, true);
        // The program's own cookie is there; conman's is not to be seen.
        assert_eq!(
            told(&mut browser, "return document.cookie").await,
            "own=program"
        );
        let head = told(&mut browser, "return read('/here')").await;
        assert!(head.starts_with("200 GET /here"), "{head}");
        assert!(
            head.contains("own=program") && !head.contains("conman_session"),
            "{head}"
        );
        let dialled = told(&mut browser, &format!("return dial('ws://{own}/socket')")).await;
        assert!(dialled.starts_with("opened"), "{dialled}");
        assert!(!dialled.contains("conman_session"), "{dialled}");

        let kept = browser.cookies(&format!("http://{own}/")).await;
        let ours = kept
            .iter()
            .find(|cookie| cookie["name"] == "conman_session");
        let ours = ours.expect("the cookie is kept");
        // A leading dot would mean every host below.
        assert_eq!(ours["domain"], format!("a.{domain}"));
        assert_eq!(
            (&ours["httpOnly"], &ours["sameSite"]),
            (&json!(true), &json!("Lax"))
        );
        let elsewhere = browser.cookies(&format!("http://{other}/")).await;
        assert!(elsewhere.is_empty(), "{elsewhere:?}");

        // The same user has the other session open, too: its page is no way into the first one.
        let token = stage.connect_token("b").await;
        browser
            .open(&format!("http://{other}/page?conman_token={token}"))
            .await;
        assert_eq!(run(&mut browser, "return globalThis.loaded").await, true);
        for options in [
            "{credentials: 'include'}",
            "{credentials: 'include', method: 'POST'}",
        ] {
            let fetch = format!("return read('http://{own}/evil', {options})");
            assert_eq!(
                told(&mut browser, &fetch).await,
                "failed: TypeError",
                "{options}"
            );
        }
        let dialled = told(&mut browser, &format!("return dial('ws://{own}/evil')")).await;
        assert_eq!(dialled, "failed");
        let posted = format!("return post('http://{own}/evil')");
        assert_eq!(told(&mut browser, &posted).await, "answered");
        // Nor does it lock the user out with a cookie for all hosts of the domain.
        let toss = format!("document.cookie = 'conman_session=x; domain={domain}; path=/here'");
        run(&mut browser, &toss).await;
        browser.open(&format!("http://{own}/here")).await;
        let head = told(&mut browser, "return document.body.innerText").await;
        assert!(head.starts_with("GET /here"), "{head}");
        assert!(!head.contains("conman_session"), "{head}");
        let asked = stage.asked_of("a").await;
        assert!(!asked.contains("evil"), "{asked}");
    }
}

#[tokio::test]
async fn a_page_opens_a_websocket_with_a_token_among_the_subprotocols() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let Some(mut browser) = chromium(DOMAIN).await else {
        return;
    };
    let frontend = Frontend::start().await;
    let stage = Stage::start(&docker, "localhost", true, &[&frontend.origin()]).await;
    let url = format!("ws://{}/socket", stage.host("a"));
    let token = format!("conman.token.{}", stage.connect_token("a").await);
    browser.open(&frontend.origin()).await;
    for (offered, selected) in [
        (format!("'{token}', 'chat'"), "chat"),
        (format!("'{token}'"), token.as_str()),
    ] {
        let dialled = told(&mut browser, &format!("return dial('{url}', {offered})")).await;
        let opened = format!("opened {selected} GET /socket");
        assert!(dialled.starts_with(&opened), "{dialled}");
        let (_, head) = dialled.split_once("GET ").expect("a head");
        assert!(!head.contains("conman.token"), "{head}");
    }
    assert_eq!(
        told(&mut browser, &format!("return dial('{url}', 'chat')")).await,
        "failed"
    );
}

#[tokio::test]
async fn a_page_of_an_allowed_origin_uses_the_api_with_its_token_and_others_do_not() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let Some(mut browser) = chromium(DOMAIN).await else {
        return;
    };
    let (allowed, other) = (Frontend::start().await, Frontend::start().await);
    let stage = Stage::start(&docker, "localhost", true, &[&allowed.origin()]).await;
    let api = format!("http://{}/v1", stage.conman.api_address());
    let token = stage.conman.token("frontend").to_owned();
    let call = |method: &str, path: &str, token: &str, body: &str| {
        let headers =
            format!("{{authorization: 'Bearer {token}', 'content-type': 'application/json'}}");
        let body = if body.is_empty() {
            String::new()
        } else {
            format!(", body: '{body}'")
        };
        format!("return read('{api}{path}', {{method: '{method}', headers: {headers}{body}}})")
    };

    browser.open(&allowed.origin()).await;
    let list = told(&mut browser, &call("GET", "/sessions", &token, "")).await;
    assert!(list.starts_with("200 ") && list.contains("\"a\""), "{list}");
    let body = r#"{"template": "tiny"}"#;
    let made = told(&mut browser, &call("PUT", "/sessions/made", &token, body)).await;
    assert!(
        made.starts_with("200 ") && made.contains("running"),
        "{made}"
    );
    let body = r#"{"command": ["echo", "from a page"]}"#;
    let run_there = told(
        &mut browser,
        &call("POST", "/sessions/made/exec", &token, body),
    )
    .await;
    assert!(
        run_there.starts_with("200 ") && run_there.contains("from a page"),
        "{run_there}"
    );
    let ended = told(&mut browser, &call("DELETE", "/sessions/made", &token, "")).await;
    assert!(ended.starts_with("200 "), "{ended}");
    // Refusals can be read as well: a page must tell its user what is wrong.
    let refused = told(&mut browser, &call("GET", "/sessions", "wrong", "")).await;
    assert!(
        refused.starts_with("401 ") && refused.contains("unauthenticated"),
        "{refused}"
    );
    let refused = told(
        &mut browser,
        &call("POST", "/nodes/self/preempt", &token, "{}"),
    )
    .await;
    assert!(
        refused.starts_with("403 ") && refused.contains("forbidden"),
        "{refused}"
    );
    let anonymous = told(&mut browser, &format!("return read('{api}/sessions')")).await;
    assert!(anonymous.starts_with("401 "), "{anonymous}");
    let exposed = format!(
        "const answer = await fetch('{api}/sessions', {{headers: {{authorization: 'Bearer {token}'}}}}); \
         return answer.headers.get('x-request-id')"
    );
    assert!(!told(&mut browser, &exposed).await.is_empty());
    // The stream of events, resumed after the first one.
    let stream = format!(
        "const answer = await fetch('{api}/events', {{headers: \
             {{authorization: 'Bearer {token}', 'last-event-id': '1'}}}}); \
         const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader(); \
         let text = ''; \
         while (!/data:.*\\n\\n/.test(text)) text += (await reader.read()).value; \
         await reader.cancel(); \
         return text"
    );
    let events = told(&mut browser, &stream).await;
    // Where it begins is told first, without an event.
    assert!(
        events.contains("\"seq\":2,") && !events.contains("\"seq\":1,"),
        "{events}"
    );

    browser.open(&other.origin()).await;
    for (method, path) in [
        ("GET", "/sessions"),
        ("DELETE", "/sessions/a"),
        ("GET", "/events"),
    ] {
        let fetched = told(&mut browser, &call(method, path, &token, "")).await;
        assert_eq!(fetched, "failed: TypeError", "{method} {path}");
    }
    // What needs no preflight cannot be read either, not even that it is refused.
    for path in ["/sessions", "/openapi.json", "/no-such-route"] {
        let fetched = told(&mut browser, &format!("return read('{api}{path}')")).await;
        assert_eq!(fetched, "failed: TypeError", "{path}");
    }
    let session: Session = stage.conman.admin().session("a").await;
    assert_eq!(session.state, SessionState::Running);
}

/// As the demo starts it.
const CONSOLE: &str = r#"
[templates.console]
image = "conman-test:python"
command = ["websocketd", "--port=8080", "--staticdir=/srv", "--passenv=CONMAN_SESSION_ID,CONMAN_GENERATION,PATH", "/srv/console.sh"]
port = 8080
"#;

#[tokio::test]
async fn the_demos_console_is_a_shell_in_the_browser() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let Some(mut browser) = chromium(DOMAIN).await else {
        return;
    };
    let conman = Conman::builder()
        .toml(CONSOLE)
        .set("listen", "browser_paths = true")
        .start(&docker)
        .await;
    let request = json!({"template": "console"});
    conman.api().ensure("console", &request).await;
    let sessions = conman.sessions_address();
    for url in [
        format!("http://{sessions}/s/console/"),
        format!("http://console.localhost:{}/", sessions.port()),
    ] {
        browser.open(&url).await;
        // The page is left to itself; its text is what a user sees.
        let shown = |words: &str| {
            format!(
                "const screen = document.getElementById('screen'); \
                 const seen = () => screen.innerText.includes('{words}'); \
                 if (!seen()) await new Promise(done => new MutationObserver(() => seen() && done()) \
                     .observe(screen, {{childList: true, subtree: true}})); \
                 return screen.innerText"
            )
        };
        let greeting = told(&mut browser, &shown("conman session console")).await;
        assert!(greeting.contains("generation 1"), "{greeting}");
        let typed = "const line = document.getElementById('line'); \
                     line.value = 'echo $((40+2)); false'; \
                     line.dispatchEvent(new Event('change'))";
        browser.evaluate(typed).await;
        let screen = told(&mut browser, &shown("[exit 1]")).await;
        assert!(screen.contains("\n42\n[exit 1]"), "{screen}");
    }
}
