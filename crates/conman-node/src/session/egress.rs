//! Serves the egress proxy and the resolver inside a session's network namespace.

use std::sync::Arc;

use conman_core::egress::EgressRules;
use conman_linux::PidFd;
use conman_net::egress::{EgressGuard, EgressService, EgressSockets};
use conman_proto::{EventKind, Generation};

use super::handle::SessionHandle;
use crate::context::Context;

/// Begins to serve; `None` if the spec has neither `egress` nor `talk`, or the host's rules alone serve it.
pub(super) fn serve(
    context: &Arc<Context>,
    handle: &SessionHandle,
    generation: Generation,
    process: &Arc<PidFd>,
    sockets: Option<EgressSockets>,
) -> Option<EgressGuard> {
    let spec = handle.spec();
    if !spec.has_resolver() {
        return None;
    }
    let service = match EgressRules::parse(&spec.egress) {
        _ if !spec.has_egress_proxy() => EgressService::TalkNames {
            groups: spec.talk.clone(),
        },
        Ok(rules) => EgressService::Proxy(rules),
        // A resolved spec parses, unless a newer version has recorded it.
        Err(error) => {
            tracing::warn!(session = %handle.id, %error, "a recorded egress pattern is unknown");
            return None;
        }
    };
    let (noting, id) = (Arc::clone(context), handle.id.clone());
    let on_refusal = Box::new(move |sentence: String| {
        noting.note_session(EventKind::EgressRefused, &id, generation, sentence);
    });
    let traffic = Arc::clone(&handle.traffic);
    Some(
        context
            .egress
            .serve(Arc::clone(process), sockets, service, traffic, on_refusal),
    )
}
