//! The listener for the other nodes of the fleet: what stands behind it, and what they request.

use std::fmt;
use std::sync::Arc;

use conman_peer::headers::{X_CONMAN_GENERATION, X_CONMAN_SESSION};
use conman_peer::{PeerAccept, PeerRefusal};
use conman_proto::{Generation, SessionId};
use http::header::{HeaderMap, HeaderName, HeaderValue};

use crate::headers::named_port;
use crate::{Backend, PortRequest, Route};

/// `hop`: the `Expect` of a request is the entry node's, not the client's.
pub(crate) static X_CONMAN_EXPECT: HeaderName = HeaderName::from_static("x-conman-expect");
/// The one value of [`X_CONMAN_EXPECT`].
pub(crate) const EXPECT_OF_NODE: HeaderValue = HeaderValue::from_static("hop");

/// The services behind the listener for the other nodes of the fleet.
pub struct PeerFront {
    /// Authenticates nodes.
    pub accept: Arc<dyn PeerAccept>,
    /// The sessions of this node.
    pub sessions: Arc<dyn OwnSessions>,
    /// The API of this node, for requests that other nodes forward for their callers.
    pub api: Arc<dyn Backend>,
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
}
