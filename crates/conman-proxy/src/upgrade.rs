//! Forwards requests to change the protocol, and starts their tunnels.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use conman_core::{ActivityGuard, CLOSING_SPREAD, QUICK_CLOSING_SPREAD};
use conman_peer::headers::{connection_has, strip_forged, strip_hop_by_hop};
use conman_peer::{ConnectionIo, PeerRefusal, Protocol, Side, Stream, Tunnel, TunnelOptions};
use http::header::{
    CONNECTION, CONTENT_LENGTH, HeaderMap, HeaderValue, SEC_WEBSOCKET_PROTOCOL, UPGRADE,
};
use http::request::Parts;
use http::{Method, Request, Response, StatusCode, Version};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::answer::{RequestFault, Unforwarded};
use crate::body::{Fault, RequestBody, ResponseBody};
use crate::client_io::ClientIo;
use crate::destination::Lease;
use crate::forward::{self, bad_answer, session_response};
use crate::peer_request::{self, Tried};
use crate::worker::{ClientConnection, PanicGuard, ProxyStage};
use crate::{Route, SubprotocolAnswer, Way};

/// How long a tunnel whose session has disappeared waits for the reason.
///
/// The kernel closes a killed program's sockets at once. The session's death and move are known
/// only after its death certificate, which takes seconds if a thousand die together.
const DEATH_GRACE: Duration = Duration::from_secs(5);

/// Number of groups that the tunnels of a node that leaves are closed in.
const CLOSING_GROUPS: u32 = 40;

/// A well-formed request to change the protocol.
#[derive(Debug)]
pub(crate) struct Offer {
    /// The one requested protocol, as the client wrote it.
    protocol: HeaderValue,
    on_client: OnUpgrade,
}

impl Offer {
    /// The upgrade of a request, if it has one that can be forwarded.
    ///
    /// Everything else is served as an ordinary request without its `Upgrade`, which a server may
    /// always ignore (RFC 9110, section 7.8): several protocols at once, a body, another method,
    /// HTTP/1.0. So is `h2c`, since requests in such a tunnel would bypass the gate.
    pub(crate) fn of(parts: &mut Parts, has_body: bool) -> Option<Self> {
        let mut protocols = parts.headers.get_all(UPGRADE).iter();
        let protocol = protocols.next()?.clone();
        let name = protocol.to_str().ok()?;
        let well_formed = protocols.next().is_none()
            && parts.method == Method::GET
            && parts.version == Version::HTTP_11
            && !has_body
            && connection_has(&parts.headers, "upgrade")
            && !name.is_empty()
            && !name.contains([',', ' ', '\t'])
            && !is_http(name);
        if !well_formed {
            return None;
        }
        let on_client = parts.extensions.remove::<OnUpgrade>()?;
        Some(Self {
            protocol,
            on_client,
        })
    }

    fn protocol(&self) -> Protocol {
        if self.protocol.as_bytes().eq_ignore_ascii_case(b"websocket") {
            Protocol::WebSocket
        } else {
            Protocol::Other
        }
    }
}

/// Whether an upgrade to this would carry further HTTP requests.
fn is_http(name: &str) -> bool {
    let name = name.split('/').next().unwrap_or(name);
    ["h2c", "h2", "http"]
        .iter()
        .any(|http| name.eq_ignore_ascii_case(http))
}

/// Forwards an upgrade on a new connection. Bytes that the client sent after the request's head
/// stay in hyper's buffer until the session has agreed.
///
/// `offer` is kept if another node refuses the request.
pub(crate) async fn forward(
    client: &ClientConnection,
    route: &Route,
    mut parts: Parts,
    offer: &mut Option<Offer>,
) -> Result<Tried, Unforwarded> {
    let Some(protocol) = offer.as_ref().map(|offer| offer.protocol.clone()) else {
        return Err(RequestFault::Ambiguous.into());
    };
    let activity = route.activity.begin();
    parts
        .headers
        .insert(CONNECTION, HeaderValue::from_static("upgrade"));
    parts.headers.insert(UPGRADE, protocol.clone());
    let answer_protocol = parts.extensions.remove::<SubprotocolAnswer>();
    let request = Request::from_parts(parts, RequestBody::empty());
    let fault = Fault::default();
    let is_peer = matches!(route.way, Way::Peer { .. });
    let sent = match is_peer {
        true => peer_request::to_node(client, route, false, request, &fault).await?,
        false => Ok(forward::send(client, route, false, request, &fault).await?),
    };
    let (mut response, lease) = match sent {
        Ok(sent) => sent,
        Err(refusal) => return Ok(Tried::Refused(refusal)),
    };
    if response.status() != StatusCode::SWITCHING_PROTOCOLS {
        if is_peer && let Some(refusal) = PeerRefusal::of(response.headers()) {
            return Ok(Tried::Refused(refusal));
        }
        return session_response(client, route, false, response, None, activity)
            .map(|response| Tried::Answered(Box::new(response)));
    }
    let offer = match offer.take() {
        Some(offer) if agrees(response.headers(), &protocol) => offer,
        Some(_) | None => {
            let why = "a change to another protocol than the requested one";
            return Err(bad_answer(route, why));
        }
    };
    let on_session = hyper::upgrade::on(&mut response);
    let (mut head, _no_body) = response.into_parts();
    // The spelling of the fields' names stays.
    head.extensions.remove::<OnUpgrade>();
    let headers = switching_headers(head.headers, &offer, answer_protocol);
    spawn_tunnel(client, route, offer, on_session, lease, activity);
    let mut response = Response::new(ResponseBody::own(Bytes::new()));
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    *response.headers_mut() = headers;
    *response.extensions_mut() = head.extensions;
    Ok(Tried::Answered(Box::new(response)))
}

/// Starts the task that copies bytes between the client and the session. It keeps the session active,
/// and the client's connection counted, until it ends.
fn spawn_tunnel(
    client: &ClientConnection,
    route: &Route,
    offer: Offer,
    on_session: OnUpgrade,
    lease: Lease,
    activity: ActivityGuard,
) {
    let protocol = offer.protocol();
    let worker = Arc::clone(&client.worker);
    let admission = Arc::clone(&client.admission);
    let closing = route.closing.clone();
    client.worker.tasks.spawn(async move {
        // Both sides become tunnels as soon as the 101 has passed. An error means that one of them is
        // gone; dropping the other closes it.
        let (Ok(client), Ok(session)) = tokio::join!(offer.on_client, on_session) else {
            return;
        };
        drop(lease);
        let (Some(client), Some(session)) = (client_side(client), session_side(session)) else {
            return;
        };
        let _guard = PanicGuard::new(&worker.meters);
        let _counted = worker.meters.tunnel();
        let group = worker.meters.group(CLOSING_GROUPS);
        let options = TunnelOptions {
            write_stall_timeout: worker.options.write_stall_timeout,
            reason_timeout: DEATH_GRACE,
            to_session_bytes: worker.meters.to_session_bytes.clone(),
            to_client_bytes: worker.meters.to_client_bytes.clone(),
        };
        Tunnel::new(client, session, protocol, options, closing)
            .run(is_closed(worker.stage.clone(), group))
            .await;
        drop((activity, admission));
    });
}

/// Ready once the proxy closes the tunnels of this group, after the node begins to close connections, or at once
/// when the proxy stops. A tunnel that opens after that begin, because its handshake was held, is closed at once:
/// the machine may be gone before a spread that begins now has passed.
fn is_closed(mut stage: watch::Receiver<ProxyStage>, group: u32) -> impl Future<Output = ()> {
    let is_late = *stage.borrow() >= ProxyStage::Closing;
    async move {
        if is_late {
            return;
        }
        let after = |spread: Duration| spread / CLOSING_GROUPS * group;
        // A dropped sender is the end, too.
        let _ = stage.wait_for(|stage| *stage >= ProxyStage::Closing).await;
        let hurries = stage.wait_for(|stage| *stage >= ProxyStage::ClosingQuickly);
        let waited = timeout(after(CLOSING_SPREAD), hurries).await.is_err();
        if !waited {
            let stopped = stage.wait_for(|stage| *stage >= ProxyStage::Draining);
            let _ = timeout(after(QUICK_CLOSING_SPREAD), stopped).await;
        }
    }
}

/// Whether the 101 changes to exactly the requested protocol.
fn agrees(headers: &HeaderMap, protocol: &HeaderValue) -> bool {
    let mut answered = headers.get_all(UPGRADE).iter();
    let same = answered
        .next()
        .is_some_and(|answer| answer.as_bytes().eq_ignore_ascii_case(protocol.as_bytes()));
    same && answered.next().is_none()
}

fn switching_headers(
    mut headers: HeaderMap,
    offer: &Offer,
    answer_protocol: Option<SubprotocolAnswer>,
) -> HeaderMap {
    strip_hop_by_hop(&mut headers);
    strip_forged(&mut headers, false);
    headers.remove(CONTENT_LENGTH);
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, offer.protocol.clone());
    if let Some(SubprotocolAnswer(value)) = answer_protocol {
        headers.entry(SEC_WEBSOCKET_PROTOCOL).or_insert(value);
    }
    headers
}

fn client_side(upgraded: Upgraded) -> Option<Side<Stream>> {
    let parts = upgraded.downcast::<TokioIo<ClientIo>>().ok()?;
    let (stream, rest) = parts.io.into_inner().into_parts();
    let read_already = if rest.is_empty() {
        parts.read_buf
    } else {
        Bytes::from([&parts.read_buf[..], &rest].concat())
    };
    Some(Side {
        stream,
        read_already,
    })
}

fn session_side(upgraded: Upgraded) -> Option<Side<Stream>> {
    let parts = upgraded.downcast::<TokioIo<ConnectionIo>>().ok()?;
    Some(Side {
        stream: parts.io.into_inner().into_stream(),
        read_already: parts.read_buf,
    })
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn tunnels_are_closed_over_the_time_that_the_machine_has() {
        for (closes, spread) in [
            (ProxyStage::Closing, CLOSING_SPREAD),
            (ProxyStage::ClosingQuickly, QUICK_CLOSING_SPREAD),
            (ProxyStage::Draining, Duration::ZERO),
        ] {
            let (stage, seen) = watch::channel(ProxyStage::Announced);
            let tunnels = (0..CLOSING_GROUPS).map(|group| is_closed(seen.clone(), group));
            let tunnels = futures_util::future::join_all(tunnels);
            let began = Instant::now();
            stage.send_replace(closes);
            tunnels.await;
            let took = began.elapsed();
            assert!(
                (spread * 9 / 10..=spread).contains(&took),
                "{closes:?}: {took:?}"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_tunnel_that_opens_after_the_node_began_to_close_tunnels_is_closed_at_once() {
        for closes in [ProxyStage::Closing, ProxyStage::ClosingQuickly] {
            let (_stage, seen) = watch::channel(closes);
            let began = Instant::now();
            is_closed(seen, CLOSING_GROUPS - 1).await;
            assert_eq!(began.elapsed(), Duration::ZERO, "{closes:?}");
        }
    }
}
