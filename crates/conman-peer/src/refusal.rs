//! Why a node refuses a request of another one.

use std::error::Error as _;
use std::fmt;
use std::io;

use http::header::{HeaderMap, HeaderValue};

use crate::headers::X_CONMAN_MISDIRECTED;

// The values of the field.
const NOT_OWNER: &str = "not-owner";
const NOT_READY: &str = "not-ready";
const REFUSED: &str = "refused";
/// The node's limit of connections is met.
pub const NO_ROOM: &str = "no-room";

/// Why another node refused a request as misdirected; nothing of its body was sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeerRefusal {
    /// It does not own the session.
    NotOwner,
    /// It owns the session, which is starting, ending or frozen.
    NotReady,
    /// It cannot be connected to, or accepts no more connections.
    Unreachable(String),
    /// It and this node do not accept each other as nodes of one fleet.
    Refused,
}

impl PeerRefusal {
    /// The reason in an answer, if that refuses the request.
    #[must_use]
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        match headers.get(&X_CONMAN_MISDIRECTED)?.to_str().ok()? {
            NOT_OWNER => Some(Self::NotOwner),
            NOT_READY => Some(Self::NotReady),
            NO_ROOM => Some(Self::Unreachable(
                "its limit of connections from other nodes is met".to_owned(),
            )),
            _ => Some(Self::Refused),
        }
    }

    /// The reason if the connection shows that the node accepts nothing from this one: its stream
    /// has failed with [`io::ErrorKind::PermissionDenied`].
    #[must_use]
    pub fn by(error: &hyper::Error) -> Option<Self> {
        let mut cause = error.source();
        while let Some(error) = cause {
            if error.downcast_ref().is_some_and(Self::is) {
                return Some(Self::Refused);
            }
            cause = error.source();
        }
        None
    }

    /// Whether the two nodes do not accept each other: [`io::ErrorKind::PermissionDenied`], which
    /// is not the system's.
    #[must_use]
    pub fn is(error: &io::Error) -> bool {
        error.kind() == io::ErrorKind::PermissionDenied && error.raw_os_error().is_none()
    }

    /// The value of `X-Conman-Misdirected`.
    #[must_use]
    pub fn header(&self) -> HeaderValue {
        HeaderValue::from_static(match self {
            Self::NotOwner => NOT_OWNER,
            Self::NotReady => NOT_READY,
            Self::Unreachable(_) => NO_ROOM,
            Self::Refused => REFUSED,
        })
    }
}

impl fmt::Display for PeerRefusal {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotOwner => formatter.write_str("it does not own the session"),
            Self::NotReady => {
                formatter.write_str("the session cannot take requests there at present")
            }
            Self::Unreachable(why) => write!(formatter, "it cannot be reached: {why}"),
            Self::Refused => formatter.write_str(
                "it and this node do not accept each other as nodes of one fleet; see their logs",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_of_a_refusal_is_read_as_it_was_written() {
        for refusal in [PeerRefusal::NotOwner, PeerRefusal::NotReady] {
            let mut headers = HeaderMap::new();
            headers.insert(&X_CONMAN_MISDIRECTED, refusal.header());
            assert_eq!(PeerRefusal::of(&headers), Some(refusal));
        }
        assert_eq!(PeerRefusal::of(&HeaderMap::new()), None);
    }
}
