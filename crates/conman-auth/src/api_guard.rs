//! Authorizes requests to the API.

use std::net::SocketAddr;
use std::sync::Arc;

use conman_proto::{Problem, ProblemKind};
use http::HeaderMap;
use http::header::AUTHORIZATION;
use http::request::Parts;

use crate::host_rules::HostPort;
use crate::origin_rules::{Asker, Site};
use crate::{AdminToken, Caller, CallerOrigin, HostRules, OriginRules, Scope, TokenFile, bearer};

/// The source of a request to the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    /// From the API listener.
    Tcp(SocketAddr),
    /// From the admin socket, by a process with this effective uid.
    AdminSocket { uid: u32 },
}

/// Authorizes requests to the API.
///
/// Everything that a browser could be tricked into is checked before any credential: an unknown
/// `Host` (DNS rebinding), a foreign `Origin`, a request that a page of another site makes as a
/// subresource.
#[derive(Debug)]
pub struct ApiGuard {
    administrator: Option<Arc<AdminToken>>,
    tokens: Option<Arc<TokenFile>>,
    hosts: HostRules,
    origins: OriginRules,
    /// The daemon's user, who may use the admin socket like root.
    own_uid: u32,
}

impl ApiGuard {
    /// Creates a guard. Without `tokens` and an administrator's token, every client on the loopback
    /// address may do everything.
    #[must_use]
    pub fn new(tokens: Option<Arc<TokenFile>>, hosts: HostRules, origins: OriginRules) -> Self {
        let own_uid = nix::unistd::geteuid().as_raw();
        Self {
            administrator: None,
            tokens,
            hosts,
            origins,
            own_uid,
        }
    }

    /// Requires a token of every client, and accepts this one.
    #[must_use]
    pub fn with_administrator(self, token: Arc<AdminToken>) -> Self {
        Self {
            administrator: Some(token),
            ..self
        }
    }

    /// Returns the caller if its scope includes `needed`.
    ///
    /// # Errors
    /// The refusal: 401 without a valid token, 403 for everything else, 400 for a request whose
    /// target host is ambiguous.
    pub fn check(&self, parts: &Parts, needed: Scope, peer: Peer) -> Result<Caller, Box<Problem>> {
        let caller = self.authenticate(parts, peer)?;
        caller.require(needed)?;
        Ok(caller)
    }

    /// Returns the caller, whatever its scope.
    ///
    /// # Errors
    /// As for [`ApiGuard::check`], except for the scope.
    pub fn authenticate(&self, parts: &Parts, peer: Peer) -> Result<Caller, Box<Problem>> {
        self.check_source(parts, peer)?;
        match (peer, &self.tokens) {
            (Peer::AdminSocket { uid }, _) => Ok(Caller {
                name: format!("uid {uid}"),
                scope: Scope::Admin,
                origin: CallerOrigin::AdminSocket { uid },
            }),
            (Peer::Tcp(address), None) if self.administrator.is_none() => local(address),
            (Peer::Tcp(_), _) => self.by_token(parts),
        }
    }

    fn by_token(&self, parts: &Parts) -> Result<Caller, Box<Problem>> {
        let mut values = parts.headers.get_all(AUTHORIZATION).iter();
        let (value, second) = (values.next(), values.next());
        let Some(value) = value.filter(|_| second.is_none()) else {
            let administrators = self.administrator.as_ref().map(|token| {
                let path = token.path().display();
                format!("the administrator's token is in {path}, ")
            });
            return Err(ProblemKind::UNAUTHENTICATED.problem(format!(
                "send one header `Authorization: Bearer TOKEN`; {}`conman auth new-token` makes \
                 tokens",
                administrators.unwrap_or_default()
            )));
        };
        let token = bearer::of_header(value.as_bytes()).ok_or_else(|| {
            ProblemKind::UNAUTHENTICATED.problem("the Authorization header is not `Bearer TOKEN`")
        })?;
        let administrator = self.administrator.as_ref();
        let administrator = administrator.and_then(|own| own.find(token));
        let listed = || self.tokens.as_ref().and_then(|tokens| tokens.find(token));
        administrator.or_else(listed).ok_or_else(|| {
            ProblemKind::UNAUTHENTICATED.problem(
                "the token is unknown: it was mistyped, removed from the token file, or the daemon \
                 has not read the file again since it was added (SIGHUP makes it)",
            )
        })
    }

    /// Checks whether the request may be answered at all: for endpoints that need no credential.
    ///
    /// # Errors
    /// 403 for a foreign user on the admin socket, a foreign `Host`, and a page of a foreign
    /// origin; 400 for a request whose target host is ambiguous.
    pub fn check_source(&self, parts: &Parts, peer: Peer) -> Result<(), Box<Problem>> {
        match peer {
            Peer::AdminSocket { uid } => self.check_admin(parts, uid),
            Peer::Tcp(_) => {
                let host = self.hosts.check(parts)?;
                self.check_browser(parts, host.as_ref())
            }
        }
    }

    /// Whether pages of other origins may send requests at all.
    #[must_use]
    pub fn allows_pages(&self) -> bool {
        !self.origins.is_empty()
    }

    /// Whether the request comes from a page of a configured origin, which may then read the API's
    /// answer.
    #[must_use]
    pub fn allows_page(&self, headers: &HeaderMap) -> bool {
        self.origins.asker(headers, None) == Asker::Allowed
    }

    fn check_admin(&self, parts: &Parts, uid: u32) -> Result<(), Box<Problem>> {
        if uid != 0 && uid != self.own_uid {
            return Err(ProblemKind::FORBIDDEN.problem(format!(
                "only root and uid {} may use the admin socket; you are uid {uid}",
                self.own_uid
            )));
        }
        // Browsers cannot use a Unix socket: a page's request was forwarded by another program.
        match self.origins.asker(&parts.headers, None) {
            Asker::Unnamed => Ok(()),
            Asker::Own | Asker::Allowed | Asker::Foreign(_) => Err(ProblemKind::ORIGIN_REFUSED
                .problem("the admin socket does not answer requests from web pages")),
        }
    }

    fn check_browser(&self, parts: &Parts, host: Option<&HostPort>) -> Result<(), Box<Problem>> {
        match (
            self.origins.asker(&parts.headers, host),
            Site::of(&parts.headers),
        ) {
            (Asker::Own | Asker::Allowed, _)
            | (Asker::Unnamed, Site::HereOrUnknown | Site::Navigating { cross_site: false }) => {
                Ok(())
            }
            (Asker::Foreign(origin), _) => Err(ProblemKind::ORIGIN_REFUSED.problem(format!(
                "pages of `{origin}` may not use this API; if one of yours needs to, add its \
                 origin to `allowed_origins` under [listen] in the configuration"
            ))),
            (Asker::Unnamed, Site::Navigating { cross_site: true } | Site::Elsewhere) => {
                Err(ProblemKind::ORIGIN_REFUSED.problem(
                    "a page of another origin made this request (Sec-Fetch-Site); open the URL \
                     directly, or add the page's origin to `allowed_origins` under [listen] in \
                     the configuration",
                ))
            }
        }
    }
}

fn local(address: SocketAddr) -> Result<Caller, Box<Problem>> {
    if address.ip().to_canonical().is_loopback() {
        Ok(Caller {
            name: "local".to_owned(),
            scope: Scope::Admin,
            origin: CallerOrigin::Local,
        })
    } else {
        Err(ProblemKind::UNAUTHENTICATED.problem(
            "`auth.loopback` is \"open\", so only clients on this host are allowed; set `tokens_file` \
             under [auth] in the configuration instead",
        ))
    }
}

impl Caller {
    /// Checks that the caller's scope includes `needed`.
    ///
    /// # Errors
    /// 403 that names both scopes.
    pub fn require(&self, needed: Scope) -> Result<(), Box<Problem>> {
        if self.scope >= needed {
            Ok(())
        } else {
            Err(ProblemKind::FORBIDDEN.problem(format!(
                "this needs the scope `{needed}`; the token `{}` has `{}`",
                self.name, self.scope
            )))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use http::Request;
    use tempfile::TempDir;

    use super::*;
    use crate::generate;

    const LOCAL: &str = "127.0.0.1:5000";
    const REMOTE: &str = "10.1.1.1:5000";

    struct Fixture {
        guard: ApiGuard,
        tokens: Vec<(Scope, String)>,
        folder: TempDir,
    }

    fn guard(tokens: Option<Arc<TokenFile>>) -> ApiGuard {
        let listen = "127.0.0.1:7700".parse().expect("an address");
        let hosts = HostRules::new(listen, &[], Some("localhost")).expect("valid");
        let origins = OriginRules::new(&["https://app.example".to_owned()]).expect("valid");
        ApiGuard::new(tokens, hosts, origins)
    }

    fn with_tokens() -> Fixture {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("tokens");
        let mut text = String::new();
        let mut tokens = Vec::new();
        for scope in [Scope::Read, Scope::Frontend, Scope::Admin] {
            let new = generate(scope).expect("random numbers");
            let hash = &new.sha256;
            text += &format!("[[token]]\nname = \"{scope}\"\nscope = \"{scope}\"\n");
            text += &format!("sha256 = \"{hash}\"\n");
            tokens.push((scope, new.text));
        }
        fs::write(&path, text).expect("writing");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("chmod");
        let guard = guard(Some(Arc::new(TokenFile::load(path).expect("valid"))));
        Fixture {
            guard,
            tokens,
            folder,
        }
    }

    fn parts(headers: &[(&str, &str)]) -> Parts {
        let mut request = Request::get("/v1/sessions");
        if !headers.iter().any(|(name, _)| *name == "host") {
            request = request.header("host", "localhost:7700");
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).expect("a request").into_parts().0
    }

    fn tcp(address: &str) -> Peer {
        Peer::Tcp(address.parse().expect("an address"))
    }

    fn status(result: Result<Caller, Box<Problem>>) -> u16 {
        result.map_or_else(|problem| problem.status, |_| 200)
    }

    #[test]
    fn every_scope_allows_itself_and_what_is_below() {
        let fixture = with_tokens();
        for (scope, token) in &fixture.tokens {
            let parts = parts(&[("authorization", &format!("Bearer {token}"))]);
            for needed in [Scope::Read, Scope::Frontend, Scope::Admin] {
                let expected = if *scope >= needed { 200 } else { 403 };
                let found = status(fixture.guard.check(&parts, needed, tcp(REMOTE)));
                assert_eq!(found, expected, "{scope} for {needed}");
            }
        }
    }

    #[test]
    fn with_tokens_configured_nobody_gets_in_without_one_not_even_from_this_host() {
        let fixture = with_tokens();
        let token = format!("Bearer {}", fixture.tokens[2].1);
        for headers in [
            &[][..],
            &[("authorization", "Bearer cmn_admin_wrong")],
            &[("authorization", "Bearer ")],
            &[("authorization", "Basic cm9vdDpyb290")],
            &[("authorization", &token), ("authorization", &token)],
            &[("cookie", &format!("conman_session={}", fixture.tokens[2].1))],
        ] {
            let found = status(
                fixture
                    .guard
                    .check(&parts(headers), Scope::Read, tcp(LOCAL)),
            );
            assert_eq!(found, 401, "{headers:?}");
        }
    }

    #[test]
    fn the_administrators_token_is_needed_without_a_token_file_and_works_besides_one() {
        let fixture = with_tokens();
        let path = fixture.folder.path().join("admin.token");
        let open = || Arc::new(AdminToken::open(&path).expect("made once"));
        drop(open());
        let text = fs::read_to_string(&path).expect("readable");
        let own = format!("Bearer {}", text.trim());
        let read = format!("Bearer {}", fixture.tokens[0].1);
        for (guard, others) in [
            (guard(None).with_administrator(open()), 401),
            (fixture.guard.with_administrator(open()), 200),
        ] {
            for (value, expected) in [(&own, 200), (&read, others)] {
                let parts = parts(&[("authorization", value)]);
                assert_eq!(
                    status(guard.check(&parts, Scope::Read, tcp(LOCAL))),
                    expected
                );
            }
            let refused = guard.check(&parts(&[]), Scope::Read, tcp(LOCAL));
            let problem = refused.expect_err("it has no token");
            assert_eq!(problem.status, 401);
            assert!(problem.detail.contains("admin.token"), "{}", problem.detail);
        }
    }

    #[test]
    fn without_tokens_this_host_may_do_everything_and_others_nothing() {
        let guard = guard(None);
        let parts = parts(&[]);
        for (peer, expected) in [
            (LOCAL, 200),
            ("[::1]:1", 200),
            ("[::ffff:127.0.0.1]:1", 200),
        ] {
            assert_eq!(
                status(guard.check(&parts, Scope::Admin, tcp(peer))),
                expected,
                "{peer}"
            );
        }
        assert_eq!(status(guard.check(&parts, Scope::Read, tcp(REMOTE))), 401);
    }

    #[test]
    fn pages_of_other_origins_are_refused_whatever_token_they_have() {
        let fixture = with_tokens();
        let token = format!("Bearer {}", fixture.tokens[2].1);
        for (headers, expected) in [
            (&[("origin", "http://localhost:7700")][..], 200),
            (
                &[
                    ("origin", "https://app.example"),
                    ("sec-fetch-site", "cross-site"),
                ],
                200,
            ),
            (&[("origin", "http://localhost:7701")], 403),
            (&[("origin", "http://alice.localhost:7701")], 403),
            (&[("origin", "null")], 403),
            (&[("sec-fetch-site", "cross-site")], 403),
            (
                &[
                    ("sec-fetch-site", "cross-site"),
                    ("sec-fetch-mode", "navigate"),
                ],
                403,
            ),
            (&[("sec-fetch-site", "same-site")], 403),
            (
                &[
                    ("sec-fetch-site", "same-site"),
                    ("sec-fetch-mode", "navigate"),
                ],
                200,
            ),
            (&[("sec-fetch-site", "same-origin")], 200),
            (&[("sec-fetch-site", "none")], 200),
            (&[("host", "evil.example:7700")], 403),
            (
                &[
                    ("host", "evil.example:7700"),
                    ("origin", "http://evil.example:7700"),
                ],
                403,
            ),
        ] {
            for guard in [&fixture.guard, &guard(None)] {
                let mut headers = headers.to_vec();
                headers.push(("authorization", &token));
                let found = status(guard.check(&parts(&headers), Scope::Read, tcp(LOCAL)));
                assert_eq!(found, expected, "{headers:?}");
                let source = guard.check_source(&parts(&headers), tcp(LOCAL));
                assert_eq!(source.is_ok(), expected == 200, "{headers:?}");
            }
        }
    }

    #[test]
    fn only_pages_of_configured_origins_may_read_what_the_api_answers() {
        let fixture = guard(None);
        assert!(fixture.allows_pages());
        for (origins, expected) in [
            (&["https://app.example"][..], true),
            (&["https://APP.example:443"], true),
            (&["http://app.example"], false),
            (&["https://app.example:8443"], false),
            (&["https://app.example.evil.example"], false),
            (&["http://localhost:7700"], false),
            (&["null"], false),
            (&["https://app.example", "https://evil.example"], false),
            (&["https://app.example", "https://app.example"], false),
            (&[], false),
        ] {
            let headers: Vec<(&str, &str)> =
                origins.iter().map(|origin| ("origin", *origin)).collect();
            let found = fixture.allows_page(&parts(&headers).headers);
            assert_eq!(found, expected, "{origins:?}");
        }
        let none = OriginRules::new(&[]).expect("valid");
        let listen = "127.0.0.1:7700".parse().expect("an address");
        let hosts = HostRules::new(listen, &[], None).expect("valid");
        assert!(!ApiGuard::new(None, hosts, none).allows_pages());
    }

    #[test]
    fn the_admin_socket_is_for_root_and_the_daemons_user() {
        let mut guard = guard(None);
        guard.own_uid = 1_000;
        for (uid, expected) in [(0, 200), (1_000, 200), (1_001, 403), (u32::MAX, 403)] {
            let peer = Peer::AdminSocket { uid };
            assert_eq!(
                status(guard.check(&parts(&[]), Scope::Admin, peer)),
                expected,
                "{uid}"
            );
        }
        let caller = guard.check(&parts(&[]), Scope::Read, Peer::AdminSocket { uid: 0 });
        assert_eq!(
            caller.expect("root").origin,
            CallerOrigin::AdminSocket { uid: 0 }
        );
    }

    #[test]
    fn the_admin_socket_asks_for_no_host_and_answers_no_page() {
        let guard = guard(None);
        let root = Peer::AdminSocket { uid: 0 };
        let any_host = parts(&[("host", "conman")]);
        assert_eq!(status(guard.check(&any_host, Scope::Admin, root)), 200);
        for origin in ["http://localhost:7700", "https://app.example", "null"] {
            let page = parts(&[("origin", origin)]);
            assert_eq!(
                status(guard.check(&page, Scope::Read, root)),
                403,
                "{origin}"
            );
        }
    }

    #[test]
    fn no_refusal_repeats_a_credential() {
        let fixture = with_tokens();
        let parts = parts(&[("authorization", "Bearer cmn_admin_sekret")]);
        let problem = fixture
            .guard
            .check(&parts, Scope::Read, tcp(LOCAL))
            .expect_err("refused");
        assert!(!problem.detail.contains("sekret"));
    }
}
