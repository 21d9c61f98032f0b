//! Requests and WebSockets over one connection.

use std::time::Duration;

use bytes::Bytes;
use http::header::{
    CONNECTION, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_PROTOCOL, SEC_WEBSOCKET_VERSION, UPGRADE,
};
use http::{HeaderMap, HeaderName, HeaderValue, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio::time::timeout;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::Role;

use crate::{Answer, Api, Streamed};

/// Bound on one answer.
const PATIENCE: Duration = Duration::from_secs(60);

/// The key of RFC 6455's example: nothing here depends on its being random.
const KEY: HeaderValue = HeaderValue::from_static("dGhlIHNhbXBsZSBub25jZQ==");

/// A WebSocket over a connection that an [`Api`] made.
pub type WebSocket = WebSocketStream<TokioIo<Upgraded>>;

/// The request with a header in place of those of the same name.
///
/// # Panics
/// When it cannot be a header.
#[must_use]
pub fn with(mut request: Request<Full<Bytes>>, name: &str, value: &str) -> Request<Full<Bytes>> {
    let name: HeaderName = name.parse().expect("a header's name");
    let value = HeaderValue::from_str(value).expect("a header's value");
    request.headers_mut().insert(name, value);
    request
}

/// Sends any request at all and reads the whole answer.
///
/// # Panics
/// When there is none.
pub async fn answer(api: &Api, request: Request<Full<Bytes>>) -> Answer {
    let exchange = async {
        let streamed = api.open(request).await.expect("the daemon answers");
        whole(streamed).await
    };
    timeout(PATIENCE, exchange).await.expect("in time")
}

/// Asks for a WebSocket with these subprotocols: it and the header of the answer, or the refusal.
///
/// # Panics
/// When there is no answer, or one to another question.
pub async fn websocket(
    api: &Api,
    request: Request<Full<Bytes>>,
    protocols: &[&str],
) -> Result<(HeaderMap, WebSocket), Answer> {
    let mut request = request;
    let headers = request.headers_mut();
    headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
    headers.insert(SEC_WEBSOCKET_VERSION, HeaderValue::from_static("13"));
    headers.insert(SEC_WEBSOCKET_KEY, KEY);
    if !protocols.is_empty() {
        let offer = HeaderValue::from_str(&protocols.join(", ")).expect("a header's value");
        headers.insert(SEC_WEBSOCKET_PROTOCOL, offer);
    }
    let exchange = async {
        let mut streamed = api.open(request).await.expect("the daemon answers");
        if streamed.response.status() != StatusCode::SWITCHING_PROTOCOLS {
            return Err(whole(streamed).await);
        }
        let headers = streamed.response.headers().clone();
        let upgraded = hyper::upgrade::on(&mut streamed.response)
            .await
            .expect("the connection is handed over");
        let socket =
            WebSocketStream::from_raw_socket(TokioIo::new(upgraded), Role::Client, None).await;
        Ok((headers, socket))
    };
    timeout(PATIENCE, exchange).await.expect("in time")
}

async fn whole(mut streamed: Streamed) -> Answer {
    let body = streamed.response.body_mut().collect().await;
    Answer {
        status: streamed.response.status(),
        headers: streamed.response.headers().clone(),
        body: body.expect("the body is whole").to_bytes(),
    }
}
