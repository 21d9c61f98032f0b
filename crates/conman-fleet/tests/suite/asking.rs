//! Nodes that ask each other over real connections.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use conman_auth::{ClusterSecret, FleetTls, FleetTlsFiles};
use conman_fleet::require_acceptance;
use conman_peer::{
    DialError, Dialer, LIVENESS, PeerAccept, PeerAcceptor, PeerAddress, PeerBody, PeerClient,
    PeerRefusal, RequestError, Stream,
};
use conman_proto::{Generation, SessionId};
use conman_proxy::{Backend, OwnSessions, PeerFront, Proxy, ProxyOptions, Route};
use conman_testkit::ModelFleet;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Empty, Full};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::timeout;

/// Signs the certificates of one fleet.
struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let pem = params.self_signed(&key).expect("signed").pem();
        let issuer = Issuer::new(params, key);
        Self { pem, issuer }
    }

    /// The certificate of a node at `name`.
    fn tls(&self, folder: &TempDir, name: &str) -> Arc<FleetTls> {
        let params = CertificateParams::new(vec![name.to_owned()]).expect("a name");
        let key = KeyPair::generate().expect("a key");
        let cert = params.signed_by(&key, &self.issuer).expect("signed");
        let write = |file: String, text: String| {
            let path = folder.path().join(file);
            fs::write(&path, text).expect("written");
            path
        };
        let number = fs::read_dir(folder.path()).expect("a folder").count();
        let files = FleetTlsFiles {
            ca: write(format!("{number}.ca"), self.pem.clone()),
            cert: write(format!("{number}.cert"), cert.pem()),
            key: write(format!("{number}.key"), key.serialize_pem()),
        };
        Arc::new(FleetTls::load(files).expect("valid"))
    }
}

fn secret(folder: &TempDir, text: &str) -> Arc<ClusterSecret> {
    let path = folder.path().join(text);
    fs::write(&path, text.repeat(10)).expect("written");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("chmod");
    Arc::new(ClusterSecret::load(path).expect("valid"))
}

/// The certificate of the node `node` by a secret.
fn derived(secret: &Arc<ClusterSecret>, node: &str) -> Arc<FleetTls> {
    Arc::new(FleetTls::derive(Arc::clone(secret), node).expect("derived"))
}

/// A node `b` that answers with how much it was sent.
async fn node(tls: Option<Arc<FleetTls>>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let address = listener.local_addr().expect("bound");
    let acceptor = PeerAcceptor::new(tls);
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(stream) = acceptor.accept(socket).await else {
                    return;
                };
                let service = service_fn(|request: Request<hyper::body::Incoming>| async {
                    let body = request.into_body().collect().await.expect("a body");
                    let told = format!("{} bytes", body.to_bytes().len());
                    let response = Response::new(Full::new(Bytes::from(told)));
                    Ok::<_, std::convert::Infallible>(response)
                });
                // Who hangs up early is the test's own client.
                let _ = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service)
                    .await;
            });
        }
    });
    address
}

async fn ask(
    at: SocketAddr,
    scheme: &str,
    tls: Option<Arc<FleetTls>>,
) -> Result<String, RequestError> {
    let to = PeerAddress::new("b", &format!("{scheme}://{at}")).expect("an address");
    let client = PeerClient::new(Dialer::new("a", tls));
    let body = Full::new(Bytes::from(vec![b'x'; 1 << 20]));
    let request = Request::put("/v1/x?y=z").body(body).expect("a request");
    let response = client.request(&to, request).await?;
    let body = response.into_body().collect().await.expect("a body");
    Ok(String::from_utf8_lossy(&body.to_bytes()).into_owned())
}

/// With both names and what to do.
fn is_refused(answer: Result<String, RequestError>) {
    let error = answer.expect_err("refused");
    assert!(matches!(error, RequestError::Refused(_)), "{error:?}");
    for part in ["node `a`", "node `b`", "`fleet.secret_file`"] {
        assert!(error.to_string().contains(part), "{error}");
    }
}

#[tokio::test]
async fn nodes_with_one_secret_know_each_other_and_others_are_told_why_not() {
    let folder = tempfile::tempdir().expect("a folder");
    let ours = secret(&folder, "ours");
    let at = node(Some(derived(&ours, "b"))).await;
    let answer = ask(at, "https", Some(derived(&ours, "a"))).await;
    assert_eq!(answer.expect("an answer"), "1048576 bytes");
    let theirs = secret(&folder, "theirs");
    is_refused(ask(at, "https", Some(derived(&theirs, "a"))).await);
    // Nor one with certificates that were given to it.
    let given = Authority::new().tls(&folder, "127.0.0.1");
    is_refused(ask(at, "https", Some(given)).await);
}

#[tokio::test]
async fn a_secret_that_was_removed_is_worth_nothing_on_the_next_connection() {
    let folder = tempfile::tempdir().expect("a folder");
    let ours = secret(&folder, "ours");
    let theirs = secret(&folder, "ours too");
    let write = |of: &Arc<ClusterSecret>, tls: &Arc<FleetTls>, lines: &[&str]| {
        let lines: Vec<_> = lines.iter().map(|line| line.repeat(12)).collect();
        fs::write(of.path(), lines.join("\n")).expect("written");
        of.reload().expect("valid");
        tls.reload().expect("derived");
    };
    let (b, a) = (derived(&ours, "b"), derived(&theirs, "a"));
    let at = node(Some(Arc::clone(&b))).await;
    for (of_b, of_a, accepted) in [
        (&["old", "new"][..], &["old"][..], true),
        (&["old", "new"], &["new", "old"], true),
        (&["new", "old"], &["old", "new"], true),
        (&["new"], &["old", "new"], false),
        (&["new"], &["new", "old"], true),
        (&["new"], &["old"], false),
    ] {
        write(&ours, &b, of_b);
        write(&theirs, &a, of_a);
        let answer = ask(at, "https", Some(Arc::clone(&a))).await;
        match accepted {
            true => assert_eq!(answer.expect("an answer"), "1048576 bytes"),
            false => is_refused(answer),
        }
    }
}

#[tokio::test]
async fn a_node_that_no_other_accepts_is_refused_when_it_joins() {
    let folder = tempfile::tempdir().expect("a folder");
    let (ours, theirs) = (secret(&folder, "ours"), secret(&folder, "theirs"));
    let at = node(Some(derived(&ours, "b"))).await;
    let fleet = ModelFleet::new();
    let (_records, me) = fleet.join("a");
    let (_records_of_b, _b) = fleet.join("b");
    fleet.announced("b", |b| b.peer_url = Some(format!("https://{at}")));
    let client = |secret| PeerClient::new(Dialer::new("a", Some(derived(secret, "a"))));
    let accepted = require_acceptance(&*me, &client(&ours)).await;
    accepted.expect("it has the secret");
    let refused = require_acceptance(&*me, &client(&theirs)).await;
    let refused = refused.expect_err("it has another secret").to_string();
    for part in ["node `a`", "node `b`", "`fleet.secret_file`"] {
        assert!(refused.contains(part), "{refused}");
    }
    // A node that does not answer decides nothing.
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let nowhere = listener.local_addr().expect("bound");
    drop(listener);
    fleet.announced("b", |b| b.peer_url = Some(format!("https://{nowhere}")));
    let unknown = require_acceptance(&*me, &client(&theirs)).await;
    unknown.expect("no node has refused it");
}

/// It may have the address of one that was lost.
#[tokio::test]
async fn another_node_at_the_address_is_asked_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let ours = secret(&folder, "ours");
    let at = node(Some(derived(&ours, "c"))).await;
    let answer = ask(at, "https", Some(derived(&ours, "a"))).await;
    let error = answer.expect_err("it is not b");
    assert!(
        matches!(error, RequestError::Dial(DialError::Tls { .. })),
        "{error:?}"
    );
    assert!(
        error.to_string().contains("another node answers there"),
        "{error}"
    );
}

/// The proxy logs these errors.
#[tokio::test]
async fn what_is_no_node_is_refused_with_the_reason() {
    let folder = tempfile::tempdir().expect("a folder");
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let at = listener.local_addr().expect("bound");
    let acceptor = PeerAcceptor::new(Some(derived(&secret(&folder, "ours"), "b")));
    let error = async || {
        let (socket, _) = listener.accept().await.expect("a connection");
        let error = acceptor.accept(socket).await.expect_err("no node");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
        error.to_string()
    };

    let plain = async {
        let mut socket = TcpStream::connect(at).await.expect("it listens");
        let request = b"GET /v1/sessions HTTP/1.1\r\nHost: b\r\n\r\n";
        socket.write_all(request).await.expect("sent");
        let mut answer = Vec::new();
        let _ = socket.read_to_end(&mut answer).await;
        assert!(answer.len() < 16, "no more than an alert: {answer:?}");
    };
    let (reason, ()) = tokio::join!(error(), plain);
    for part in ["does not use TLS", "`listen.api`"] {
        assert!(reason.contains(part), "{reason}");
    }

    let theirs = derived(&secret(&folder, "theirs"), "a");
    let (reason, answer) = tokio::join!(error(), ask(at, "https", Some(theirs)));
    is_refused(answer);
    for part in [
        "does not accept this node's certificate",
        "`fleet.secret_file`",
    ] {
        assert!(reason.contains(part), "{reason}");
    }
}

#[tokio::test]
async fn nodes_with_certificates_of_one_authority_know_each_other() {
    let folder = tempfile::tempdir().expect("a folder");
    let ours = Authority::new();
    let at = node(Some(ours.tls(&folder, "127.0.0.1"))).await;
    let mine = Some(ours.tls(&folder, "10.0.0.1"));
    let answer = ask(at, "https", mine).await.expect("an answer");
    assert_eq!(answer, "1048576 bytes");
    let theirs = Authority::new();
    is_refused(ask(at, "https", Some(theirs.tls(&folder, "10.0.0.1"))).await);
}

#[tokio::test]
async fn whoever_has_no_certificate_of_the_fleet_gets_no_answer_out_of_a_node() {
    let folder = tempfile::tempdir().expect("a folder");
    let (ours, theirs) = (Authority::new(), Authority::new());
    let at = node(Some(ours.tls(&folder, "127.0.0.1"))).await;
    // It trusts the node, but its own certificate is somebody else's.
    let stolen = Authority {
        pem: ours.pem.clone(),
        issuer: theirs.issuer,
    };
    let to = PeerAddress::new("b", &format!("https://{at}")).expect("an address");
    let tls = Some(stolen.tls(&folder, "10.0.0.1"));
    let client = PeerClient::new(Dialer::new("a", tls));
    let request = Request::get("/v1/x").body(Empty::<Bytes>::new());
    let error = client.request(&to, request.expect("a request")).await;
    let error = error.expect_err("nothing is taken of it");
    assert!(matches!(error, RequestError::Refused(_)), "{error:?}");
    assert!(
        error.to_string().contains("`fleet.tls.cert` of `a`"),
        "{error}"
    );
    // Which is an answer.
    assert!(client.liveness().answers(&to).await);
}

#[tokio::test]
async fn a_certificate_for_another_address_is_no_proof() {
    let folder = tempfile::tempdir().expect("a folder");
    let ours = Authority::new();
    let at = node(Some(ours.tls(&folder, "10.9.9.9"))).await;
    let error = ask(at, "https", Some(ours.tls(&folder, "10.0.0.1")))
        .await
        .expect_err("another address");
    assert!(error.to_string().contains("name that address"), "{error}");
}

#[tokio::test]
async fn a_node_with_certificates_never_speaks_without_tls() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = node(None).await;
    let tls = Some(Authority::new().tls(&folder, "127.0.0.1"));
    for (scheme, tls) in [("http", tls), ("https", None)] {
        let error = ask(at, scheme, tls).await.expect_err(scheme);
        assert!(
            matches!(error, RequestError::Dial(DialError::Mismatch { .. })),
            "{error:?}"
        );
    }
}

/// The listener of a real node `b`, with TLS, and nothing behind it.
struct Real {
    proxy: Proxy,
    tls: Arc<FleetTls>,
}

struct Nothing;

#[async_trait]
impl Backend for Nothing {
    async fn connect(&self) -> io::Result<Stream> {
        Err(io::Error::other("nothing is served"))
    }
}

impl OwnSessions for Nothing {
    fn own(&self, _: &SessionId, _: Generation) -> Result<Route, PeerRefusal> {
        Err(PeerRefusal::NotOwner)
    }
}

impl Real {
    fn new(folder: &TempDir, options: ProxyOptions) -> Self {
        let authority = Authority::new();
        let theirs = authority.tls(folder, "127.0.0.1");
        let front = PeerFront {
            accept: Arc::new(PeerAcceptor::new(Some(theirs))),
            sessions: Arc::new(Nothing),
            api: Arc::new(Nothing),
        };
        let options = ProxyOptions {
            workers: 1,
            ..options
        };
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bound");
        let proxy = Proxy::start_peers(listener, options.for_nodes(), front).expect("a proxy");
        let tls = authority.tls(folder, "127.0.0.1");
        Self { proxy, tls }
    }

    /// Probes it, and keeps the connection while the answer is kept.
    async fn probe(&self) -> Result<Response<PeerBody>, RequestError> {
        let at = self.proxy.local_addr();
        let to = PeerAddress::new("b", &format!("https://{at}")).expect("an address");
        let client = PeerClient::new(Dialer::new("a", Some(Arc::clone(&self.tls))));
        let request = Request::get(LIVENESS).body(Empty::<Bytes>::new());
        client.request(&to, request.expect("a request")).await
    }
}

#[tokio::test]
async fn handshakes_that_are_never_finished_take_no_nodes_place() {
    let folder = tempfile::tempdir().expect("a folder");
    let options = ProxyOptions {
        max_connections: 2,
        ..ProxyOptions::default()
    };
    let node = Real::new(&folder, options);
    let silent = async || TcpStream::connect(node.proxy.local_addr()).await;
    let (mut oldest, _other) = (silent().await.expect("it listens"), silent().await);
    let answer = timeout(PATIENCE, node.probe()).await.expect("an end");
    assert_eq!(answer.expect("known").status(), StatusCode::NO_CONTENT);
    let end = timeout(PATIENCE, oldest.read(&mut [0])).await;
    assert!(matches!(end.expect("an end"), Ok(0)), "it had to leave");
}

#[tokio::test]
async fn a_listener_that_is_full_before_tls_says_that_it_has_taken_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let options = ProxyOptions {
        max_connections: 1,
        ..ProxyOptions::default()
    };
    let node = Real::new(&folder, options);
    // A node's connection, which is not closed for another.
    let at = node.proxy.local_addr();
    let to = PeerAddress::new("b", &format!("https://{at}")).expect("an address");
    let dialer = Dialer::new("a", Some(Arc::clone(&node.tls)));
    let mut only = dialer.dial(&to).await.expect("a connection");
    let request = format!("GET {LIVENESS} HTTP/1.1\r\nHost: b\r\n\r\n");
    only.write_all(request.as_bytes()).await.expect("sent");
    let mut status = [0; 12];
    timeout(PATIENCE, only.read_exact(&mut status))
        .await
        .expect("an end")
        .expect("an answer");
    assert_eq!(&status, b"HTTP/1.1 204");
    let asked = timeout(PATIENCE, node.probe()).await.expect("an end");
    let error = asked.expect_err("it is full");
    assert!(
        matches!(error, RequestError::Dial(DialError::NoRoom { .. })),
        "{error:?}"
    );
    assert!(error.to_string().contains("try again"), "{error}");
}

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

#[tokio::test]
async fn a_node_whose_daemon_stands_still_is_given_up_and_then_not_asked_anything_more() {
    // The kernel takes connections for a daemon that does not.
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let at = listener.local_addr().expect("bound");
    let to = PeerAddress::new("b", &format!("http://{at}")).expect("an address");
    let client = PeerClient::new(Dialer::new("a", None));
    let request = || Request::get("/v1/x").body(Empty::<Bytes>::new());
    let asked = client.request(&to, request().expect("a request"));
    let asked = timeout(PATIENCE, asked).await.expect("an end");
    assert!(
        matches!(asked, Err(RequestError::Unresponsive(_))),
        "{asked:?}"
    );
    assert!(client.liveness().was_unresponsive(&to));
    let asked = client.request(&to, request().expect("a request"));
    let asked = timeout(PATIENCE, asked).await.expect("an end");
    let error = asked.expect_err("still");
    assert!(matches!(error, RequestError::NotSent(_)), "{error:?}");
    assert!(error.to_string().contains("node `b`"), "{error}");
}

#[tokio::test]
async fn a_node_that_has_long_to_do_is_waited_for_while_it_answers_anything() {
    let (probes, mut seen) = watch::channel(0);
    let at = slow_node(probes, 2).await;
    let asking = ask(at, "http", None);
    let answer = timeout(PATIENCE, asking).await.expect("an end");
    assert_eq!(answer.expect("an answer"), "after long");
    assert!(*seen.borrow_and_update() >= 2);
}

/// A node `b` that answers once it was asked so many times whether it lives.
async fn slow_node(probes: watch::Sender<u32>, wanted: u32) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let address = listener.local_addr().expect("bound");
    let acceptor = PeerAcceptor::new(None);
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let (acceptor, probes) = (acceptor.clone(), probes.clone());
            tokio::spawn(async move {
                let stream = acceptor.accept(socket).await.expect("without TLS");
                let service = service_fn(move |request: Request<hyper::body::Incoming>| {
                    let probes = probes.clone();
                    async move {
                        let told = if request.uri().path() == LIVENESS {
                            probes.send_modify(|probes| *probes += 1);
                            ""
                        } else {
                            let mut seen = probes.subscribe();
                            let enough = seen.wait_for(|probes| *probes >= wanted).await;
                            enough.expect("it is kept");
                            "after long"
                        };
                        let body = Full::new(Bytes::from(told));
                        Ok::<_, std::convert::Infallible>(Response::new(body))
                    }
                });
                // Who hangs up early is the test's own client.
                let _ = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service)
                    .await;
            });
        }
    });
    address
}

#[tokio::test]
async fn a_node_that_is_not_there_is_named() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let at = listener.local_addr().expect("bound");
    drop(listener);
    let error = ask(at, "http", None).await.expect_err("nobody there");
    assert!(
        error.to_string().contains("node `b` at 127.0.0.1:"),
        "{error}"
    );
}
