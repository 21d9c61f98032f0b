//! Removes conman's credentials from a request for a session, and leaves everything else unchanged:
//! a session may have tokens, subprotocols and cookies too.

use http::header::{AUTHORIZATION, COOKIE, HeaderName, SEC_WEBSOCKET_PROTOCOL};
use http::request::Parts;
use http::uri::{PathAndQuery, Uri};
use http::{HeaderMap, HeaderValue};
use percent_encoding::percent_decode_str;

use crate::{Caller, TokenFile, bearer, connect_tokens};

/// The cookie that a token in the URL is exchanged for.
pub(crate) const COOKIE_NAME: &str = "conman_session";

/// The query parameter of a token in the URL.
pub(crate) const QUERY_NAME: &str = "conman_token";

/// Prefix of a subprotocol that contains a token.
pub(crate) const SUBPROTOCOL_PREFIX: &str = "conman.token.";

/// Maximum number of credentials of one kind that are checked; further ones are removed unchecked.
/// Several cookies of one name come from several paths, or from malicious pages.
const MAX_OF_A_KIND: usize = 8;

/// The credentials of a request.
#[derive(Debug, Default)]
pub(crate) struct Credentials {
    /// Valid bearer tokens of the token file.
    pub(crate) callers: Vec<Caller>,
    /// Bearer tokens with conman's prefix that are not in the token file.
    pub(crate) unknown_bearers: usize,
    /// Connect tokens as bearer token or subprotocol.
    pub(crate) connect: Vec<String>,
    /// Connect tokens in the URL.
    pub(crate) url: Vec<String>,
    pub(crate) cookies: Vec<String>,
    /// The subprotocol that was removed, if it was the only one offered.
    pub(crate) only_subprotocol: Option<HeaderValue>,
}

impl Credentials {
    /// Removes the credentials from `parts`.
    pub(crate) fn take(parts: &mut Parts, tokens: Option<&TokenFile>) -> Self {
        let mut taken = Self::default();
        taken.take_bearers(&mut parts.headers, tokens);
        taken.take_subprotocols(&mut parts.headers);
        taken.take_cookies(&mut parts.headers);
        taken.take_from_url(&mut parts.uri);
        taken
    }

    /// Whether the request has any credential except cookies, valid or not.
    pub(crate) fn any_explicit(&self) -> bool {
        self.unknown_bearers > 0
            || !self.callers.is_empty()
            || !self.connect.is_empty()
            || !self.url.is_empty()
    }

    fn take_bearers(&mut self, headers: &mut HeaderMap, tokens: Option<&TokenFile>) {
        let mut seen = 0;
        retain(headers, AUTHORIZATION, |value| {
            let Some(token) = bearer::of_header(value.as_bytes()) else {
                return true;
            };
            seen += 1;
            let caller = tokens
                .filter(|_| seen <= MAX_OF_A_KIND)
                .and_then(|all| all.find(token));
            if let Some(caller) = caller {
                self.callers.push(caller);
            } else if bearer::looks_like_ours(token) {
                self.unknown_bearers += 1;
            } else if connect_tokens::looks_like_ours(token) {
                push(&mut self.connect, token);
            } else {
                return true;
            }
            false
        });
    }

    fn take_subprotocols(&mut self, headers: &mut HeaderMap) {
        let is_ours = |offer: &[u8]| offer.starts_with(SUBPROTOCOL_PREFIX.as_bytes());
        let (ours, others): (Vec<Vec<u8>>, Vec<Vec<u8>>) = headers
            .get_all(SEC_WEBSOCKET_PROTOCOL)
            .iter()
            .flat_map(|value| value.as_bytes().split(|byte| *byte == b','))
            .map(|offer| offer.trim_ascii().to_vec())
            .filter(|offer| !offer.is_empty())
            .partition(|offer| is_ours(offer));
        if ours.is_empty() {
            return;
        }
        for offer in &ours {
            let token = String::from_utf8_lossy(&offer[SUBPROTOCOL_PREFIX.len()..]);
            push(&mut self.connect, &token);
        }
        headers.remove(SEC_WEBSOCKET_PROTOCOL);
        if others.is_empty() {
            self.only_subprotocol = HeaderValue::from_bytes(&ours[0]).ok();
        } else if let Ok(value) = HeaderValue::from_bytes(&others.join(&b", "[..])) {
            headers.insert(SEC_WEBSOCKET_PROTOCOL, value);
        }
    }

    fn take_cookies(&mut self, headers: &mut HeaderMap) {
        let values: Vec<HeaderValue> = headers.get_all(COOKIE).iter().cloned().collect();
        if !values
            .iter()
            .any(|value| pairs(value).any(|pair| our_cookie(pair).is_some()))
        {
            return;
        }
        headers.remove(COOKIE);
        for value in values {
            for token in pairs(&value).filter_map(our_cookie) {
                push(&mut self.cookies, &String::from_utf8_lossy(token));
            }
            let others: Vec<&[u8]> = pairs(&value)
                .filter(|pair| our_cookie(pair).is_none())
                .collect();
            let others = others.join(&b';');
            if let Ok(others) = HeaderValue::from_bytes(others.trim_ascii())
                && !others.is_empty()
            {
                headers.append(COOKIE, others);
            }
        }
    }

    fn take_from_url(&mut self, uri: &mut Uri) {
        let Some((path, query)) = uri.path_and_query().and_then(split_query) else {
            return;
        };
        let of_token = |parameter: &str| parameter.split('=').next() == Some(QUERY_NAME);
        if !query.split('&').any(of_token) {
            return;
        }
        for parameter in query.split('&').filter(|parameter| of_token(parameter)) {
            let value = parameter.split_once('=').map_or("", |(_, value)| value);
            push(
                &mut self.url,
                &percent_decode_str(value).decode_utf8_lossy(),
            );
        }
        let others: Vec<&str> = query.split('&').filter(|one| !of_token(one)).collect();
        let target = if others.is_empty() {
            path
        } else {
            format!("{path}?{}", others.join("&"))
        };
        // A prefix of a valid target that ends at a parameter boundary is valid.
        if let Ok(target) = target.parse() {
            *uri = target;
        }
    }
}

fn push(list: &mut Vec<String>, token: &str) {
    if list.len() < MAX_OF_A_KIND {
        list.push(token.to_owned());
    }
}

/// Keeps the values for which `keep` returns true, in order.
fn retain(headers: &mut HeaderMap, name: HeaderName, mut keep: impl FnMut(&HeaderValue) -> bool) {
    let values: Vec<HeaderValue> = headers.get_all(&name).iter().cloned().collect();
    let before = values.len();
    let kept: Vec<HeaderValue> = values.into_iter().filter(|value| keep(value)).collect();
    if kept.len() < before {
        headers.remove(&name);
        for value in kept {
            headers.append(name.clone(), value);
        }
    }
}

fn pairs(value: &HeaderValue) -> impl Iterator<Item = &[u8]> {
    value.as_bytes().split(|byte| *byte == b';')
}

fn our_cookie(pair: &[u8]) -> Option<&[u8]> {
    let equals = pair.iter().position(|byte| *byte == b'=')?;
    let (name, value) = (&pair[..equals], &pair[equals + 1..]);
    (name.trim_ascii() == COOKIE_NAME.as_bytes()).then(|| value.trim_ascii())
}

fn split_query(target: &PathAndQuery) -> Option<(String, String)> {
    target
        .query()
        .map(|query| (target.path().to_owned(), query.to_owned()))
}

#[cfg(test)]
mod tests {
    use http::Request;
    use proptest::prelude::*;

    use super::*;

    fn parts(target: &str, headers: &[(HeaderName, &str)]) -> Parts {
        let mut request = Request::get(target);
        for (name, value) in headers {
            request = request.header(name, *value);
        }
        request.body(()).expect("a request").into_parts().0
    }

    fn values(parts: &Parts, name: HeaderName) -> Vec<&str> {
        parts
            .headers
            .get_all(name)
            .iter()
            .map(|v| v.to_str().expect("text"))
            .collect()
    }

    #[test]
    fn a_request_without_credentials_stays_byte_for_byte_as_it_was() {
        let headers = [
            (AUTHORIZATION, "Bearer the.sessions.own"),
            (AUTHORIZATION, "Basic cm9vdDpyb290"),
            (SEC_WEBSOCKET_PROTOCOL, "chat ,  superchat"),
            (
                COOKIE,
                "a=1;b=2 ;  _xsrf=\"x\"; conman_session2=y; xconman_session=z",
            ),
            (COOKIE, "conman_session"),
        ];
        let before = parts("/x?conman_tokens=1&a=conman_token=2&&", &headers);
        let mut after = before.clone();
        let taken = Credentials::take(&mut after, None);
        assert!(!taken.any_explicit() && taken.cookies.is_empty());
        assert_eq!(after.headers, before.headers);
        assert_eq!(after.uri, before.uri);
    }

    #[test]
    fn our_cookie_goes_and_the_others_keep_their_bytes() {
        for (given, left, taken) in [
            ("conman_session=t", "", "t"),
            ("conman_session=t; a=1", "a=1", "t"),
            ("a=1; conman_session=t", "a=1", "t"),
            (
                "a=\"x y\" ;conman_session=t;  b=2==",
                "a=\"x y\" ;  b=2==",
                "t",
            ),
            (" conman_session =t", "", "t"),
            ("a=1; conman_session=; b", "a=1; b", ""),
        ] {
            let mut parts = parts("/", &[(COOKIE, given)]);
            let credentials = Credentials::take(&mut parts, None);
            assert_eq!(credentials.cookies, [taken], "{given}");
            assert_eq!(values(&parts, COOKIE).join("|"), left, "{given}");
        }
    }

    #[test]
    fn our_subprotocol_goes_and_the_others_stay_in_their_order() {
        for (given, left, only) in [
            (&["conman.token.t"][..], &[][..], true),
            (&["conman.token.t, chat"], &["chat"], false),
            (
                &["chat,conman.token.t,superchat"],
                &["chat, superchat"],
                false,
            ),
            (&["chat", "conman.token.t"], &["chat"], false),
            (&["conman.token.t", "conman.token.t"], &[], true),
        ] {
            let headers: Vec<_> = given.iter().map(|v| (SEC_WEBSOCKET_PROTOCOL, *v)).collect();
            let mut parts = parts("/", &headers);
            let credentials = Credentials::take(&mut parts, None);
            assert_eq!(credentials.connect[0], "t", "{given:?}");
            assert_eq!(values(&parts, SEC_WEBSOCKET_PROTOCOL), left, "{given:?}");
            assert_eq!(credentials.only_subprotocol.is_some(), only, "{given:?}");
        }
    }

    #[test]
    fn our_parameter_goes_and_the_rest_of_the_url_keeps_its_bytes() {
        for (given, left, taken) in [
            ("/?conman_token=t", "/", "t"),
            (
                "/a%2fb/../c?conman_token=t&x=%41+b&&y",
                "/a%2fb/../c?x=%41+b&&y",
                "t",
            ),
            ("/?x=1&conman_token=a%2Eb&y=2", "/?x=1&y=2", "a.b"),
            ("/?x=1&conman_token", "/?x=1", ""),
            ("//evil?conman_token=t", "//evil", "t"),
        ] {
            let mut parts = parts(given, &[]);
            let credentials = Credentials::take(&mut parts, None);
            assert_eq!(credentials.url, [taken], "{given}");
            assert_eq!(parts.uri.to_string(), left, "{given}");
        }
    }

    #[test]
    fn bearers_that_claim_to_be_ours_go_even_when_unknown() {
        let headers = [
            (AUTHORIZATION, "Bearer cmn_admin_x"),
            (AUTHORIZATION, "bearer v4.local.x"),
            (AUTHORIZATION, "Bearer other"),
        ];
        let mut parts = parts("/", &headers);
        let credentials = Credentials::take(&mut parts, None);
        assert_eq!(credentials.unknown_bearers, 1);
        assert_eq!(credentials.connect, ["v4.local.x"]);
        assert_eq!(values(&parts, AUTHORIZATION), ["Bearer other"]);
    }

    #[test]
    fn more_credentials_than_anyone_needs_are_taken_out_unseen() {
        let cookies = vec!["conman_session=t"; 50].join("; ");
        let mut parts = parts("/", &[(COOKIE, &cookies)]);
        assert_eq!(
            Credentials::take(&mut parts, None).cookies.len(),
            MAX_OF_A_KIND
        );
        assert_eq!(values(&parts, COOKIE), Vec::<&str>::new());
    }

    proptest! {
        #[test]
        fn no_credential_of_ours_is_left_behind(
            cookie in "((conman_session|a)=?[a-z]{0,2};? ?){0,6}",
            query in "((conman_token|a)=?[a-z]{0,2}&?){0,6}",
            offers in "((conman\\.token\\.|a)[a-z]{0,2},? ?){0,6}",
        ) {
            let headers = [(COOKIE, cookie.as_str()), (SEC_WEBSOCKET_PROTOCOL, offers.as_str())];
            let mut parts = parts(&format!("/?{query}"), &headers);
            Credentials::take(&mut parts, None);
            let again = Credentials::take(&mut parts.clone(), None);
            prop_assert!(again.cookies.is_empty());
            prop_assert!(!again.any_explicit());
        }
    }
}
