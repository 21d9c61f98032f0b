//! Tests of which caller may connect to a session.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use http::Request;
use http::header::{AUTHORIZATION, COOKIE, SEC_WEBSOCKET_PROTOCOL};
use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::connect_tokens::tests::tokens;
use crate::generate;

const HOST: &str = "alice.localhost:7701";
const OWN: &str = "http://alice.localhost:7701";

struct Fixture {
    guard: SessionGuard,
    connect: Arc<ConnectTokens>,
    admin: String,
    frontend: String,
    read: String,
    folder: TempDir,
}

fn id(text: &str) -> SessionId {
    text.parse().expect("an id")
}

fn now() -> Timestamp {
    Timestamp::from_second(1_000_000).expect("in range")
}

fn fixture() -> Fixture {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("tokens");
    let [admin, frontend, read] = [Scope::Admin, Scope::Frontend, Scope::Read].map(|scope| {
        let token = generate(scope).expect("random numbers");
        let entry = format!(
            "[[token]]\nname = \"{scope}\"\nscope = \"{scope}\"\nsha256 = \"{}\"\n",
            token.sha256
        );
        (token.text, entry)
    });
    fs::write(&path, [&*admin.1, &frontend.1, &read.1].concat()).expect("writing");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("chmod");
    let file = Arc::new(TokenFile::load(&path).expect("valid"));
    let connect = Arc::new(tokens("i"));
    Fixture {
        guard: guard(Some(file), &connect),
        connect,
        admin: admin.0,
        frontend: frontend.0,
        read: read.0,
        folder,
    }
}

fn guard(tokens: Option<Arc<TokenFile>>, connect: &Arc<ConnectTokens>) -> SessionGuard {
    let listen = "127.0.0.1:7701".parse().expect("an address");
    let hosts = HostRules::new(listen, &[], Some("localhost")).expect("valid");
    let origins = OriginRules::new(&["https://app.example".to_owned()]).expect("valid");
    let options = SessionGuardOptions::default();
    SessionGuard::new(tokens, Arc::clone(connect), hosts, origins, options)
}

impl Fixture {
    fn local(&self) -> SessionGuard {
        guard(None, &self.connect)
    }

    fn token(&self, name: &str) -> String {
        self.connect
            .mint(&id(name), Duration::from_secs(300), now())
            .expect("made")
            .token
    }

    fn expired(&self, name: &str) -> String {
        let then = now() - jiff::SignedDuration::from_secs(301);
        self.connect
            .mint(&id(name), Duration::from_secs(300), then)
            .expect("made")
            .token
    }

    fn cookie(&self, name: &str) -> String {
        let minted = self
            .connect
            .mint_cookie(&id(name), Duration::from_secs(300), now());
        format!("conman_session={}", minted.expect("made").token)
    }
}

fn request(method: Method, target: &str, headers: &[(&str, &str)]) -> Parts {
    let mut request = Request::builder().method(method).uri(target);
    if !headers.iter().any(|(name, _)| *name == "host") {
        request = request.header("host", HOST);
    }
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(()).expect("a request").into_parts().0
}

fn admit(guard: &SessionGuard, parts: &mut Parts) -> SessionVerdict {
    guard.admit_at(parts, &id("alice"), "", now())
}

/// 200 for admitted, 303 for redirected, else the refusal's status.
fn status(verdict: &SessionVerdict) -> u16 {
    match verdict {
        SessionVerdict::Admit { .. } => 200,
        SessionVerdict::Redirect { .. } => 303,
        SessionVerdict::Deny(problem) => problem.status,
    }
}

fn judge(guard: &SessionGuard, method: Method, target: &str, headers: &[(&str, &str)]) -> u16 {
    status(&admit(guard, &mut request(method, target, headers)))
}

#[test]
fn every_kind_of_credential_opens_the_session_and_never_reaches_it() {
    let fixture = fixture();
    let token = fixture.token("alice");
    let bearer = |token: &str| format!("Bearer {token}");
    for (name, value) in [
        ("authorization", bearer(&token)),
        ("authorization", bearer(&fixture.frontend)),
        ("authorization", bearer(&fixture.admin)),
        ("sec-websocket-protocol", format!("conman.token.{token}")),
        ("cookie", fixture.cookie("alice")),
    ] {
        let mut parts = request(Method::GET, "/x?y=1", &[(name, &value)]);
        let verdict = admit(&fixture.guard, &mut parts);
        assert!(
            matches!(
                verdict,
                SessionVerdict::Admit {
                    may_start: true,
                    ..
                }
            ),
            "{value}"
        );
        for header in [AUTHORIZATION, SEC_WEBSOCKET_PROTOCOL, COOKIE] {
            assert!(!parts.headers.contains_key(&header), "{header} of {value}");
        }
        assert_eq!(parts.uri, "/x?y=1");
    }
}

#[test]
fn nobody_gets_in_without_a_good_credential() {
    let fixture = fixture();
    let bearer = |token: &str| format!("Bearer {token}");
    for (name, value, expected) in [
        ("accept", "*/*".to_owned(), 401),
        ("authorization", bearer("cmn_admin_wrong"), 401),
        ("authorization", bearer(&fixture.token("bob")), 401),
        ("authorization", bearer(&fixture.expired("alice")), 401),
        ("authorization", bearer("v4.local.AAAA"), 401),
        ("authorization", bearer("the.sessions.own"), 401),
        ("authorization", bearer(&fixture.read), 403),
        ("authorization", format!("Basic {}", fixture.admin), 401),
        (
            "sec-websocket-protocol",
            format!("conman.token.{}", fixture.token("bob")),
            401,
        ),
        ("cookie", fixture.cookie("bob"), 401),
        (
            "cookie",
            format!("conman_session={}", fixture.token("alice")),
            401,
        ),
        ("cookie", format!("conman_session={}", fixture.admin), 401),
    ] {
        let mut parts = request(Method::GET, "/", &[(name, &value)]);
        assert_eq!(
            status(&admit(&fixture.guard, &mut parts)),
            expected,
            "{name}: {value}"
        );
    }
    for token in [
        fixture.token("bob"),
        fixture.expired("alice"),
        "x".to_owned(),
        fixture.admin,
    ] {
        let target = format!("/?conman_token={token}");
        assert_eq!(
            judge(&fixture.guard, Method::GET, &target, &[]),
            401,
            "{target}"
        );
    }
}

#[test]
fn a_bad_credential_is_taken_out_although_another_one_admits() {
    let fixture = fixture();
    let cookies = format!(
        "{}; own=1; {}",
        fixture.cookie("bob"),
        fixture.cookie("alice")
    );
    let headers = [
        ("cookie", cookies.as_str()),
        ("authorization", "Bearer cmn_admin_wrong"),
    ];
    let mut parts = request(Method::GET, "/", &headers);
    assert_eq!(status(&admit(&fixture.guard, &mut parts)), 200);
    assert_eq!(parts.headers[COOKIE], "own=1");
    assert!(!parts.headers.contains_key(AUTHORIZATION));
}

#[test]
fn a_token_in_the_url_is_exchanged_for_a_cookie_that_opens_the_session() {
    let fixture = fixture();
    for (prefix, path) in [("", "/"), ("/s/alice", "/s/alice")] {
        let target = format!("/lab?a=1&conman_token={}&b=%20", fixture.token("alice"));
        let mut parts = request(Method::GET, &target, &[]);
        let verdict = fixture
            .guard
            .admit_at(&mut parts, &id("alice"), prefix, now());
        let SessionVerdict::Redirect {
            location,
            set_cookie,
        } = verdict
        else {
            panic!("{verdict:?}");
        };
        assert_eq!(location, format!("{prefix}/lab?a=1&b=%20"));
        let set_cookie = set_cookie.to_str().expect("text");
        let (cookie, attributes) = set_cookie.split_once("; ").expect("attributes");
        assert_eq!(
            attributes,
            format!("Path={path}; Max-Age=43200; HttpOnly; SameSite=Lax")
        );
        assert_eq!(
            judge(&fixture.guard, Method::GET, "/lab", &[("cookie", cookie)]),
            200
        );
        let value = cookie.strip_prefix("conman_session=").expect("the name");
        assert_eq!(
            judge(
                &fixture.guard,
                Method::GET,
                &format!("/?conman_token={value}"),
                &[]
            ),
            401
        );
    }
}

#[test]
fn what_a_redirect_would_break_is_accepted_with_the_token_in_the_url() {
    let fixture = fixture();
    let target = format!("/ws?conman_token={}", fixture.token("alice"));
    for (method, headers) in [
        (
            Method::GET,
            &[("upgrade", "websocket"), ("origin", OWN)][..],
        ),
        (Method::GET, &[("upgrade", "websocket")]),
        (Method::POST, &[]),
        (Method::PUT, &[("origin", OWN)]),
    ] {
        let mut parts = request(method, &target, headers);
        assert_eq!(
            status(&admit(&fixture.guard, &mut parts)),
            200,
            "{headers:?}"
        );
        assert_eq!(parts.uri, "/ws");
    }
}

#[test]
fn an_old_link_beside_a_good_cookie_leads_on_and_keeps_the_cookie_as_it_is() {
    let fixture = fixture();
    let cookie = fixture.cookie("alice");
    let target = format!("/?conman_token={}", fixture.expired("alice"));
    let mut parts = request(Method::GET, &target, &[("cookie", &cookie)]);
    let SessionVerdict::Redirect { set_cookie, .. } = admit(&fixture.guard, &mut parts) else {
        panic!("not redirected");
    };
    let set_cookie = set_cookie.to_str().expect("text");
    assert!(
        set_cookie.starts_with(&format!("{cookie}; ")),
        "{set_cookie}"
    );
    assert!(set_cookie.contains("Max-Age=300;"), "{set_cookie}");
}

#[test]
fn a_redirect_never_leads_to_another_host() {
    let fixture = fixture();
    let token = fixture.token("alice");
    for (target, expected) in [
        ("//evil.example/", "/.//evil.example/"),
        ("/\\evil.example/", "/./\\evil.example/"),
        ("/x//evil.example/", "/x//evil.example/"),
    ] {
        let target = format!("{target}?conman_token={token}");
        let mut parts = request(Method::GET, &target, &[]);
        let SessionVerdict::Redirect { location, .. } = admit(&fixture.guard, &mut parts) else {
            panic!("not redirected: {target}");
        };
        assert_eq!(location, expected);
    }
}

#[test]
fn pages_of_other_origins_neither_open_websockets_nor_change_anything() {
    let fixture = fixture();
    let (cookie, bearer) = (
        fixture.cookie("alice"),
        format!("Bearer {}", fixture.token("alice")),
    );
    let local = fixture.local();
    let ways = [
        (&fixture.guard, ("cookie", cookie.as_str())),
        (&fixture.guard, ("authorization", bearer.as_str())),
        (&local, ("accept", "*/*")),
    ];
    for (guard, credential) in ways {
        for (origin, expected) in [
            (OWN, 200),
            ("https://app.example", 200),
            ("http://localhost:7701", 403),
            ("http://bob.localhost:7701", 403),
            ("http://alice.localhost:7700", 403),
            ("https://evil.example", 403),
            ("null", 403),
        ] {
            let socket = [credential, ("upgrade", "websocket"), ("origin", origin)];
            assert_eq!(
                judge(guard, Method::GET, "/", &socket),
                expected,
                "{socket:?}"
            );
            for method in [Method::POST, Method::PUT, Method::DELETE, Method::OPTIONS] {
                let acts = [credential, ("origin", origin)];
                assert_eq!(judge(guard, method, "/", &acts), expected, "{acts:?}");
            }
        }
    }
}

#[test]
fn without_an_origin_a_cookie_may_only_read_and_other_credentials_may_act() {
    let fixture = fixture();
    let cookie = fixture.cookie("alice");
    let bearer = format!("Bearer {}", fixture.token("alice"));
    let upgrade = ("upgrade", "websocket");
    for (guard, credential, expected) in [
        (&fixture.guard, ("cookie", cookie.as_str()), 403),
        (&fixture.guard, ("authorization", bearer.as_str()), 200),
        (&fixture.local(), ("accept", "*/*"), 200),
    ] {
        assert_eq!(judge(guard, Method::GET, "/", &[credential]), 200);
        assert_eq!(judge(guard, Method::HEAD, "/", &[credential]), 200);
        assert_eq!(
            judge(guard, Method::GET, "/", &[credential, upgrade]),
            expected
        );
        assert_eq!(judge(guard, Method::POST, "/", &[credential]), expected);
    }
}

#[test]
fn what_the_browser_adds_by_itself_does_not_count_for_other_pages_requests() {
    let fixture = fixture();
    let cookie = fixture.cookie("alice");
    let bearer = format!("Bearer {}", fixture.token("alice"));
    let local = fixture.local();
    for (guard, credential, elsewhere) in [
        (&fixture.guard, ("cookie", cookie.as_str()), 403),
        (&local, ("accept", "*/*"), 403),
        (&fixture.guard, ("authorization", bearer.as_str()), 200),
    ] {
        for (site, mode, expected) in [
            ("cross-site", "no-cors", elsewhere),
            ("same-site", "no-cors", elsewhere),
            ("cross-site", "cors", elsewhere),
            ("cross-site", "navigate", 200),
            ("same-origin", "cors", 200),
            ("none", "navigate", 200),
        ] {
            let headers = [
                credential,
                ("sec-fetch-site", site),
                ("sec-fetch-mode", mode),
            ];
            assert_eq!(
                judge(guard, Method::GET, "/", &headers),
                expected,
                "{headers:?}"
            );
        }
        let allowed = [
            credential,
            ("sec-fetch-site", "cross-site"),
            ("origin", "https://app.example"),
        ];
        assert_eq!(judge(guard, Method::GET, "/", &allowed), 200);
        // As on hosts for which the browser does not send Sec-Fetch-Site.
        for origin in ["https://evil.example", "http://bob.localhost:7701", "null"] {
            let read = [credential, ("origin", origin)];
            assert_eq!(judge(guard, Method::GET, "/", &read), elsewhere, "{read:?}");
        }
    }
}

#[test]
fn a_foreign_host_is_refused_whatever_the_credential() {
    let fixture = fixture();
    let bearer = format!("Bearer {}", fixture.admin);
    for guard in [&fixture.guard, &fixture.local()] {
        for host in [
            "evil.example",
            "alice.localhost.evil.example",
            "10.0.0.1:7701",
        ] {
            let headers = [("host", host), ("authorization", bearer.as_str())];
            assert_eq!(judge(guard, Method::GET, "/", &headers), 403, "{host}");
        }
    }
}

#[test]
fn without_configured_tokens_whatever_is_brought_is_taken_out_and_all_may_connect() {
    let fixture = fixture();
    let guard = fixture.local();
    let headers = [
        ("authorization", "Bearer cmn_admin_old"),
        ("cookie", "conman_session=old; own=1"),
        ("sec-websocket-protocol", "conman.token.old, chat"),
    ];
    let mut parts = request(Method::GET, "/", &headers);
    let verdict = admit(&guard, &mut parts);
    assert!(matches!(
        verdict,
        SessionVerdict::Admit {
            may_start: true,
            ..
        }
    ));
    assert!(!parts.headers.contains_key(AUTHORIZATION));
    assert_eq!(parts.headers[COOKIE], "own=1");
    assert_eq!(parts.headers[SEC_WEBSOCKET_PROTOCOL], "chat");
    let mut parts = request(Method::GET, "/a?conman_token=old", &[]);
    let SessionVerdict::Redirect {
        location,
        set_cookie,
    } = admit(&guard, &mut parts)
    else {
        panic!("not redirected");
    };
    assert_eq!(location, "/a");
    assert!(set_cookie.to_str().expect("text").contains("Max-Age=0;"));
}

#[test]
fn the_sessions_own_bearer_passes_beside_a_cookie() {
    let fixture = fixture();
    let cookie = fixture.cookie("alice");
    let headers = [
        ("cookie", cookie.as_str()),
        ("authorization", "Bearer the.sessions.own"),
    ];
    let mut parts = request(Method::GET, "/", &headers);
    assert_eq!(status(&admit(&fixture.guard, &mut parts)), 200);
    assert_eq!(parts.headers[AUTHORIZATION], "Bearer the.sessions.own");
}

#[test]
fn a_browser_that_offered_nothing_but_the_token_is_answered_with_it() {
    let fixture = fixture();
    let offer = format!("conman.token.{}", fixture.token("alice"));
    for (offers, answered) in [(offer.clone(), true), (format!("{offer}, chat"), false)] {
        let headers = [
            ("upgrade", "websocket"),
            ("sec-websocket-protocol", offers.as_str()),
        ];
        let mut parts = request(Method::GET, "/", &headers);
        let SessionVerdict::Admit { subprotocol, .. } = admit(&fixture.guard, &mut parts) else {
            panic!("refused");
        };
        assert_eq!(subprotocol.is_some_and(|value| value == *offer), answered);
    }
}

#[test]
fn a_token_removed_from_the_file_opens_nothing_any_more() {
    let fixture = fixture();
    let path = fixture.folder.path().join("tokens");
    let headers = [("authorization", format!("Bearer {}", fixture.admin))];
    let headers = [(headers[0].0, headers[0].1.as_str())];
    assert_eq!(judge(&fixture.guard, Method::GET, "/", &headers), 200);
    fs::write(&path, "").expect("writing");
    let tokens = fixture.guard.tokens.as_ref().expect("configured");
    assert_eq!(tokens.reload().expect("valid"), 0);
    assert_eq!(judge(&fixture.guard, Method::GET, "/", &headers), 401);
}

#[test]
fn no_refusal_repeats_a_credential() {
    let fixture = fixture();
    let target = "/?conman_token=v4.local.sekret";
    let headers = [
        ("authorization", "Bearer cmn_admin_sekret"),
        ("cookie", "conman_session=sekret"),
    ];
    let mut parts = request(Method::GET, target, &headers);
    let SessionVerdict::Deny(problem) = admit(&fixture.guard, &mut parts) else {
        panic!("admitted");
    };
    assert!(!problem.detail.contains("sekret"), "{}", problem.detail);
}

proptest! {
    #[test]
    fn no_request_without_a_good_credential_gets_in(
        target in "/[a-z/]{0,5}(\\?(conman_token=[a-zA-Z0-9._-]{0,20}&?){0,3})?",
        bearer in "(Bearer|bearer|Basic) (cmn_admin_|v4\\.local\\.)?[a-zA-Z0-9._-]{0,60}",
        cookie in "(conman_session=[a-zA-Z0-9._-]{0,20}; ?){0,3}",
        offers in "((conman\\.token\\.)?[a-zA-Z0-9._-]{1,20}, ?){0,3}",
        method in prop::sample::select(vec![Method::GET, Method::POST, Method::HEAD]),
    ) {
        let fixture = fixture();
        let headers = [
            ("authorization", bearer.as_str()),
            ("cookie", cookie.as_str()),
            ("sec-websocket-protocol", offers.as_str()),
        ];
        let verdict = admit(&fixture.guard, &mut request(method, &target, &headers));
        prop_assert!(matches!(verdict, SessionVerdict::Deny(_)));
    }
}
