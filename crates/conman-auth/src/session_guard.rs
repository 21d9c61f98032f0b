//! Authorizes connections to a session.
//!
//! Authority is *explicit* when the request carries a token, which no foreign page can make a
//! browser add, and *ambient* when the browser adds it for any page: the cookie, and, without
//! configured tokens, the client's address. Ambient authority is accepted only for requests that no
//! other page made.

use std::sync::Arc;
use std::time::Duration;

use conman_proto::{Problem, ProblemKind, SessionId};
use http::header::UPGRADE;
use http::request::Parts;
use http::{HeaderValue, Method};
use jiff::Timestamp;

use crate::connect_tokens::MintedToken;
use crate::credentials::{COOKIE_NAME, Credentials};
use crate::origin_rules::{Asker, Site};
use crate::{ConnectTokenError, ConnectTokens, HostRules, OriginRules, Scope, TokenFile};

/// Options of a [`SessionGuard`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionGuardOptions {
    /// Lifetime of the cookie that a token in the URL is exchanged for.
    pub cookie_ttl: Duration,
    /// Whether browsers use HTTPS for the sessions, so that the cookie may be restricted to it.
    pub secure_cookie: bool,
}

impl Default for SessionGuardOptions {
    fn default() -> Self {
        Self {
            cookie_ttl: Duration::from_secs(12 * 3_600),
            secure_cookie: false,
        }
    }
}

/// Authorizes requests to sessions.
#[derive(Debug)]
pub struct SessionGuard {
    tokens: Option<Arc<TokenFile>>,
    connect: Arc<ConnectTokens>,
    hosts: HostRules,
    origins: OriginRules,
    options: SessionGuardOptions,
}

/// A decision of [`SessionGuard`].
#[derive(Debug)]
pub enum SessionVerdict {
    /// The request is forwarded to the session.
    Admit {
        /// Whether the caller may start a session that does not run.
        may_start: bool,
        /// The WebSocket subprotocol to answer with if the session selects none, because the only
        /// one offered was a credential.
        subprotocol: Option<HeaderValue>,
    },
    /// 303 to `location` with `set_cookie`: the token in the URL is exchanged.
    Redirect {
        /// Path and query, beginning with the prefix.
        location: String,
        set_cookie: HeaderValue,
    },
    /// The request is refused.
    Deny(Problem),
}

/// Why a request may connect, the strongest authority first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Authority {
    /// A bearer token or a connect token in the request.
    Explicit,
    /// The cookie.
    Cookie,
    /// No tokens are configured.
    Local,
}

impl SessionGuard {
    /// Creates a guard. Without `tokens`, every client on the loopback address may connect.
    #[must_use]
    pub fn new(
        tokens: Option<Arc<TokenFile>>,
        connect: Arc<ConnectTokens>,
        hosts: HostRules,
        origins: OriginRules,
        options: SessionGuardOptions,
    ) -> Self {
        Self {
            tokens,
            connect,
            hosts,
            origins,
            options,
        }
    }

    /// Authorizes a request for `id` and removes conman's credentials from it.
    ///
    /// `parts.uri` is in origin form and without `prefix`, which is `/s/{id}`, or empty if the
    /// session was addressed by its host name.
    pub fn admit(&self, parts: &mut Parts, id: &SessionId, prefix: &str) -> SessionVerdict {
        self.admit_at(parts, id, prefix, Timestamp::now())
    }

    fn admit_at(
        &self,
        parts: &mut Parts,
        id: &SessionId,
        prefix: &str,
        now: Timestamp,
    ) -> SessionVerdict {
        // First, so that no code below can leave a credential in the request.
        let credentials = Credentials::take(parts, self.tokens.as_deref());
        self.judge(parts, &credentials, id, prefix, now)
            .unwrap_or_else(|problem| SessionVerdict::Deny(*problem))
    }

    fn judge(
        &self,
        parts: &Parts,
        credentials: &Credentials,
        id: &SessionId,
        prefix: &str,
        now: Timestamp,
    ) -> Result<SessionVerdict, Box<Problem>> {
        let host = self.hosts.check(parts)?;
        let asker = self.origins.asker(&parts.headers, host.as_ref());
        let authority = self.authority(credentials, id, now)?;
        check_page(parts, &asker, authority)?;
        if !credentials.url.is_empty() && is_plain_read(parts) {
            return self.exchange(parts, credentials, id, prefix, now);
        }
        let subprotocol = credentials.only_subprotocol.clone();
        Ok(SessionVerdict::Admit {
            may_start: true,
            subprotocol,
        })
    }

    fn authority(
        &self,
        credentials: &Credentials,
        id: &SessionId,
        now: Timestamp,
    ) -> Result<Authority, Box<Problem>> {
        let mut refused = None;
        for caller in &credentials.callers {
            match caller.require(Scope::Frontend) {
                Ok(()) => return Ok(Authority::Explicit),
                Err(problem) => refused = Some(problem),
            }
        }
        for token in credentials.connect.iter().chain(&credentials.url) {
            match self.connect.verify(token, id, now) {
                Ok(_) => return Ok(Authority::Explicit),
                Err(error) => refused = refused.or_else(|| Some(refusal(error, id))),
            }
        }
        if self.cookie(credentials, id, now).is_some() {
            return Ok(Authority::Cookie);
        }
        if self.tokens.is_none() {
            return Ok(Authority::Local);
        }
        Err(refused.unwrap_or_else(|| {
            ProblemKind::UNAUTHENTICATED.problem(if credentials.any_explicit() {
                "the bearer token is unknown: it was mistyped, or removed from the token file"
            } else if credentials.cookies.is_empty() {
                "connect with a token for this session, as `Authorization: Bearer TOKEN`, as the \
                 WebSocket subprotocol `conman.token.TOKEN` or as `?conman_token=TOKEN`; `conman \
                 token ID` and POST /v1/sessions/ID/token make them"
            } else {
                "the cookie has expired or is for another session; open a fresh link with \
                 `?conman_token=`"
            })
        }))
    }

    /// A valid cookie's value and its expiry.
    fn cookie(
        &self,
        credentials: &Credentials,
        id: &SessionId,
        now: Timestamp,
    ) -> Option<MintedToken> {
        credentials.cookies.iter().find_map(|value| {
            let expires_at = self.connect.verify_cookie(value, id, now).ok()?;
            Some(MintedToken {
                token: value.clone(),
                expires_at,
            })
        })
    }

    /// Redirects to a URL without the token, so that the browser does not show, store or send it.
    fn exchange(
        &self,
        parts: &Parts,
        credentials: &Credentials,
        id: &SessionId,
        prefix: &str,
        now: Timestamp,
    ) -> Result<SessionVerdict, Box<Problem>> {
        let by_url = credentials
            .url
            .iter()
            .any(|url| self.connect.verify(url, id, now).is_ok());
        // An old link must not extend the lifetime of a valid cookie.
        let kept = if by_url {
            None
        } else {
            self.cookie(credentials, id, now)
        };
        let minted = match kept {
            Some(cookie) => Some(cookie),
            None if by_url => {
                let minted = self.connect.mint_cookie(id, self.options.cookie_ttl, now);
                let failed =
                    |error: crate::MintError| ProblemKind::INTERNAL.problem(error.to_string());
                Some(minted.map_err(failed)?)
            }
            None => None,
        };
        Ok(SessionVerdict::Redirect {
            location: location(parts, prefix),
            set_cookie: self.set_cookie(minted.as_ref(), prefix, now)?,
        })
    }

    fn set_cookie(
        &self,
        minted: Option<&MintedToken>,
        prefix: &str,
        now: Timestamp,
    ) -> Result<HeaderValue, Box<Problem>> {
        let (value, max_age_s) = minted.map_or(("", 0), |minted| {
            (
                minted.token.as_str(),
                minted.expires_at.as_second() - now.as_second(),
            )
        });
        let path = if prefix.is_empty() { "/" } else { prefix };
        let secure = if self.options.secure_cookie {
            "; Secure"
        } else {
            ""
        };
        let text = format!(
            "{COOKIE_NAME}={value}; Path={path}; Max-Age={max_age_s}; HttpOnly; SameSite=Lax{secure}"
        );
        HeaderValue::try_from(text)
            .map_err(|_| ProblemKind::BAD_REQUEST.problem("the path of the session is not valid"))
    }
}

/// Whether the sending page is allowed, given the authority of the request.
fn check_page(parts: &Parts, asker: &Asker, authority: Authority) -> Result<(), Box<Problem>> {
    let acts = !is_plain_read(parts);
    if acts && let Asker::Foreign(origin) = asker {
        return Err(ProblemKind::ORIGIN_REFUSED.problem(format!(
            "pages of `{origin}` may not open WebSockets to this session or change anything in \
             it; if one of yours needs to, add its origin to `allowed_origins` under [listen] in \
             the configuration"
        )));
    }
    let ambient = match authority {
        Authority::Explicit => false,
        Authority::Cookie | Authority::Local => true,
    };
    // Browsers send the origin of every state-changing request; a cookie without it is not from a
    // browser.
    if acts && authority == Authority::Cookie && *asker == Asker::Unnamed {
        return Err(ProblemKind::ORIGIN_REFUSED.problem(
            "a cookie alone, without an Origin, does not suffice for this request; clients other \
             than browsers send the token as `Authorization: Bearer TOKEN`",
        ));
    }
    // Browsers send Sec-Fetch-Site only to HTTPS hosts and localhost, and send the origin if a
    // script is to read the answer.
    let elsewhere = match asker {
        Asker::Own | Asker::Allowed => false,
        Asker::Foreign(_) => true,
        Asker::Unnamed => Site::of(&parts.headers) == Site::Elsewhere,
    };
    if ambient && elsewhere {
        return Err(ProblemKind::ORIGIN_REFUSED.problem(
            "a page of another origin made this request (Origin, Sec-Fetch-Site) without a token",
        ));
    }
    Ok(())
}

/// Whether the request neither changes anything nor opens a tunnel, by its HTTP method and headers.
fn is_plain_read(parts: &Parts) -> bool {
    matches!(parts.method, Method::GET | Method::HEAD) && !parts.headers.contains_key(UPGRADE)
}

fn refusal(error: ConnectTokenError, id: &SessionId) -> Box<Problem> {
    ProblemKind::UNAUTHENTICATED.problem(match error {
        ConnectTokenError::Expired => {
            format!("the token for the session `{id}` has expired; get a new one")
        }
        ConnectTokenError::OtherSession => {
            format!("the token does not open the session `{id}`: it is for another one")
        }
        ConnectTokenError::Invalid => {
            "the token is not one of this node's, or was changed on its way".to_owned()
        }
    })
}

/// The request's target, from which the token has been removed.
fn location(parts: &Parts, prefix: &str) -> String {
    let target = parts
        .uri
        .path_and_query()
        .map_or("/", |target| target.as_str());
    // `//x` and `/\x` would refer to the host x; a dot in front makes them paths again.
    let leads_away = prefix.is_empty()
        && target
            .get(1..)
            .is_some_and(|rest| rest.starts_with(['/', '\\']));
    let dot = if leads_away { "/." } else { "" };
    format!("{prefix}{dot}{target}")
}

#[cfg(test)]
mod tests;
