//! The destinations of a worker's connections, and the pool of idle ones.

use std::sync::Arc;
use std::time::Duration;

use conman_peer::KeepLimits;
use conman_proto::SessionId;

use crate::body::RequestBody;
use crate::{Route, Way};

/// Idle connections to one generation of a session.
const TO_SESSION: KeepLimits = KeepLimits {
    most: 16,
    max_age: Duration::MAX,
};
/// Idle connections to another node, or to this node's API. The maximum age makes a replaced certificate of
/// the other node take effect.
const TO_NODE: KeepLimits = KeepLimits {
    most: 128,
    max_age: Duration::from_secs(60),
};

/// The end of a connection.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum ConnectionTarget {
    Session(SessionId, Option<u16>),
    Peer(Arc<str>),
    Api,
}

/// The idle connections of one worker.
///
/// Only connections of a session's greatest generation seen so far are kept, so an older
/// generation's can never carry a request of a newer one, or vice versa. Connections to a node
/// carry requests for all of its sessions, each with its generation, and are separated by the
/// node's incarnation and by this node's certificates.
pub(crate) type Pool = conman_peer::Pool<ConnectionTarget, RequestBody>;

pub(crate) type Lease = conman_peer::Lease<ConnectionTarget, RequestBody>;
pub(crate) type Destination = conman_peer::Destination<ConnectionTarget>;

pub(crate) fn pool(idle_timeout: Duration) -> Arc<Pool> {
    Arc::new(Pool::new(idle_timeout, |end| match end {
        ConnectionTarget::Session(..) => TO_SESSION,
        ConnectionTarget::Peer(_) | ConnectionTarget::Api => TO_NODE,
    }))
}

/// The destination of a route's connections.
pub(crate) fn of(route: &Route) -> Destination {
    let (key, version) = match &route.way {
        Way::Session => {
            let port = route.port.map(|request| request.port);
            let key = ConnectionTarget::Session(route.session.clone(), port);
            (key, (route.generation.get(), 0))
        }
        Way::Peer { node, incarnation } => {
            let version = (*incarnation, route.backend.certificates());
            (ConnectionTarget::Peer(Arc::clone(node)), version)
        }
        Way::Api => (ConnectionTarget::Api, (0, 0)),
    };
    Destination { key, version }
}
