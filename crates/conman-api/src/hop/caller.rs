//! Names the caller to another node.

use conman_auth::{Caller, CallerOrigin, Scope};
use http::{HeaderMap, HeaderValue};
use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

use super::X_CONMAN_CALLER;
use crate::problem::{ApiError, Kind};

/// Longest name of a caller that is sent to another node.
const MAX_NAME_CHARS: usize = 200;

/// The header value that names the caller.
pub(super) fn to_header(caller: &Caller) -> HeaderValue {
    let name: String = caller.name.chars().take(MAX_NAME_CHARS).collect();
    let name = utf8_percent_encode(&name, NON_ALPHANUMERIC);
    // A scope and percent-encoded text are always a valid value.
    HeaderValue::from_str(&format!("{} {name}", caller.scope))
        .unwrap_or_else(|_| HeaderValue::from_static("read unknown"))
}

/// The caller on whose behalf another node sends a request.
pub(crate) fn of_peer(headers: &HeaderMap) -> Result<Caller, ApiError> {
    let mut values = headers.get_all(X_CONMAN_CALLER).iter();
    let (value, second) = (values.next(), values.next());
    let named = value.filter(|_| second.is_none());
    let caller = named.and_then(|value| {
        let (scope, name) = value.to_str().ok()?.split_once(' ')?;
        Some(Caller {
            name: percent_decode_str(name).decode_utf8().ok()?.into_owned(),
            scope: scope.parse::<Scope>().ok()?,
            origin: CallerOrigin::Peer,
        })
    });
    caller.ok_or_else(|| {
        Kind::BAD_REQUEST.because("the request of the other node does not name its caller")
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
            let mut headers = HeaderMap::new();
            headers.insert(X_CONMAN_CALLER, to_header(&caller));
            let read = of_peer(&headers).expect("a caller");
            assert_eq!((read.name.as_str(), read.scope), (name, Scope::Frontend));
            assert_eq!(read.origin, CallerOrigin::Peer);
        }
    }

    #[test]
    fn a_node_that_names_no_caller_or_two_is_refused() {
        let mut headers = HeaderMap::new();
        assert!(of_peer(&headers).is_err());
        for value in ["admin", "root x", "admin%20x"] {
            headers.insert(X_CONMAN_CALLER, HeaderValue::from_static(value));
            assert!(of_peer(&headers).is_err(), "{value}");
        }
        headers.insert(X_CONMAN_CALLER, HeaderValue::from_static("read a"));
        headers.append(X_CONMAN_CALLER, HeaderValue::from_static("admin b"));
        assert!(of_peer(&headers).is_err());
    }
}
