//! How a request names its session.

use conman_proto::Problem;
use conman_proxy::{ProxyOptions, Readiness, Verdict};
use http::HeaderValue;

use crate::support::{Fixture, body, serve_echo_head, status};

#[tokio::test]
async fn a_session_is_reached_by_host_name_and_by_path_with_its_target_untouched() {
    let fixture = Fixture::new();
    fixture.session("alice", serve_echo_head().await);
    let target = "//a/../%2e%2E/s/bob/?q=%2F&&x#";
    let by_host = fixture.get(target, "Alice.localhost:7701").await;
    assert!(
        body(&by_host).starts_with("GET //a/../%2e%2E/s/bob/?q=%2F&&x HTTP/1.1\r\n"),
        "{by_host}"
    );
    assert!(!body(&by_host).contains("x-forwarded-prefix"), "{by_host}");
    let by_path = fixture
        .get(&format!("/s/alice{target}"), "127.0.0.1:7701")
        .await;
    assert!(
        body(&by_path).starts_with("GET //a/../%2e%2E/s/bob/?q=%2F&&x HTTP/1.1\r\n"),
        "{by_path}"
    );
    assert!(
        body(&by_path).contains("x-forwarded-prefix: /s/alice\r\n"),
        "{by_path}"
    );
}

#[tokio::test]
async fn the_absolute_form_counts_more_than_the_host_field() {
    let fixture = Fixture::new();
    fixture.session("alice", serve_echo_head().await);
    let response = fixture
        .get("http://alice.localhost:80/x?y", "bob.localhost")
        .await;
    assert!(
        body(&response).starts_with("GET /x?y HTTP/1.1\r\n"),
        "{response}"
    );
    assert!(
        body(&response).contains("\r\nhost: alice.localhost:80\r\n"),
        "{response}"
    );
    assert!(
        body(&response).contains("\r\nx-forwarded-host: alice.localhost:80\r\n"),
        "{response}"
    );
}

#[tokio::test]
async fn the_missing_slash_is_added_by_a_redirect() {
    let fixture = Fixture::new();
    let response = fixture.get("/s/alice?a=b", "127.0.0.1").await;
    assert_eq!(status(&response), "308");
    assert!(
        response.contains("\r\nlocation: /s/alice/?a=b\r\n"),
        "{response}"
    );
}

#[tokio::test]
async fn what_names_no_session_is_answered_with_a_problem() {
    let fixture = Fixture::new();
    fixture.session("alice", serve_echo_head().await);
    for (target, host, expected) in [
        ("/", "localhost", "404"),
        ("/%73/alice/", "localhost", "404"),
        ("/s/al%69ce/", "localhost", "404"),
        ("/s/alice%2f/", "localhost", "404"),
        ("/", "a.b.localhost", "404"),
        ("/s/alice/", "x.y.localhost", "404"),
        ("*", "alice.localhost", "400"),
        ("ftp://alice.localhost/", "alice.localhost", "400"),
        ("/", "user@alice.localhost", "400"),
        ("/", "alice.localhost:http", "400"),
    ] {
        let response = fixture.get(target, host).await;
        assert_eq!(status(&response), expected, "{target} {host}: {response}");
        assert!(
            response.contains("content-type: application/problem+json"),
            "{response}"
        );
        assert!(
            body(&response).contains("\"urn:conman:problem:"),
            "{response}"
        );
    }
    let connect = fixture
        .exchange("CONNECT alice.localhost:80 HTTP/1.1\r\nHost: alice.localhost:80\r\n\r\n")
        .await;
    assert_eq!(status(&connect), "400", "{connect}");
}

#[tokio::test]
async fn without_a_domain_only_paths_name_sessions() {
    let fixture = Fixture::with_options(ProxyOptions {
        domain: None,
        ..ProxyOptions::default()
    });
    fixture.session("alice", serve_echo_head().await);
    assert_eq!(status(&fixture.get("/", "alice.localhost").await), "404");
    assert_eq!(
        status(&fixture.get("/s/alice/", "alice.localhost").await),
        "200"
    );
}

#[tokio::test]
async fn http_1_0_without_a_host_reaches_a_session_by_path() {
    let fixture = Fixture::new();
    fixture.session("alice", serve_echo_head().await);
    let response = fixture.exchange("GET /s/alice/x HTTP/1.0\r\n\r\n").await;
    assert!(response.starts_with("HTTP/1.0 200 "), "{response}");
    assert!(
        body(&response).starts_with("GET /x HTTP/1.1\r\n"),
        "{response}"
    );
    assert!(
        body(&response).contains("\r\nhost: localhost\r\n"),
        "{response}"
    );
}

#[tokio::test]
async fn a_directory_s_refusal_reaches_the_client_whole() {
    let fixture = Fixture::new();
    let response = fixture.get("/", "nobody.localhost").await;
    assert_eq!(status(&response), "404");
    assert!(response.contains("\r\nretry-after: 3\r\n"), "{response}");
    assert!(
        body(&response).contains("`nobody`, may_start=false"),
        "{response}"
    );
}

#[tokio::test]
async fn a_browser_gets_a_problem_as_a_page_that_tries_again_and_a_program_as_json() {
    let fixture = Fixture::new();
    fixture.session("alice", serve_echo_head().await);
    let request = |target: &str, accept: &str| {
        format!(
            "GET {target} HTTP/1.1\r\nHost: bob.localhost\r\nAccept: {accept}\r\n\
             Connection: close\r\n\r\n"
        )
    };
    let page = fixture.exchange(request("/", "text/html,*/*;q=0.8")).await;
    assert_eq!(status(&page), "404", "{page}");
    let lower = page.to_ascii_lowercase();
    for part in [
        "content-type: text/html; charset=utf-8\r\n",
        "content-security-policy: default-src 'none'",
        "cache-control: no-store\r\n",
        "retry-after: 3\r\n",
        "<meta http-equiv=\"refresh\" content=\"3\">",
        "<h1>no such session</h1>",
    ] {
        assert!(lower.contains(part), "{part}: {page}");
    }
    let problem = fixture.exchange(request("/", "*/*")).await;
    let kind = "content-type: application/problem+json";
    assert!(problem.to_ascii_lowercase().contains(kind), "{problem}");
    assert!(body(&problem).starts_with('{'), "{problem}");
    // Nothing in it changes until somebody corrects the request.
    let lasting = fixture.exchange(
        "GET / HTTP/1.1\r\nHost: a.b.c\r\nAccept: text/html\r\nConnection: close\r\n\r\n",
    );
    let lasting = lasting.await;
    assert!(lasting.contains("<!doctype html>"), "{lasting}");
    assert!(!lasting.contains("http-equiv=\"refresh\""), "{lasting}");
}

#[tokio::test]
async fn the_gate_sees_the_stripped_target_and_decides() {
    let fixture = Fixture::with_gate(ProxyOptions::default(), |parts, id, prefix| {
        match parts.uri.path() {
            "/denied" => Verdict::Deny(Problem::new("unauthorized", "Who?", 401, "no token")),
            "/token" => Verdict::Redirect {
                location: format!("{prefix}/clean"),
                set_cookie: HeaderValue::from_static("conman=x; HttpOnly"),
            },
            _ => {
                parts.headers.remove("authorization");
                Verdict::Admit {
                    may_start: id.as_str() == "bob",
                }
            }
        }
    });
    fixture.session("alice", serve_echo_head().await);
    let denied = fixture.get("/s/alice/denied", "localhost").await;
    assert_eq!(status(&denied), "401");
    assert!(
        denied.contains("\r\nwww-authenticate: Bearer\r\n"),
        "{denied}"
    );
    let token = fixture.get("/s/alice/token", "localhost").await;
    assert_eq!(status(&token), "303");
    assert!(
        token.contains("\r\nlocation: /s/alice/clean\r\n"),
        "{token}"
    );
    assert!(
        token.contains("\r\nset-cookie: conman=x; HttpOnly\r\n"),
        "{token}"
    );
    assert!(token.contains("\r\ncache-control: no-store\r\n"), "{token}");
    let admitted = fixture
        .exchange(
            "GET / HTTP/1.1\r\nHost: alice.localhost\r\nAuthorization: Bearer x\r\n\
             Connection: close\r\n\r\n",
        )
        .await;
    assert_eq!(status(&admitted), "200");
    assert!(!body(&admitted).contains("authorization"), "{admitted}");
    assert!(
        fixture
            .get("/", "bob.localhost")
            .await
            .contains("may_start=true")
    );
}

#[tokio::test]
async fn load_balancers_ask_for_the_nodes_state_at_any_host_that_is_no_sessions() {
    let fixture = Fixture::new();
    fixture.session("alice", serve_echo_head().await);
    for host in ["127.0.0.1:7701", "lb.example", "", "localhost"] {
        let response = fixture.get("/readyz", host).await;
        assert_eq!((status(&response), body(&response)), ("200", "ready\n"));
    }
    let own = fixture.get("/readyz", "alice.localhost").await;
    assert!(body(&own).starts_with("GET /readyz HTTP/1.1\r\n"), "{own}");
    for target in ["/readyz/", "/readyz2", "/"] {
        let response = fixture.get(target, "127.0.0.1").await;
        assert_eq!(status(&response), "404", "{response}");
    }
    for (readiness, code) in [
        (Readiness::Lapsed, "200"),
        (Readiness::CutOff, "404"),
        (Readiness::Cordoned, "404"),
        (Readiness::Draining, "404"),
        (Readiness::Preempted, "404"),
        (Readiness::Stopping, "404"),
        (Readiness::Down, "503"),
    ] {
        *fixture
            .directory
            .readiness
            .lock()
            .expect("no panic while held") = Some(readiness);
        let response = fixture.get("/readyz", "127.0.0.1").await;
        assert_eq!(status(&response), code, "{response}");
        assert_eq!(body(&response).trim_end(), readiness.as_str());
    }
}
