//! Names the caller to another node: the scope, and the percent-encoded name.

use conman_auth::{Caller, CallerOrigin, Scope};
use http::{HeaderMap, HeaderName, HeaderValue};
use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

const X_CONMAN_CALLER: HeaderName = HeaderName::from_static("x-conman-caller");

/// Longest name of a caller that is sent to another node.
const MAX_NAME_CHARS: usize = 200;

/// The header that names the caller.
#[must_use]
pub fn caller_header(caller: &Caller) -> (HeaderName, HeaderValue) {
    let name: String = caller.name.chars().take(MAX_NAME_CHARS).collect();
    let name = utf8_percent_encode(&name, NON_ALPHANUMERIC);
    // A scope and percent-encoded text are always a valid value.
    let value = HeaderValue::from_str(&format!("{} {name}", caller.scope))
        .unwrap_or_else(|_| HeaderValue::from_static("read unknown"));
    (X_CONMAN_CALLER, value)
}

/// The caller on whose behalf another node sends a request; `None` unless it names exactly one.
#[must_use]
pub fn remote_caller(headers: &HeaderMap) -> Option<Caller> {
    let mut values = headers.get_all(X_CONMAN_CALLER).iter();
    let (value, None) = (values.next()?, values.next()) else {
        return None;
    };
    let (scope, name) = value.to_str().ok()?.split_once(' ')?;
    Some(Caller {
        name: percent_decode_str(name).decode_utf8().ok()?.into_owned(),
        scope: scope.parse::<Scope>().ok()?,
        origin: CallerOrigin::Peer,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caller_keeps_name_and_scope_whatever_the_name_is_like() {
        for name in ["frontend", "uid 0", "a b\u{e9}\n%", ""] {
            let caller = Caller {
                name: name.to_owned(),
                scope: Scope::Frontend,
                origin: CallerOrigin::Token,
            };
            let headers = HeaderMap::from_iter([caller_header(&caller)]);
            let read = remote_caller(&headers).expect("a caller");
            assert_eq!((read.name.as_str(), read.scope), (name, Scope::Frontend));
            assert_eq!(read.origin, CallerOrigin::Peer);
        }
    }

    #[test]
    fn a_node_that_names_no_caller_or_two_is_refused() {
        let mut headers = HeaderMap::new();
        assert!(remote_caller(&headers).is_none());
        for value in ["admin", "root x", "admin%20x"] {
            headers.insert(X_CONMAN_CALLER, HeaderValue::from_static(value));
            assert!(remote_caller(&headers).is_none(), "{value}");
        }
        headers.insert(X_CONMAN_CALLER, HeaderValue::from_static("read a"));
        assert!(remote_caller(&headers).is_some());
        headers.append(X_CONMAN_CALLER, HeaderValue::from_static("admin b"));
        assert!(remote_caller(&headers).is_none());
    }
}
