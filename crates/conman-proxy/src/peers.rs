use std::error::Error as _;
use std::fmt;
use std::io;
use std::sync::Arc;

use async_trait::async_trait;
use conman_proto::{Generation, SessionId};
use http::header::{HeaderMap, HeaderName, HeaderValue};
use tokio::net::TcpStream;

use crate::headers::{X_CONMAN_GENERATION, X_CONMAN_SESSION, named_port};
use crate::{Backend, PortRequest, Route, Stream};

/// Why a node refused another one's request as misdirected, only on answers to nodes: nothing was
/// done.
pub static X_CONMAN_MISDIRECTED: HeaderName = HeaderName::from_static("x-conman-misdirected");
/// The path of liveness checks between nodes; the listener answers them itself.
pub const LIVENESS: &str = "/peer/liveness";
/// `hop`: the `Expect` of a request is the entry node's, not the client's.
pub(crate) static X_CONMAN_EXPECT: HeaderName = HeaderName::from_static("x-conman-expect");
/// The one value of [`X_CONMAN_EXPECT`].
pub(crate) const EXPECT_OF_HOP: HeaderValue = HeaderValue::from_static("hop");

const NOT_OWNER: &str = "not-owner";
const NOT_READY: &str = "not-ready";
const REFUSED: &str = "refused";
pub(crate) const NO_ROOM: &str = "no-room";

/// The services behind the listener for the other nodes of the fleet.
pub struct PeerFront {
    /// Authenticates nodes.
    pub accept: Arc<dyn PeerAccept>,
    /// The sessions of this node.
    pub sessions: Arc<dyn OwnSessions>,
    /// The API of this node, for requests that other nodes forward for their callers.
    pub api: Arc<dyn Backend>,
}

/// Accepts connections of other nodes.
#[async_trait]
pub trait PeerAccept: Send + Sync + 'static {
    /// Does the handshake before HTTP, which authenticates the other end. The proxy bounds its time;
    /// cancel safe.
    ///
    /// # Errors
    /// The connection is not a node's. `InvalidData` is logged.
    async fn accept(&self, stream: TcpStream) -> io::Result<Stream>;
}

/// The sessions of this node, for other nodes.
pub trait OwnSessions: Send + Sync + 'static {
    /// The route of a request whose sender believes that this node owns `generation` of the session.
    /// Never waits: the node that the client has reached does.
    ///
    /// # Errors
    /// This node owns neither that generation nor a newer one, or it cannot take requests at present.
    fn own(&self, id: &SessionId, generation: Generation) -> Result<Route, PeerRefusal>;
}

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
    pub(crate) fn of(headers: &HeaderMap) -> Option<Self> {
        match headers.get(&X_CONMAN_MISDIRECTED)?.to_str().ok()? {
            NOT_OWNER => Some(Self::NotOwner),
            NOT_READY => Some(Self::NotReady),
            NO_ROOM => Some(Self::Unreachable(
                "its limit of connections from other nodes is met".to_owned(),
            )),
            _ => Some(Self::Refused),
        }
    }

    /// The reason if the connection shows that the node accepts nothing from this one: its [`Stream`]
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
    pub(crate) fn is(error: &io::Error) -> bool {
        error.kind() == io::ErrorKind::PermissionDenied && error.raw_os_error().is_none()
    }

    pub(crate) fn header(&self) -> HeaderValue {
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

impl fmt::Debug for PeerFront {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("PeerFront").finish_non_exhaustive()
    }
}

/// The target of another node's request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PeerTarget {
    Session(SessionId, Generation, Option<PortRequest>),
    Api,
}

impl PeerTarget {
    /// Reads the fields by which a node names a session; without them the target is the API.
    pub(crate) fn of(headers: &HeaderMap) -> Option<Self> {
        let one = |name: &HeaderName| {
            let mut values = headers.get_all(name).iter();
            (values.next(), values.next().is_none())
        };
        match (one(&X_CONMAN_SESSION), one(&X_CONMAN_GENERATION)) {
            ((None, _), _) => Some(Self::Api),
            ((Some(id), true), (Some(generation), true)) => {
                let id = id.to_str().ok()?.parse().ok()?;
                let generation = generation.to_str().ok()?.parse().ok()?;
                let port = named_port(headers).ok()?;
                Some(Self::Session(id, Generation::new(generation)?, port))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(fields: &[(&'static str, &'static str)]) -> Option<PeerTarget> {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(*name, HeaderValue::from_static(value));
        }
        PeerTarget::of(&headers)
    }

    #[test]
    fn a_node_asks_for_one_generation_of_one_session_or_for_the_api() {
        let (session, generation) = ("x-conman-session", "x-conman-generation");
        let alice = PeerTarget::Session(
            "alice".parse().expect("an id"),
            Generation::new(7).expect("not zero"),
            None,
        );
        assert_eq!(asked(&[(session, "alice"), (generation, "7")]), Some(alice));
        assert_eq!(asked(&[]), Some(PeerTarget::Api));
        let port = "x-conman-port";
        for (text, public_only) in [("80", false), ("80 public", true)] {
            let named = asked(&[(session, "alice"), (generation, "7"), (port, text)]);
            let Some(PeerTarget::Session(.., Some(request))) = named else {
                panic!("{named:?}");
            };
            assert_eq!((request.port, request.public_only), (80, public_only));
        }
        for strange in [
            &[(session, "alice")][..],
            &[(session, "alice"), (generation, "0")],
            &[(session, "Alice"), (generation, "7")],
            &[(session, "alice"), (generation, "7"), (port, "public")],
            &[(session, "alice"), (session, "bob"), (generation, "7")],
            &[(session, "alice"), (generation, "7"), (generation, "8")],
        ] {
            assert_eq!(asked(strange), None, "{strange:?}");
        }
    }

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
