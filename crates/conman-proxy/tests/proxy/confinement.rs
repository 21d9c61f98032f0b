//! What keeps sessions apart that one browser uses.

use conman_proxy::ProxyOptions;

use crate::support::{Fixture, RawBackend, body, serve_echo_head, status};

/// What a hostile program answers with.
const REACHING: &str = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\
    Set-Cookie: own=1; Domain=localhost; Path=/; HttpOnly\r\n\
    Set-Cookie: conman_session=forged; Path=/\r\n\
    Set-Cookie: =conman_session=forged\r\n\
    Service-Worker-Allowed: /\r\n\
    Clear-Site-Data: \"*\"\r\n\
    Strict-Transport-Security: max-age=99999999; includeSubDomains\r\n\
    Alt-Svc: h3=\"evil.example:443\"\r\n\
    X-Accel-Redirect: /s/bob/\r\nX-Accel-Buffering: no\r\nX-Sendfile: /etc/shadow\r\n\
    NEL: {}\r\nReport-To: {}\r\n\
    X-Kept: yes\r\n\r\n";

/// What of [`REACHING`] a client gets, in lower case.
async fn answered(fixture: &Fixture, target: &str, host: &str) -> String {
    let mut backend = RawBackend::new().await;
    fixture.session("alice", backend.address);
    let mut client = fixture.connect().await;
    client
        .send(format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n"))
        .await;
    let mut session = backend.accept().await;
    session.read_head().await;
    session.send(REACHING).await;
    let head = client.read_head().await;
    assert_eq!(status(&head), "200", "{head}");
    head.to_ascii_lowercase()
}

#[tokio::test]
async fn on_its_own_host_a_session_reaches_no_other_host() {
    let head = answered(&Fixture::new(), "/", "alice.localhost").await;
    assert!(head.contains("\r\nset-cookie: own=1; path=/; httponly\r\n"));
    assert_eq!(head.matches("set-cookie").count(), 1, "{head}");
    assert!(!head.contains("clear-site-data"), "{head}");
    assert!(
        !head.contains("x-accel") && !head.contains("x-sendfile"),
        "{head}"
    );
    for kept in ["service-worker-allowed", "alt-svc", "x-kept"] {
        assert!(head.contains(kept), "{head}");
    }
}

#[tokio::test]
async fn an_order_to_the_server_in_front_stays_if_the_operator_trusts_it() {
    let fixture = Fixture::with_options(ProxyOptions {
        trusted_headers: vec!["x-accel-buffering".parse().expect("a name")],
        ..ProxyOptions::default()
    });
    let head = answered(&fixture, "/", "alice.localhost").await;
    assert!(head.contains("\r\nx-accel-buffering: no\r\n"), "{head}");
    assert!(
        !head.contains("x-accel-redirect") && !head.contains("x-sendfile"),
        "{head}"
    );
}

#[tokio::test]
async fn by_its_path_a_session_reaches_no_other_path() {
    let head = answered(&Fixture::new(), "/s/alice/x", "localhost").await;
    assert!(head.contains("\r\nset-cookie: own=1; path=/s/alice/; httponly\r\n"));
    assert_eq!(head.matches("set-cookie").count(), 1, "{head}");
    for removed in [
        "service-worker-allowed",
        "clear-site-data",
        "strict-transport-security",
        "alt-svc",
        "nel",
        "report-to",
    ] {
        assert!(!head.contains(&format!("\r\n{removed}:")), "{head}");
    }
    assert!(head.contains("x-kept: yes"), "{head}");
}

#[tokio::test]
async fn cookies_of_an_upgrades_answer_are_confined_too() {
    let fixture = Fixture::new();
    let mut backend = RawBackend::new().await;
    fixture.session("alice", backend.address);
    let mut client = fixture.connect().await;
    client
        .send(
            "GET /s/alice/ HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n\
             Upgrade: raw\r\n\r\n",
        )
        .await;
    let mut session = backend.accept().await;
    session.read_head().await;
    session
        .send(
            "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: raw\r\n\
             Set-Cookie: own=1; Domain=localhost; Path=/\r\n\r\n",
        )
        .await;
    let head = client.read_head().await;
    assert_eq!(status(&head), "101", "{head}");
    assert!(
        head.contains("\r\nSet-Cookie: own=1; Path=/s/alice/\r\n"),
        "{head}"
    );
}

#[tokio::test]
async fn a_trusted_proxys_prefix_belongs_to_the_path_of_a_cookie() {
    let fixture = Fixture::with_options(ProxyOptions {
        trust_forwarded: true,
        ..ProxyOptions::default()
    });
    let mut backend = RawBackend::new().await;
    fixture.session("alice", backend.address);
    let mut client = fixture.connect().await;
    client
        .send("GET /s/alice/ HTTP/1.1\r\nHost: localhost\r\nX-Forwarded-Prefix: /tools\r\n\r\n")
        .await;
    let mut session = backend.accept().await;
    session.read_head().await;
    session.send(REACHING).await;
    let head = client.read_head().await;
    assert!(head.contains("Path=/tools/s/alice/"), "{head}");
}

/// What a browser sends, or what would have come of one.
const BROWSERS: [&str; 5] = [
    "Origin: http://localhost:7701",
    "Sec-Fetch-Site: same-origin",
    "Sec-Fetch-Mode: navigate",
    "Upgrade-Insecure-Requests: 1",
    "Cookie: own=1; conman_session=x",
];

fn request(target: &str, host: &str, fields: &str) -> String {
    format!("GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{fields}\r\n\r\n")
}

#[tokio::test]
async fn a_browser_gets_a_session_by_its_own_host_and_not_by_its_path() {
    let fixture = Fixture::new();
    let alice = fixture.session("alice", serve_echo_head().await);
    for fields in BROWSERS {
        let by_path = request("/s/alice/", "localhost:7701", fields);
        let answer = fixture.exchange(by_path).await;
        assert_eq!(status(&answer), "403", "{fields}: {answer}");
        let problem = body(&answer);
        assert!(problem.contains("problem:browser-path"), "{problem}");
        assert!(problem.contains("alice.localhost:7701"), "{problem}");
    }
    assert_eq!(alice.connections(), 0);
    for fields in BROWSERS {
        let by_host = request("/", "alice.localhost:7701", fields);
        let answer = fixture.exchange(by_host).await;
        assert_eq!(status(&answer), "200", "{fields}: {answer}");
    }
    let program = request("/s/alice/", "localhost", "Cookie: own=1");
    assert_eq!(status(&fixture.exchange(program).await), "200");
}

#[tokio::test]
async fn a_browser_gets_a_session_by_its_path_where_that_is_wanted() {
    let fixture = Fixture::with_options(ProxyOptions {
        browser_paths: true,
        ..ProxyOptions::default()
    });
    fixture.session("alice", serve_echo_head().await);
    for fields in BROWSERS {
        let answer = fixture
            .exchange(request("/s/alice/", "localhost", fields))
            .await;
        assert_eq!(status(&answer), "200", "{fields}: {answer}");
    }
}
