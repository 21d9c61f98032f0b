//! A stand-in for Google Compute Engine's metadata server.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

const ROOT: &str = "/computeMetadata/v1/instance/";

/// A stand-in for Google Compute Engine's metadata server, as its documentation has it: it wants
/// the header `Metadata-Flavor: Google` and sends it, gives every value an ETag, and with
/// `wait_for_change=true&last_etag=…` answers when the value has changed or `timeout_sec` is over.
///
/// <https://cloud.google.com/compute/docs/metadata/querying-metadata>
#[derive(Debug)]
pub struct MetadataServer {
    values: Arc<watch::Sender<Values>>,
    address: std::net::SocketAddr,
    accepting: JoinHandle<()>,
}

#[derive(Debug, Clone)]
struct Values {
    of: BTreeMap<&'static str, &'static str>,
    fail: bool,
    asked: u64,
}

impl Drop for MetadataServer {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl MetadataServer {
    /// A server of a machine that stays.
    ///
    /// # Panics
    /// When loopback has no free port.
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("a bound address");
        let of = BTreeMap::from([("preempted", "FALSE"), ("maintenance-event", "NONE")]);
        let values = Arc::new(watch::Sender::new(Values {
            of,
            fail: false,
            asked: 0,
        }));
        let shared = Arc::clone(&values);
        let accepting = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let values = Arc::clone(&shared);
                tokio::spawn(async move {
                    let service = service_fn(move |request| answer(Arc::clone(&values), request));
                    // A client that goes away is its own affair.
                    let _ = http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service)
                        .await;
                });
            }
        });
        Self {
            values,
            address,
            accepting,
        }
    }

    /// For `preempt.gce_endpoint`.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Changes a value below `instance/`.
    pub fn set(&self, key: &'static str, value: &'static str) {
        self.values.send_modify(|values| {
            values.of.insert(key, value);
        });
    }

    /// From now on, or no longer, answers with 503, those who wait included.
    pub fn fail(&self, fail: bool) {
        self.values.send_modify(|values| values.fail = fail);
    }

    /// How many requests it has had.
    pub fn asked(&self) -> u64 {
        self.values.borrow().asked
    }
}

async fn answer(
    values: Arc<watch::Sender<Values>>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    values.send_modify(|values| values.asked += 1);
    let key = request.uri().path().strip_prefix(ROOT).map(str::to_owned);
    let query = request.uri().query().unwrap_or_default().to_owned();
    let parameter = |name: &str| {
        let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
        pairs.find_map(|(key, value)| (key == name).then(|| value.to_owned()))
    };
    let known = |headers: &HeaderMap| {
        headers
            .get("metadata-flavor")
            .is_some_and(|flavor| flavor == "Google")
    };
    let Some(key) = key.filter(|_| known(request.headers())) else {
        return Ok(respond(
            StatusCode::FORBIDDEN,
            "",
            "Missing Metadata-Flavor",
        ));
    };
    let mut watching = values.subscribe();
    if parameter("wait_for_change").as_deref() == Some("true")
        && let Some(last) = parameter("last_etag")
    {
        let seconds = parameter("timeout_sec").and_then(|text| text.parse().ok());
        let changed = watching.wait_for(|values| {
            values.fail
                || values.of.get(key.as_str()).map(|value| etag(value)) != Some(last.clone())
        });
        // Without a change the same value is the answer.
        let _ = timeout(Duration::from_secs(seconds.unwrap_or(3_600)), changed).await;
    }
    let values = values.borrow().clone();
    if values.fail {
        return Ok(respond(StatusCode::SERVICE_UNAVAILABLE, "", "try again"));
    }
    Ok(match values.of.get(key.as_str()) {
        Some(value) => respond(StatusCode::OK, &etag(value), value),
        None => respond(StatusCode::NOT_FOUND, "", "no such key"),
    })
}

/// A function of the value, as the real server's seems to be.
fn etag(value: &str) -> String {
    let sum = value.bytes().fold(7_u64, |sum, byte| {
        sum.wrapping_mul(31).wrapping_add(byte.into())
    });
    format!("{sum:016x}")
}

fn respond(status: StatusCode, etag: &str, body: &str) -> Response<Full<Bytes>> {
    let mut builder = Response::builder()
        .status(status)
        .header("metadata-flavor", "Google");
    if !etag.is_empty() {
        builder = builder.header("etag", etag);
    }
    let body = Full::new(Bytes::from(body.to_owned()));
    builder.body(body).expect("the response is valid")
}
