//! Ordinary requests through the sessions listener: where they go, what a program is told with
//! them, what comes back of its answer, and what is said instead of one.

use std::net::SocketAddr;
use std::process::Stdio;
use std::time::Duration;

use conman_e2e::{
    Api, Conman, ECHO_TEMPLATE, PYTHON, RawClient, docker_shared, eventually, raw_exchange,
};
use http::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::process::Command;

const PATIENCE: Duration = Duration::from_secs(60);

/// Answers each request with the bytes that it was sent as a body, whatever they are, and closes.
const PARROT: &str = r"
import socketserver

class Parrot(socketserver.StreamRequestHandler):
    def handle(self):
        length = 0
        while (line := self.rfile.readline()).strip():
            name, _, value = line.partition(b':')
            if name.lower() == b'content-length':
                length = int(value)
        self.wfile.write(self.rfile.read(length))

class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True

Server(('127.0.0.1', 8080), Parrot).serve_forever()
";

fn program(text: &str) -> Value {
    json!({"image": PYTHON, "command": ["python3", "-c", text], "port": 8080})
}

/// What curl printed, and whether it was content.
async fn curl(arguments: &[&str]) -> (String, Option<i32>) {
    let output = Command::new("curl")
        .args(["--silent", "--show-error", "--max-time", "60"])
        .args(arguments)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .expect("curl can be run");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    (text, output.status.code())
}

/// The values of a field in a head, in their order.
fn values<'head>(head: &'head str, name: &str) -> Vec<&'head str> {
    head.lines()
        .filter_map(|line| line.split_once(':'))
        .filter(|(field, _)| field.eq_ignore_ascii_case(name))
        .map(|(_, value)| value.trim())
        .collect()
}

/// What the program was sent, where it echoes heads.
async fn echoed(address: SocketAddr, request: &str) -> String {
    let answer = raw_exchange(address, request).await;
    let (head, body) = answer.split_once("\r\n\r\n").expect("an answer");
    assert!(head.starts_with("HTTP/1.1 200 "), "{answer}");
    body.to_owned()
}

#[tokio::test]
async fn a_path_or_a_host_leads_to_the_program_which_never_sees_the_prefix() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::builder().toml(ECHO_TEMPLATE).start(&docker).await;
    let api = conman.api();
    let files = "mkdir /tmp/www && cd /tmp/www && echo of-the-file > note.txt && \
                 exec python3 -m http.server 8080";
    let request = json!({"template": "python", "command": ["sh", "-c", files]});
    api.ensure("files", &request).await;
    let echo = api.ensure("echo", &json!({"template": "echo"})).await;
    let port = conman.sessions_address().port();

    let (body, code) = curl(&[&format!("http://127.0.0.1:{port}/s/files/note.txt?x=1&y")]).await;
    assert_eq!((body.as_str(), code), ("of-the-file\n", Some(0)));
    let (body, code) = curl(&[&format!("http://files.localhost:{port}/note.txt")]).await;
    assert_eq!((body.as_str(), code), ("of-the-file\n", Some(0)));
    // The program's own 404 is no problem of conman's.
    let (answer, _) = curl(&["--include", &format!("http://files.localhost:{port}/none")]).await;
    assert!(
        answer.starts_with("HTTP/1.1 404 File not found"),
        "{answer}"
    );
    assert!(
        values(&answer, "server")[0].contains("SimpleHTTP"),
        "{answer}"
    );
    // Without its slash a page's relative links would miss the session.
    let bare = format!("http://127.0.0.1:{port}/s/files?q");
    let (answer, _) = curl(&["--include", &bare]).await;
    assert!(answer.starts_with("HTTP/1.1 308 "), "{answer}");
    assert_eq!(values(&answer, "location"), ["/s/files/?q"]);
    let (answer, code) = curl(&["--location", &bare]).await;
    assert!(code == Some(0) && answer.contains("note.txt"), "{answer}");

    let target = "/deep//er/../%2e%2e/x%2Fy;z?a=/s/b/&b=%20?c";
    let by_path = format!("http://127.0.0.1:{port}/s/echo{target}");
    let (head, code) = curl(&["--path-as-is", &by_path]).await;
    assert_eq!(code, Some(0), "{head}");
    assert!(
        head.starts_with(&format!("GET {target} HTTP/1.1\r\n")),
        "{head}"
    );
    assert_eq!(values(&head, "x-forwarded-prefix"), ["/s/echo"]);
    assert_eq!(values(&head, "x-forwarded-for"), ["127.0.0.1"]);
    assert_eq!(values(&head, "x-forwarded-proto"), ["http"]);
    let host = format!("127.0.0.1:{port}");
    assert_eq!(values(&head, "x-forwarded-host"), [host.as_str()]);
    assert_eq!(values(&head, "host"), [host.as_str()]);
    assert_eq!(values(&head, "x-conman-session"), ["echo"]);
    let generation = echo.session.generation.to_string();
    assert_eq!(values(&head, "x-conman-generation"), [generation.as_str()]);

    let by_host = format!("http://echo.localhost:{port}{target}");
    let (head, code) = curl(&["--path-as-is", &by_host]).await;
    assert_eq!(code, Some(0), "{head}");
    assert!(
        head.starts_with(&format!("GET {target} HTTP/1.1\r\n")),
        "{head}"
    );
    assert!(values(&head, "x-forwarded-prefix").is_empty(), "{head}");
    let host = format!("echo.localhost:{port}");
    assert_eq!(values(&head, "x-forwarded-host"), [host.as_str()]);

    // The next generation says so, on whatever connection.
    api.stop("echo").await;
    let next = api.ensure("echo", &json!({"template": "echo"})).await;
    let (head, _) = curl(&[&by_path]).await;
    let generation = next.session.generation.to_string();
    assert_ne!(next.session.generation, echo.session.generation);
    assert_eq!(values(&head, "x-conman-generation"), [generation.as_str()]);
}

/// Fields that a client may not hand to a program, or not in its own words.
const FORGED: &str = "Connection: close, X-Hop , x-other, Host, X-Forwarded-For\r\n\
    X-Hop: 1\r\nX-Other: 2\r\nKeep-Alive: timeout=5\r\nProxy-Connection: keep-alive\r\n\
    Proxy-Authorization: Basic eA==\r\nTE: trailers, deflate\r\nUpgrade: h2c\r\n\
    HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\
    X-Conman-Generation: 999999\r\nX_Conman_Generation: 999998\r\nX-Conman-Session: other\r\n\
    X-Conman-Token: abc\r\nX-Forwarded-For: 6.6.6.6\r\nX_Forwarded_For: 6.6.6.7\r\n\
    X-Forwarded-Host: evil.test\r\nX-Forwarded-Proto: https\r\nX-Forwarded-Prefix: /outer\r\n\
    X-Real-IP: 6.6.6.8\r\nForwarded: for=6.6.6.9\r\n\
    Accept: text/x-own\r\nCookie: a=b\r\nX-Own: one\r\nX-Own: two\r\n";

#[tokio::test]
async fn fields_of_the_hop_and_forged_ones_never_reach_the_program() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::builder().toml(ECHO_TEMPLATE).start(&docker).await;
    let echo = conman
        .api()
        .ensure("echo", &json!({"template": "echo"}))
        .await;
    let generation = echo.session.generation.to_string();
    let request = format!("GET /s/echo/x HTTP/1.1\r\nHost: localhost\r\n{FORGED}\r\n");
    let head = echoed(conman.sessions_address(), &request).await;
    for gone in [
        "x-hop",
        "x-other",
        "keep-alive",
        "proxy-connection",
        "proxy-authorization",
        "upgrade",
        "http2-settings",
        "x_conman_generation",
        "x-conman-token",
        "x_forwarded_for",
        "x-real-ip",
        "forwarded",
    ] {
        assert!(values(&head, gone).is_empty(), "{gone}: {head}");
    }
    for (name, only) in [
        ("host", "localhost"),
        ("te", "trailers"),
        ("connection", "te"),
        ("x-conman-generation", &generation),
        ("x-conman-session", "echo"),
        ("x-forwarded-for", "127.0.0.1"),
        ("x-forwarded-host", "localhost"),
        ("x-forwarded-proto", "http"),
        ("x-forwarded-prefix", "/s/echo"),
        ("accept", "text/x-own"),
        ("cookie", "a=b"),
    ] {
        assert_eq!(values(&head, name), [only], "{name}: {head}");
    }
    assert_eq!(values(&head, "x-own"), ["one", "two"]);
}

#[tokio::test]
async fn behind_a_proxy_of_ones_own_what_it_says_of_the_client_is_believed_and_extended() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::builder()
        .set("listen", "trust_forwarded = true")
        .toml(ECHO_TEMPLATE)
        .start(&docker)
        .await;
    conman
        .api()
        .ensure("echo", &json!({"template": "echo"}))
        .await;
    let request = "GET /s/echo/x HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
        X-Forwarded-For: 10.0.0.1, 10.0.0.2\r\nX-Forwarded-Host: public.test\r\n\
        X-Forwarded-Proto: https\r\nX-Forwarded-Prefix: /outer\r\nX-Real-IP: 10.0.0.1\r\n\
        X-Conman-Generation: 999999\r\nX_Forwarded_For: 6.6.6.7\r\n\r\n";
    let head = echoed(conman.sessions_address(), request).await;
    for (name, only) in [
        ("x-forwarded-for", "10.0.0.1, 10.0.0.2, 127.0.0.1"),
        ("x-forwarded-host", "public.test"),
        ("x-forwarded-proto", "https"),
        ("x-forwarded-prefix", "/outer/s/echo"),
        ("x-real-ip", "10.0.0.1"),
    ] {
        assert_eq!(values(&head, name), [only], "{name}: {head}");
    }
    assert!(values(&head, "x_forwarded_for").is_empty(), "{head}");
    assert_ne!(values(&head, "x-conman-generation"), ["999999"]);
}

/// What comes back when a program answers like this.
async fn answered_with(address: SocketAddr, method: &str, answer: &str) -> String {
    let request = format!(
        "{method} /s/parrot/ HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
         Content-Length: {}\r\n\r\n{answer}",
        answer.len()
    );
    raw_exchange(address, request).await
}

#[tokio::test]
async fn of_an_answer_everything_comes_back_but_what_concerns_the_hop_or_speaks_for_conman() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    conman.api().ensure("parrot", &program(PARROT)).await;
    let address = conman.sessions_address();
    let answer = "HTTP/1.1 299 Of My Own\r\nConnection: X-Hop, close\r\nX-Hop: 1\r\n\
        Keep-Alive: timeout=9\r\nProxy-Authenticate: Basic\r\nX-Conman-Generation: 999999\r\n\
        Set-Cookie: a=1\r\nSet-Cookie: b=2\r\nX-Own: yes\r\nContent-Length: 5\r\n\r\nhello";
    let seen = answered_with(address, "POST", answer).await;
    assert!(seen.starts_with("HTTP/1.1 299 Of My Own\r\n"), "{seen}");
    assert!(seen.ends_with("\r\n\r\nhello"), "{seen}");
    for gone in [
        "x-hop",
        "keep-alive",
        "proxy-authenticate",
        "x-conman-generation",
    ] {
        assert!(values(&seen, gone).is_empty(), "{gone}: {seen}");
    }
    assert_eq!(values(&seen, "set-cookie"), ["a=1", "b=2"]);
    assert_eq!(values(&seen, "x-own"), ["yes"]);
    assert_eq!(values(&seen, "content-length"), ["5"]);

    // Chunked and close-delimited answers, and one to HEAD, arrive with their whole content.
    let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\
        3;x=y\r\nabc\r\n4\r\ndefg\r\n0\r\nX-Sum: 7\r\n\r\n";
    let seen = answered_with(address, "POST", chunked).await;
    assert_eq!(values(&seen, "transfer-encoding"), ["chunked"], "{seen}");
    assert!(seen.contains("abc") && seen.contains("defg"), "{seen}");
    assert!(
        seen.ends_with("\r\n\r\n") && seen.contains("\r\n0\r\n"),
        "{seen}"
    );
    let seen = answered_with(address, "POST", "HTTP/1.0 200 OK\r\n\r\nto the end").await;
    assert!(seen.starts_with("HTTP/1.1 200 OK\r\n"), "{seen}");
    assert!(seen.contains("to the end"), "{seen}");
    let seen = answered_with(
        address,
        "HEAD",
        "HTTP/1.1 200 OK\r\nContent-Length: 77\r\n\r\n",
    )
    .await;
    assert_eq!(values(&seen, "content-length"), ["77"], "{seen}");
    assert!(seen.ends_with("\r\n\r\n"), "{seen}");
}

#[tokio::test]
async fn an_answer_that_is_none_is_a_bad_gateway_and_one_that_is_cut_never_looks_whole() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    conman.api().ensure("parrot", &program(PARROT)).await;
    let address = conman.sessions_address();
    for (answer, slug) in [
        ("", "no-answer"),
        ("HTTP/1.1 200", "no-answer"),
        ("SSH-2.0-OpenSSH_9.2\r\n\r\n", "bad-answer"),
        ("HTTP/1.1 200 OK\r\nno colon\r\n\r\n", "bad-answer"),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
            "bad-answer",
        ),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
            "bad-answer",
        ),
        (
            "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n",
            "bad-answer",
        ),
    ] {
        let seen = answered_with(address, "POST", answer).await;
        assert!(seen.starts_with("HTTP/1.1 502 "), "{answer:?}: {seen}");
        let kind = format!("urn:conman:problem:{slug}");
        assert_eq!(values(&seen, "content-type"), ["application/problem+json"]);
        assert!(seen.contains(&kind), "{answer:?}: {seen}");
        assert_eq!(seen.matches("HTTP/1.1 ").count(), 1, "{answer:?}: {seen}");
    }
    let long = format!("HTTP/1.1 200 OK\r\nX-Long: {}\r\n\r\n", "x".repeat(200_000));
    let seen = answered_with(address, "POST", &long).await;
    assert!(
        seen.starts_with("HTTP/1.1 502 ") && seen.contains("bad-answer"),
        "{seen}"
    );

    let port = address.port();
    let url = format!("http://127.0.0.1:{port}/s/parrot/");
    for cut in [
        "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nhalf",
    ] {
        let (_, code) = curl(&["--data-binary", cut, &url]).await;
        assert!(
            matches!(code, Some(18 | 52 | 56)),
            "{cut:?} looked whole: {code:?}"
        );
    }
    // It was the answers' fault alone.
    let whole = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwhole";
    let (body, code) = curl(&["--data-binary", whole, &url]).await;
    assert_eq!((body.as_str(), code), ("whole", Some(0)));
}

/// A problem of the sessions listener.
async fn problem_at(sessions: &Api, path: &str) -> (u16, String) {
    let problem = sessions.get(path).await.problem();
    assert!(!problem.detail.is_empty() && !problem.title.is_empty());
    (problem.status, problem.slug().to_owned())
}

/// Serves once, and is then deaf on its port; `/s/{id}/` is its last answer.
const DEAF: &str = r"
import socket, time
listener = socket.create_server(('127.0.0.1', 8080))
while True:
    connection, _ = listener.accept()
    head = connection.recv(65536)
    if not head:
        continue
    listener.close()
    connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\nlast')
    connection.close()
    time.sleep(1000000)
";

#[tokio::test]
async fn what_cannot_be_served_is_told_as_a_problem_that_says_why() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let (api, sessions) = (conman.api(), conman.sessions());
    let known = |status: u16, slug: &str| (status, slug.to_owned());

    let nobody = known(404, "no-such-session");
    assert_eq!(problem_at(&sessions, "/s/nobody/").await, nobody);
    assert_eq!(problem_at(&sessions, "/s/nobody/x?y").await, nobody);
    api.ensure("portless", &json!({"template": "tiny"})).await;
    assert_eq!(
        problem_at(&sessions, "/s/portless/").await,
        known(409, "no-port")
    );

    api.ensure("deaf", &program(DEAF)).await;
    let last = sessions.get("/s/deaf/").await;
    assert_eq!(
        (last.status, last.text().as_str()),
        (StatusCode::OK, "last")
    );
    let refused = known(502, "connection-refused");
    assert_eq!(problem_at(&sessions, "/s/deaf/").await, refused);

    // Without a template that allows it, a connection starts nothing.
    api.stop("deaf").await;
    assert_eq!(
        problem_at(&sessions, "/s/deaf/").await,
        known(409, "session-ended")
    );

    let unknown = known(404, "unknown-address");
    for path in [
        "/",
        "/s",
        "/s/",
        "/s//",
        "/S/deaf/",
        "//s/deaf/",
        "/s/DEAF/",
        "/s/-/",
        "/s/a_b/",
        "/s/%64eaf/",
        "/s/deaf%2f/",
        "/s/../deaf/",
        "/s/.../",
        "/v1/sessions",
        "/healthz",
        "/metrics",
    ] {
        assert_eq!(problem_at(&sessions, path).await, unknown, "{path}");
    }
    let long = format!("/s/{}/", "a".repeat(64));
    assert_eq!(problem_at(&sessions, &long).await, unknown);
}

#[tokio::test]
async fn hosts_that_name_no_session_are_refused_whatever_the_path_says() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::builder().toml(ECHO_TEMPLATE).start(&docker).await;
    conman
        .api()
        .ensure("echo", &json!({"template": "echo"}))
        .await;
    let address = conman.sessions_address();
    let ask = async |host: &str| {
        let request =
            format!("GET /s/echo/x HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        raw_exchange(address, request).await
    };
    for (host, status) in [
        ("nobody.localhost", "404"),
        ("a.echo.localhost", "404"),
        (".localhost", "404"),
        ("e_o.localhost", "404"),
        ("user@echo.localhost", "400"),
        ("echo.localhost:80:80", "400"),
        ("echo.localhost:http", "400"),
        ("%65cho.localhost", "400"),
        ("echo/.localhost", "400"),
        ("echo localhost", "400"),
    ] {
        let answer = ask(host).await;
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status} ")),
            "{host}: {answer}"
        );
        assert_eq!(
            values(&answer, "content-type"),
            ["application/problem+json"],
            "{host}"
        );
    }
    // A page whose own name was made to resolve to this machine is no page of a session.
    let rebound = ask("evil.test").await;
    assert!(!rebound.starts_with("HTTP/1.1 2"), "{rebound}");
    // Hosts are compared without regard to case, and a session's host takes no part of the path.
    let answer = ask("ECHO.LocalHost").await;
    assert!(answer.contains("GET /s/echo/x HTTP/1.1\r\n"), "{answer}");
    // None, two, and one that contradicts the target.
    for (fields, target, status) in [
        ("", "/s/echo/", "400"),
        ("Host: localhost\r\nHost: localhost\r\n", "/s/echo/", "400"),
        (
            "Host: echo.localhost\r\nhost: other.localhost\r\n",
            "/",
            "400",
        ),
        (
            "Host: echo.localhost\r\n",
            "http://nobody.localhost/",
            "404",
        ),
        (
            "Host: nobody.localhost\r\n",
            "http://echo.localhost/",
            "200",
        ),
        ("Host: echo.localhost\r\n", "ftp://echo.localhost/", "400"),
        ("Host: echo.localhost\r\n", "*", "400"),
    ] {
        let request = format!("GET {target} HTTP/1.1\r\n{fields}Connection: close\r\n\r\n");
        let answer = raw_exchange(address, request).await;
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status} ")),
            "{target} {fields:?}: {answer}"
        );
    }
    // CONNECT would make a forward proxy of it.
    let connect = "CONNECT echo.localhost:80 HTTP/1.1\r\nHost: echo.localhost:80\r\n\r\n";
    let answer = raw_exchange(address, connect).await;
    assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
}

#[tokio::test]
async fn requests_of_one_connection_go_each_to_its_own_session_in_their_order() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::builder().toml(ECHO_TEMPLATE).start(&docker).await;
    for id in ["a", "b"] {
        conman.api().ensure(id, &json!({"template": "echo"})).await;
    }
    let mut client = RawClient::connect(conman.sessions_address()).await;
    let mut pipelined = String::new();
    for number in 0..20 {
        let id = ["a", "b"][number % 2];
        pipelined += &format!("GET /s/{id}/{number} HTTP/1.1\r\nHost: localhost\r\n\r\n");
    }
    client.send(&pipelined).await;
    for number in 0..20 {
        let id = ["a", "b"][number % 2];
        let answered = client.read_until("\r\n\r\n").await;
        assert!(answered.starts_with("HTTP/1.1 200 "), "{answered}");
        let told = client.read_until("\r\n\r\n").await;
        assert!(
            told.starts_with(&format!("GET /{number} HTTP/1.1\r\n")),
            "{told}"
        );
        assert_eq!(values(&told, "x-conman-session"), [id]);
    }
    drop(client);
    eventually("nothing is open to the sessions", PATIENCE, async || {
        conman.api().session("a").await.connections == 0
    })
    .await;
    let answer = conman.sessions().send(Method::GET, "/s/a/", None).await;
    assert_eq!(answer.status, StatusCode::OK);
}
