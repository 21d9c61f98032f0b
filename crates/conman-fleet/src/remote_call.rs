//! Calls of another node's API, on behalf of a caller.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use conman_auth::Caller;
use conman_core::{Closing, error_chain};
use conman_peer::headers::{
    X_CONMAN_GENERATION, X_CONMAN_MISDIRECTED, strip_forged, strip_hop_by_hop,
};
use conman_peer::{
    PeerAddress, PeerBody, Protocol, RefusedBy, RequestError, Side, Tunnel, TunnelOptions,
    caller_header, may_be_repeated,
};
use conman_proto::Generation;
use http::header::{
    AUTHORIZATION, CONNECTION, CONTENT_LENGTH, COOKIE, EXPECT, HOST, HeaderMap, HeaderName,
    HeaderValue, ORIGIN, UPGRADE,
};
use http::request::Parts;
use http::{Method, Request, Response, StatusCode, Uri};
use http_body::Body;
use http_body_util::Full;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use metrics::Counter;
use thiserror::Error;
use tokio::sync::watch;

use crate::passage::closes;
use crate::remote_body::RemoteBody;
use crate::{FleetMap, NoAddress, Node, Passage};

/// `1`: the sender knows that the generation has ended, and requests exactly that one.
pub const X_CONMAN_ENDED: HeaderName = HeaderName::from_static("x-conman-ended");

/// The caller's credentials, which end at this node, and what is set again for each connection.
const OF_CALLER: [HeaderName; 6] = [AUTHORIZATION, CONTENT_LENGTH, COOKIE, EXPECT, HOST, ORIGIN];

/// Longest time without progress while bytes of a WebSocket wait to be written.
const WRITE_STALL_TIMEOUT: Duration = Duration::from_secs(60);

/// The generation that a request is about.
#[derive(Debug, Clone, Copy)]
pub struct ExpectedGeneration {
    pub generation: Generation,
    pub ended: bool,
}

/// A request with its small body, which can be sent more than once.
#[derive(Debug, Clone)]
pub struct BufferedRequest {
    /// With the caller's connection in `extensions` if it may be upgraded.
    pub parts: Parts,
    pub body: Bytes,
    pub caller: Caller,
}

/// Why a call has no answer, by what may be done next.
#[derive(Debug, Clone, Error)]
pub enum CallError {
    /// Nothing was done.
    #[error("node `{node}` does not own the session")]
    Misdirected { node: Arc<str> },
    /// Nothing was sent, or nothing that may not be repeated.
    #[error("{why}")]
    Unreachable { why: String },
    /// Nothing was done: the node does not accept this one.
    #[error(transparent)]
    Refused(RefusedBy),
    /// It may have been carried out.
    #[error("{why}")]
    Unanswered { why: String },
}

impl BufferedRequest {
    /// A request without a body.
    #[must_use]
    pub fn new(method: Method, target: Uri, caller: Caller) -> Self {
        let (mut parts, body) = Request::new(Bytes::new()).into_parts();
        (parts.method, parts.uri) = (method, target);
        Self {
            parts,
            body,
            caller,
        }
    }

    fn outgoing(&self, expected: Option<ExpectedGeneration>) -> Request<Full<Bytes>> {
        let body = Full::new(self.body.clone());
        let mut request = outgoing(&self.parts, &self.caller, body, expected);
        let upgrade = self.parts.headers.get(UPGRADE).cloned();
        if let Some(upgrade) = upgrade.filter(|_| self.on_upgrade().is_some()) {
            let headers = request.headers_mut();
            headers.insert(UPGRADE, upgrade);
            headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        }
        request
    }

    fn on_upgrade(&self) -> Option<OnUpgrade> {
        self.parts.extensions.get::<OnUpgrade>().cloned()
    }
}

impl FleetMap {
    /// Sends a request to a node, and returns the answer for the caller. Waits a moment for the
    /// address of a node that has just joined.
    ///
    /// # Errors
    /// There is no answer, or the node refuses the request as misdirected.
    pub async fn call(
        &self,
        node: &Node,
        request: &BufferedRequest,
        expected: Option<ExpectedGeneration>,
    ) -> Result<Response<RemoteBody>, CallError> {
        let address = self.address_of(node).await?;
        let passage = self.passage(&request.caller);
        let sent = self.client().request(&address, request.outgoing(expected));
        let response = sent
            .await
            .map_err(|error| not_answered(error, &request.parts))?;
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            return switch(request, response, self.lost(node), passage);
        }
        let is_endless = follows(request.parts.uri.query().unwrap_or_default());
        self.answered(node, response, (passage, is_endless))
    }

    /// Sends a request once, with a body of any size that streams.
    ///
    /// # Errors
    /// There is no answer, or the node refuses the request as misdirected.
    pub async fn call_once<B>(
        &self,
        node: &Node,
        parts: &Parts,
        caller: &Caller,
        body: B,
        expected: ExpectedGeneration,
    ) -> Result<Response<RemoteBody>, CallError>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let address = self.address_of(node).await?;
        let request = outgoing(parts, caller, body, Some(expected));
        let passage = self.passage(caller);
        let sent = self.client().request_once(&address, request);
        let response = sent.await.map_err(|error| not_answered(error, parts))?;
        self.answered(node, response, (passage, false))
    }

    async fn address_of(&self, node: &Node) -> Result<PeerAddress, CallError> {
        let address = match &node.address {
            Err(NoAddress::NotYet { .. }) => self.announced(&node.name).await.address,
            known => known.clone(),
        };
        address.map_err(|why| unreachable(&why))
    }

    fn answered(
        &self,
        node: &Node,
        response: Response<PeerBody>,
        (passage, is_endless): (Option<Passage>, bool),
    ) -> Result<Response<RemoteBody>, CallError> {
        if response.headers().contains_key(&X_CONMAN_MISDIRECTED) {
            let node = Arc::clone(&node.name);
            return Err(CallError::Misdirected { node });
        }
        let lost = self.lost(node);
        let (mut parts, body) = response.into_parts();
        strip(&mut parts.headers);
        let body = RemoteBody::new(body, lost, passage, is_endless);
        Ok(Response::from_parts(parts, body))
    }
}

/// Whether the answer ends only with the session: a log that is followed.
fn follows(query: &str) -> bool {
    query
        .split('&')
        .any(|pair| ["follow", "follow=true", "follow=1"].contains(&pair))
}

/// What may be done after a request without an answer.
fn not_answered(error: RequestError, request: &Parts) -> CallError {
    let is_repeatable = may_be_repeated(&request.method, &request.headers);
    match error {
        RequestError::Refused(refused) => CallError::Refused(refused),
        RequestError::Dial(_) | RequestError::NoRoom { .. } | RequestError::NotSent(_) => {
            unreachable(&error)
        }
        // It may be repeated although the answer was lost, or was never sent.
        RequestError::Unresponsive(_) | RequestError::Unanswered { .. } if is_repeatable => {
            unreachable(&error)
        }
        RequestError::Unresponsive(_)
        | RequestError::Unanswered { .. }
        | RequestError::Invalid { .. } => CallError::Unanswered {
            why: error_chain(&error),
        },
    }
}

/// The caller's request as this node sends it.
fn outgoing<B>(
    parts: &Parts,
    caller: &Caller,
    body: B,
    expected: Option<ExpectedGeneration>,
) -> Request<B> {
    let mut request = Request::new(body);
    *request.method_mut() = parts.method.clone();
    let target = parts.uri.path_and_query().cloned();
    *request.uri_mut() = target.map_or_else(|| Uri::from_static("/"), Uri::from);
    let headers = request.headers_mut();
    headers.clone_from(&parts.headers);
    strip(headers);
    for name in &OF_CALLER {
        headers.remove(name);
    }
    let (name, caller) = caller_header(caller);
    headers.insert(name, caller);
    if let Some(expected) = expected {
        let generation = HeaderValue::from(expected.generation.get());
        headers.insert(X_CONMAN_GENERATION, generation);
        if expected.ended {
            headers.insert(X_CONMAN_ENDED, HeaderValue::from_static("1"));
        }
    }
    request
}

fn unreachable(error: &dyn std::error::Error) -> CallError {
    let why = error_chain(error);
    CallError::Unreachable { why }
}

/// Connects the two connections once both have switched to the protocol that the other node
/// accepted.
fn switch(
    request: &BufferedRequest,
    mut response: Response<PeerBody>,
    lost: watch::Receiver<Option<Closing>>,
    mut passage: Option<Passage>,
) -> Result<Response<RemoteBody>, CallError> {
    let Some(here) = request.on_upgrade() else {
        let why = "the node switches to a protocol that was not requested".to_owned();
        return Err(CallError::Unanswered { why });
    };
    let there = hyper::upgrade::on(&mut response);
    let upgrade = response.headers().get(UPGRADE).cloned();
    let is_websocket =
        |upgrade: &HeaderValue| upgrade.as_bytes().eq_ignore_ascii_case(b"websocket");
    let protocol = match upgrade.as_ref().is_some_and(is_websocket) {
        true => Protocol::WebSocket,
        false => Protocol::Other,
    };
    let (mut parts, empty) = response.into_parts();
    let empty = RemoteBody::new(empty, lost.clone(), None, false);
    tokio::spawn(async move {
        let (Ok(here), Ok(there)) = tokio::join!(here, there) else {
            return;
        };
        let options = TunnelOptions {
            write_stall_timeout: WRITE_STALL_TIMEOUT,
            // The node has closed it, and would have named a reason.
            reason_timeout: Duration::ZERO,
            to_session_bytes: Counter::noop(),
            to_client_bytes: Counter::noop(),
        };
        Tunnel::new(side(here), side(there), protocol, options, lost)
            .run(async { closes(&mut passage).await })
            .await;
    });
    strip(&mut parts.headers);
    if let Some(upgrade) = upgrade {
        parts.headers.insert(UPGRADE, upgrade);
    }
    let connection = HeaderValue::from_static("upgrade");
    parts.headers.insert(CONNECTION, connection);
    parts.extensions = http::Extensions::new();
    Ok(Response::from_parts(parts, empty))
}

fn side(upgraded: Upgraded) -> Side<TokioIo<Upgraded>> {
    Side {
        stream: TokioIo::new(upgraded),
        read_already: Bytes::new(),
    }
}

/// Removes the fields of the connection, and those that only conman may set.
fn strip(headers: &mut HeaderMap) {
    strip_hop_by_hop(headers);
    strip_forged(headers, true);
}
