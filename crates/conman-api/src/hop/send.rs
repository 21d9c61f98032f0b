//! Sends a request to another node, and returns its answer.

use axum::body::Body;
use axum::extract::Request;
use axum::response::Response;
use bytes::Bytes;
use conman_auth::Caller;
use conman_core::Closing;
use conman_fleet::{AskError, Node};
use conman_proto::Generation;
use http::header::{
    AUTHORIZATION, CONNECTION, CONTENT_LENGTH, COOKIE, EXPECT, HOST, HeaderMap, HeaderName,
    HeaderValue, ORIGIN, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRANSFER_ENCODING, UPGRADE,
};
use http::request::Parts;
use http::{Method, StatusCode, Uri};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::sync::watch;

use super::caller::to_header;
use super::until_gone::UntilGone;
use super::{BodyLimit, ByPeer, Hop, X_CONMAN_CALLER, X_CONMAN_ENDED, X_CONMAN_GENERATION};
use crate::json_body;
use crate::node_errors::chain;
use crate::problem::{ApiError, Kind};

/// Buffer of a tunnel between two nodes, in each direction.
const TUNNEL_BUFFER_BYTES: usize = 16 * 1024;

/// Headers that end at this node: those of the connection, and the caller's credentials.
const OWN: [HeaderName; 13] = [
    AUTHORIZATION,
    CONNECTION,
    CONTENT_LENGTH,
    COOKIE,
    EXPECT,
    HOST,
    ORIGIN,
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRANSFER_ENCODING,
    UPGRADE,
    HeaderName::from_static("keep-alive"),
];

/// The generation that a request is about.
#[derive(Debug, Clone, Copy)]
pub(super) struct About {
    pub(super) generation: Generation,
    pub(super) ended: bool,
}

/// A request with its small body, which can be sent more than once.
pub(super) struct Parcel {
    pub(super) parts: Parts,
    pub(super) body: Bytes,
}

/// Why there is no answer.
pub(super) enum Unsent {
    /// Nothing was sent, or nothing that may not be repeated; as text, with the node and the remedy.
    Unreachable(String),
    /// Nothing was done: the node does not accept this one.
    Refused(ApiError),
    /// It may have been carried out; as text, with the node.
    Unanswered(String),
    /// It cannot be sent, or its answer cannot be passed on.
    Broken(ApiError),
}

impl Parcel {
    /// Reads the body, within the bounds of the route's handler; nothing for a method whose handlers
    /// read none.
    pub(super) async fn pack(request: Request, limit: BodyLimit) -> Result<Self, ApiError> {
        let (parts, body) = request.into_parts();
        let body = match parts.method {
            Method::POST | Method::PUT => json_body::collect(&parts.headers, body, limit.0).await?,
            _ => Bytes::new(),
        };
        Ok(Self { parts, body })
    }

    /// The request for a handler of this node.
    pub(super) fn unpack(&self) -> Request {
        Request::from_parts(self.parts.clone(), Body::from(self.body.clone()))
    }

    /// Sends it to a node, and returns the answer for the caller, or the one by which the node
    /// refuses the request as misdirected.
    pub(super) async fn send(
        &self,
        hop: &Hop,
        node: &Node,
        about: Option<About>,
    ) -> Result<Response, Unsent> {
        let address = node.address.clone();
        let address = address.map_err(|why| Unsent::Unreachable(why.to_string()))?;
        let asked = hop.map.client().ask(&address, self.outgoing(about)?).await;
        let response = match asked {
            Ok(response) => response,
            Err(error @ (AskError::Dial(_) | AskError::NoRoom { .. } | AskError::Stopped(_))) => {
                return Err(Unsent::Unreachable(chain(&error)));
            }
            Err(AskError::Refused(refused)) => {
                let error = Kind::NODE_REFUSES.because(refused.to_string());
                return Err(Unsent::Refused(error));
            }
            // An idempotent request may be repeated although the answer was lost.
            Err(error @ (AskError::Silent(_) | AskError::Unanswered { .. })) => {
                let why = chain(&error);
                return Err(match self.parts.method == Method::PUT {
                    true => Unsent::Unreachable(why),
                    false => Unsent::Unanswered(why),
                });
            }
            Err(error @ AskError::Request { .. }) => {
                return Err(Unsent::Broken(super::unanswered(&chain(&error))));
            }
        };
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            return self.switch(response, hop.map.lost(node));
        }
        let (mut parts, body) = response.into_parts();
        strip(&mut parts.headers, true);
        let body = UntilGone::new(body, hop.map.lost(node));
        Ok(Response::from_parts(parts, Body::new(body)))
    }

    fn outgoing(&self, about: Option<About>) -> Result<http::Request<Full<Bytes>>, Unsent> {
        let Some(caller) = self.parts.extensions.get::<Caller>() else {
            let error = Kind::INTERNAL.because("the caller was not authenticated");
            return Err(Unsent::Broken(error));
        };
        debug_assert!(self.parts.extensions.get::<ByPeer>().is_none());
        let mut request = http::Request::new(Full::new(self.body.clone()));
        *request.method_mut() = self.parts.method.clone();
        let target = self.parts.uri.path_and_query().cloned();
        *request.uri_mut() = target.map_or_else(|| Uri::from_static("/"), Uri::from);
        let headers = request.headers_mut();
        headers.clone_from(&self.parts.headers);
        let upgrade = headers.get(UPGRADE).cloned();
        strip(headers, false);
        if let Some(upgrade) = upgrade.filter(|_| self.on_upgrade().is_some()) {
            headers.insert(UPGRADE, upgrade);
            headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        }
        headers.insert(X_CONMAN_CALLER, to_header(caller));
        if let Some(about) = about {
            let generation = HeaderValue::from(about.generation.get());
            headers.insert(X_CONMAN_GENERATION, generation);
            if about.ended {
                headers.insert(X_CONMAN_ENDED, HeaderValue::from_static("1"));
            }
        }
        Ok(request)
    }

    fn on_upgrade(&self) -> Option<OnUpgrade> {
        self.parts.extensions.get::<OnUpgrade>().cloned()
    }

    /// Connects the two connections once both have switched to the protocol that the other node
    /// accepted.
    fn switch(
        &self,
        mut response: Response<Incoming>,
        mut gone: watch::Receiver<Option<Closing>>,
    ) -> Result<Response, Unsent> {
        let Some(here) = self.on_upgrade() else {
            let error =
                Kind::NODE_SILENT.because("the node switches to a protocol that was not requested");
            return Err(Unsent::Broken(error));
        };
        let there = hyper::upgrade::on(&mut response);
        tokio::spawn(async move {
            let (Ok(here), Ok(there)) = tokio::join!(here, there) else {
                return;
            };
            let (mut here, mut there) = (TokioIo::new(here), TokioIo::new(there));
            let ended = tokio::io::copy_bidirectional_with_sizes(
                &mut here,
                &mut there,
                TUNNEL_BUFFER_BYTES,
                TUNNEL_BUFFER_BYTES,
            );
            tokio::select! {
                ended = ended => tracing::trace!(?ended, "a tunnel to another node ended"),
                // Bytes on the way to or from a lost node are lost in any case.
                _ = gone.wait_for(Option::is_some) => {
                    tracing::trace!("a tunnel's node is gone");
                }
            }
        });
        let (mut parts, _no_body) = response.into_parts();
        let upgrade = parts.headers.get(UPGRADE).cloned();
        strip(&mut parts.headers, true);
        if let Some(upgrade) = upgrade {
            parts.headers.insert(UPGRADE, upgrade);
        }
        parts
            .headers
            .insert(CONNECTION, HeaderValue::from_static("upgrade"));
        parts.extensions = http::Extensions::new();
        Ok(Response::from_parts(parts, Body::empty()))
    }
}

/// Removes headers that end at this node. An answer keeps its length, and the mark of a
/// misdirected request, which the sender removes.
fn strip(headers: &mut HeaderMap, answer: bool) {
    let reserved: Vec<HeaderName> = headers
        .keys()
        .filter(|name| {
            name.as_str().starts_with("x-conman-") && !(answer && **name == super::X_CONMAN_TURNED)
        })
        .cloned()
        .collect();
    for name in reserved.iter().chain(&OWN) {
        if !(answer && *name == CONTENT_LENGTH) {
            headers.remove(name);
        }
    }
}
