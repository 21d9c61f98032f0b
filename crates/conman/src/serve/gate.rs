//! The proxy's gate: which caller may connect to a session.

use conman_auth::{SessionGuard, SessionVerdict};
use conman_proto::SessionId;
use conman_proxy::{Gate, SubprotocolAnswer, Verdict};
use http::request::Parts;

/// Implements the proxy's gate by the session guard.
#[derive(Debug)]
pub(super) struct SessionGate {
    guard: SessionGuard,
}

impl SessionGate {
    pub(super) fn new(guard: SessionGuard) -> Self {
        Self { guard }
    }
}

impl Gate for SessionGate {
    fn admit(&self, parts: &mut Parts, id: &SessionId, prefix: &str) -> Verdict {
        match self.guard.admit(parts, id, prefix) {
            SessionVerdict::Admit {
                may_start,
                subprotocol,
            } => {
                if let Some(subprotocol) = subprotocol {
                    parts.extensions.insert(SubprotocolAnswer(subprotocol));
                }
                Verdict::Admit { may_start }
            }
            SessionVerdict::Redirect {
                location,
                set_cookie,
            } => Verdict::Redirect {
                location,
                set_cookie,
            },
            SessionVerdict::Deny(problem) => Verdict::Deny(problem),
        }
    }
}
