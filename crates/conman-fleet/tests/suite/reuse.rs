//! Requests to another node, one after the other: on which connections they come.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use conman_auth::{ClusterSecret, FleetTls, FleetTlsFiles};
use conman_peer::{Dialer, PeerAccept as _, PeerAcceptor, PeerAddress, PeerClient, RequestError};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// A node `b`, and how many connections it has taken.
struct Taker {
    address: SocketAddr,
    taken: Arc<AtomicUsize>,
}

impl Taker {
    /// That serves its connections in this way.
    async fn new<S, F>(serve: S) -> Self
    where
        S: Fn(TcpStream, usize) -> F + Send + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
        let address = listener.local_addr().expect("bound");
        let taken = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&taken);
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let number = count.fetch_add(1, Ordering::Relaxed) + 1;
                tokio::spawn(serve(socket, number));
            }
        });
        Self { address, taken }
    }

    /// That answers whoever it knows with OK.
    async fn knowing(tls: Option<Arc<FleetTls>>) -> Self {
        let acceptor = PeerAcceptor::new(tls);
        Self::new(move |socket, _| answer_all(acceptor.clone(), socket)).await
    }

    fn taken(&self) -> usize {
        self.taken.load(Ordering::Relaxed)
    }

    fn at(&self, scheme: &str) -> PeerAddress {
        PeerAddress::new("b", &format!("{scheme}://{}", self.address)).expect("an address")
    }
}

async fn answer_all(acceptor: PeerAcceptor, socket: TcpStream) {
    let stream = acceptor.accept(socket).await.expect("a node's");
    let service = service_fn(|_: Request<hyper::body::Incoming>| {
        let response = Response::new(Full::new(Bytes::from_static(b"told")));
        async { Ok::<_, std::convert::Infallible>(response) }
    });
    // Who hangs up early is the test's own client.
    let _ = hyper::server::conn::http1::Builder::new()
        .serve_connection(TokioIo::new(stream), service)
        .await;
}

fn secret(folder: &TempDir) -> Arc<ClusterSecret> {
    let path = folder.path().join("fleet.key");
    fs::write(&path, "ours".repeat(10)).expect("written");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("chmod");
    Arc::new(ClusterSecret::load(path).expect("valid"))
}

async fn ask(client: &PeerClient, to: &PeerAddress, method: Method) {
    let request = Request::builder()
        .method(method.clone())
        .uri("/v1/sessions/x")
        .body(Full::new(Bytes::new()))
        .expect("a request");
    let response = client.request(to, request).await;
    let response = response.unwrap_or_else(|error| panic!("{method}: {error:?}"));
    assert_eq!(response.status(), StatusCode::OK);
    let body = response.into_body().collect().await.expect("a body");
    assert_eq!(body.to_bytes(), "told");
}

/// Where the last answer's connection may not be back yet, another one is opened.
const A_FEW: usize = 5;

#[tokio::test]
async fn requests_one_after_the_other_need_but_a_few_connections() {
    let folder = tempfile::tempdir().expect("a folder");
    let key = secret(&folder);
    let derive = |name| FleetTls::derive(Arc::clone(&key), name).expect("derived");
    let node = Taker::knowing(Some(Arc::new(derive("b")))).await;
    let client = PeerClient::new(Dialer::new("a", Some(Arc::new(derive("a")))));
    for _ in 0..200 {
        ask(&client, &node.at("https"), Method::GET).await;
    }
    assert!(node.taken() <= A_FEW, "{}", node.taken());
}

#[tokio::test]
async fn what_may_not_be_repeated_never_meets_a_connection_that_was_idle() {
    let node = Taker::knowing(None).await;
    let client = PeerClient::new(Dialer::new("a", None));
    for method in [Method::GET, Method::POST, Method::DELETE] {
        let before = node.taken();
        ask(&client, &node.at("http"), method).await;
        assert_eq!(node.taken(), before + 1);
    }
}

#[tokio::test]
async fn that_an_idle_connection_was_closed_meanwhile_is_nobodys_trouble() {
    // Every connection ends with the head of its second request, which nobody answers.
    let node = Taker::new(|mut socket, _| async move {
        if read_head(&mut socket).await {
            let told = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\ntold";
            socket.write_all(told).await.expect("written");
            read_head(&mut socket).await;
        }
    })
    .await;
    let client = PeerClient::new(Dialer::new("a", None));
    for method in [Method::GET, Method::PUT].into_iter().cycle().take(10) {
        ask(&client, &node.at("http"), method).await;
    }
}

/// Whether one has come.
async fn read_head(socket: &mut TcpStream) -> bool {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match socket.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => return false,
        }
    }
    true
}

/// The first connections end with the head of a request, which may have been served.
#[tokio::test]
async fn a_request_that_may_be_repeated_is_sent_again_if_a_new_connection_was_cut() {
    let node = Taker::new(|mut socket, number| async move {
        if read_head(&mut socket).await && number % 2 == 0 {
            let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\nconnection: close\r\n\r\ntold";
            socket.write_all(answer).await.expect("written");
        }
    })
    .await;
    let client = PeerClient::new(Dialer::new("a", None));
    for method in [Method::GET, Method::PUT] {
        ask(&client, &node.at("http"), method).await;
    }
    let request = Request::post("/v1/sessions/x/exec").body(Full::new(Bytes::new()));
    let at = node.at("http");
    let sent = client.request(&at, request.expect("a request")).await;
    assert!(
        matches!(sent, Err(RequestError::Unanswered { .. })),
        "{sent:?}"
    );
}

#[tokio::test]
async fn a_connection_whose_answer_goes_on_takes_no_other_request() {
    // The first answer is never finished, and the next request on its connection is never read.
    let node = Taker::new(|mut socket, number| async move {
        while read_head(&mut socket).await {
            let length = if number == 1 { 5 } else { 4 };
            let told = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\ntold");
            socket.write_all(told.as_bytes()).await.expect("written");
            if number == 1 {
                std::future::pending::<()>().await;
            }
        }
    })
    .await;
    let client = PeerClient::new(Dialer::new("a", None));
    let request = Request::get("/v1/sessions/x/logs").body(Full::new(Bytes::new()));
    let at = node.at("http");
    let going_on = client.request(&at, request.expect("a request"));
    let mut going_on = going_on.await.expect("an answer").into_body();
    let frame = going_on.frame().await.expect("more").expect("a frame");
    assert_eq!(frame.into_data().expect("data"), "told");
    ask(&client, &node.at("http"), Method::GET).await;
    drop(going_on);
    ask(&client, &node.at("http"), Method::GET).await;
    assert!((2..=3).contains(&node.taken()), "{}", node.taken());
}

#[tokio::test]
async fn certificates_that_were_replaced_are_shown_by_the_next_request() {
    let folder = tempfile::tempdir().expect("a folder");
    let authority = CertificateParams::new(Vec::new()).map(|mut params| {
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params
    });
    let (authority, key) = (authority.expect("no names"), KeyPair::generate());
    let key = key.expect("a key");
    let ca = authority.self_signed(&key).expect("signed").pem();
    let issuer = Issuer::new(authority, key);
    let path = |file: &str| folder.path().join(file);
    let issue = |node: &str| {
        let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).expect("a name");
        let key = KeyPair::generate().expect("a key");
        let cert = params.signed_by(&key, &issuer).expect("signed");
        for (kind, text) in [
            ("ca", ca.clone()),
            ("cert", cert.pem()),
            ("key", key.serialize_pem()),
        ] {
            fs::write(path(&format!("{node}.{kind}")), text).expect("written");
        }
    };
    let load = |node: &str| {
        issue(node);
        let file = |kind: &str| path(&format!("{node}.{kind}"));
        let (ca, cert, key) = (file("ca"), file("cert"), file("key"));
        Arc::new(FleetTls::load(FleetTlsFiles { ca, cert, key }).expect("valid"))
    };
    let node = Taker::knowing(Some(load("b"))).await;
    let mine = load("a");
    let client = PeerClient::new(Dialer::new("a", Some(Arc::clone(&mine))));
    for _ in 0..20 {
        ask(&client, &node.at("https"), Method::GET).await;
    }
    let before = node.taken();
    assert!(before <= A_FEW, "{before}");
    issue("a");
    assert!(mine.reload().expect("valid"), "they differ");
    ask(&client, &node.at("https"), Method::GET).await;
    assert_eq!(node.taken(), before + 1);
}

#[tokio::test]
async fn a_request_on_an_idle_connection_is_given_up_if_its_node_is_silent() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let address = listener.local_addr().expect("bound");
    let to = PeerAddress::new("b", &format!("http://{address}")).expect("an address");
    let client = PeerClient::new(Dialer::new("a", None));
    let answers_once = async {
        let (mut socket, _) = listener.accept().await.expect("a connection");
        assert!(read_head(&mut socket).await);
        let told = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\ntold";
        socket.write_all(told).await.expect("written");
        socket
    };
    let (_socket, ()) = tokio::join!(answers_once, ask(&client, &to, Method::GET));
    // The connection goes back in a task of its own, which waits for nothing else.
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    // From here on the kernel alone takes what comes.
    let request = Request::get("/v1/sessions/x").body(Full::new(Bytes::new()));
    let asked = client.request(&to, request.expect("a request")).await;
    assert!(
        matches!(asked, Err(RequestError::Unresponsive(_))),
        "{asked:?}"
    );
}
