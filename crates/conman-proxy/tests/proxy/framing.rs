//! Requests that two readers may frame differently. Each is refused, or arrives as one request that
//! can be read in only one way.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use conman_proxy::ProxyOptions;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::support::{Fixture, RawBackend, status, until};

/// What follows each request of the tables, on the same connection.
const FOLLOWING: &str = "GET /next HTTP/1.1\r\nHost: alice.localhost\r\n\r\n\
    GET /end HTTP/1.1\r\nHost: alice.localhost\r\nConnection: close\r\n\r\n";

/// Heads, after `Host`, that are refused.
const REFUSED_FIELDS: [&str; 61] = [
    // Lengths that are no number, or several.
    "Content-Length: 5\r\nContent-Length: 6",
    "Content-Length: 6\r\nContent-Length: 5",
    "Content-Length: 5\r\ncontent-length: 0",
    "Content-Length: 5, 5",
    "Content-Length: 5,5",
    "Content-Length: 5, 6",
    "Content-Length: 5,",
    "Content-Length: ,5",
    "Content-Length: +5",
    "Content-Length: -1",
    "Content-Length: -0",
    "Content-Length: 5 5",
    "Content-Length: 5.0",
    "Content-Length: 5e0",
    "Content-Length: 0x5",
    "Content-Length: 0b1",
    "Content-Length: 5_0",
    "Content-Length: '5'",
    "Content-Length: \"5\"",
    "Content-Length: 5;",
    "Content-Length:",
    "Content-Length: ",
    "Content-Length: five",
    "Content-Length: \u{0665}",
    "Content-Length: 5\u{a0}",
    "Content-Length: 99999999999999999999",
    "Content-Length: 18446744073709551616",
    "Content-Length: 18446744073709551615",
    // Transfer codings other than `chunked`.
    "Transfer-Encoding: gzip, chunked",
    "Transfer-Encoding: identity, chunked",
    "Transfer-Encoding: chunked, chunked",
    "Transfer-Encoding: chunked, identity",
    "Transfer-Encoding: chunked, gzip",
    "Transfer-Encoding: chunked,",
    "Transfer-Encoding: ,chunked",
    "Transfer-Encoding: identity",
    "Transfer-Encoding: gzip",
    "Transfer-Encoding: xchunked",
    "Transfer-Encoding: chunkedx",
    "Transfer-Encoding: chunk",
    "Transfer-Encoding: chunked;q=1",
    "Transfer-Encoding: \"chunked\"",
    "Transfer-Encoding: chunked\u{a0}",
    "Transfer-Encoding:",
    "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
    "Transfer-Encoding: identity\r\nTransfer-Encoding: chunked",
    "Transfer-Encoding: gzip\r\nContent-Length: 5",
    "Content-Length: 5\r\nTransfer-Encoding: identity",
    // Names and values with bytes that are not theirs.
    "Transfer-Encoding : chunked",
    "Transfer-Encoding\t: chunked",
    "Content-Length : 5",
    "Transfer-Encoding:\x0bchunked",
    "Transfer-Encoding: chunked\x0c",
    "Transfer-Encoding: chunked\0",
    "Content-Length: 5\x0b",
    "Content-Length: \x005",
    " Transfer-Encoding: chunked",
    "\0Transfer-Encoding: chunked",
    "(Transfer-Encoding): chunked",
    ": chunked",
];

/// Whole heads that are refused.
const REFUSED_HEADS: [&str; 27] = [
    // Folded lines, and a lone CR.
    "POST / HTTP/1.1\r\nHost: alice.localhost\r\nX: a\r\n b\r\n\r\n",
    "POST / HTTP/1.1\r\nHost: alice.localhost\r\nX: a\r\n\tb\r\n\r\n",
    "POST / HTTP/1.1\r\nHost: alice.localhost\r\nX: a\r\n Content-Length: 5\r\n\r\n",
    "POST / HTTP/1.1\r\nHost: alice.localhost\r\nContent-Length:\r\n 5\r\n\r\n",
    "POST / HTTP/1.1\r\nHost: alice.localhost\r\nTransfer-Encoding:\r\n chunked\r\n\r\n",
    "POST / HTTP/1.1\r\n Host: alice.localhost\r\n\r\n",
    "POST / HTTP/1.1\r\nHost: alice.localhost\r\nX: a\rContent-Length: 5\r\n\r\n",
    "POST / HTTP/1.1\r\nHost: alice.localhost\r\nX: a\r\rContent-Length: 5\r\n\r\n",
    "POST / HTTP/1.1\r\nHost: alice.localhost\r\nno colon\r\n\r\n",
    "POST / HTTP/1.1\r\nHost: alice.localhost\r\nX: \0\r\n\r\n",
    "POST / HTTP/1.1\r\nHost: alice.localhost\r\nX: \x7f\r\n\r\n",
    // Hosts.
    "POST / HTTP/1.1\r\n\r\n",
    "POST / HTTP/1.1\r\nHost: alice.localhost\r\nHost: alice.localhost\r\n\r\n",
    "POST / HTTP/1.1\r\nHost: alice.localhost\r\nhost: bob.localhost\r\n\r\n",
    // Request lines.
    "POST / HTTP/1.0\r\nHost: alice.localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "POST  / HTTP/1.1\r\nHost: alice.localhost\r\n\r\n",
    "POST /  HTTP/1.1\r\nHost: alice.localhost\r\n\r\n",
    "POST\t/ HTTP/1.1\r\nHost: alice.localhost\r\n\r\n",
    "POST / HTTP/1.1 \r\nHost: alice.localhost\r\n\r\n",
    " POST / HTTP/1.1\r\nHost: alice.localhost\r\n\r\n",
    "POST /a b HTTP/1.1\r\nHost: alice.localhost\r\n\r\n",
    "POST /\x01 HTTP/1.1\r\nHost: alice.localhost\r\n\r\n",
    "POST / HTTP/2.0\r\nHost: alice.localhost\r\n\r\n",
    "POST / HTTP/9.9\r\nHost: alice.localhost\r\n\r\n",
    "POST / HTTP/1.1x\r\nHost: alice.localhost\r\n\r\n",
    "POST /\r\n\r\n",
    "P\u{e9}ST / HTTP/1.1\r\nHost: alice.localhost\r\n\r\n",
];

/// Chunked bodies, the first chunk of which may be forwarded, that never look complete.
const BROKEN_BODIES: [&str; 20] = [
    "z\r\n",
    "\r\n",
    " 5\r\nhello\r\n0\r\n\r\n",
    "+5\r\nhello\r\n0\r\n\r\n",
    "-5\r\nhello\r\n0\r\n\r\n",
    "0x5\r\nhello\r\n0\r\n\r\n",
    "5_\r\nhello\r\n0\r\n\r\n",
    "5 5\r\nhello\r\n0\r\n\r\n",
    "5\nhello\r\n0\r\n\r\n",
    "5\rhello\r\n0\r\n\r\n",
    "5;a\nb\r\nhello\r\n0\r\n\r\n",
    "5\r\nhelloXX0\r\n\r\n",
    "5\r\nhello\n0\r\n\r\n",
    "5\r\nhello0\r\n\r\n",
    "4\r\nhello\r\n0\r\n\r\n",
    "fffffffffffffffff\r\n",
    "10000000000000005\r\nhello\r\n0\r\n\r\n",
    "0\nX: y\r\n\r\n",
    "0\r\nX: y\nZ: z\r\n\r\n",
    "0\r\nno colon\r\n\r\n",
];

/// Requests that arrive, with their bodies. Next to a transfer coding, hyper drops a length, so
/// that nothing that follows is a request.
const ALONE: [(&str, &str); 11] = [
    (
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "",
    ),
    (
        "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        "",
    ),
    (
        "Transfer-Encoding: chunked\r\nContent-Length: x\r\n\r\n0\r\n\r\n",
        "",
    ),
    (
        "Content-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        "hello",
    ),
    (
        "Transfer-Encoding: Chunked\r\n\r\n5;x=y\r\nhello\r\n0\r\n\r\n",
        "hello",
    ),
    (
        "Transfer-Encoding:chunked\r\n\r\n5 ;x=\"\r\nhello\r\n0\r\n\r\n",
        "hello",
    ),
    (
        "Transfer-Encoding: \tchunked \r\n\r\n0005\r\nhello\r\n000\r\n\r\n",
        "hello",
    ),
    (
        "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0;last\r\n\r\n",
        "hello",
    ),
    (
        "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX: y\r\n\r\n",
        "hello",
    ),
    (
        "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nContent-Length: 7\r\n\r\n",
        "hello",
    ),
    (
        "Transfer_Encoding: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "",
    ),
];

/// Requests that arrive, with their bodies, and what follows arrives as further requests.
const FOLLOWED: [(&str, &str); 12] = [
    ("Content-Length: 5\r\n\r\nhello", "hello"),
    ("Content-Length: 005\r\n\r\nhello", "hello"),
    (
        "Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
        "hello",
    ),
    ("CONTENT-LENGTH:\t5 \r\n\r\nhello", "hello"),
    (
        "Connection: Content-Length\r\nContent-Length: 5\r\n\r\nhello",
        "hello",
    ),
    (
        "Content_Length: 9\r\nContent-Length: 5\r\n\r\nhello",
        "hello",
    ),
    ("Content-Length: 0\r\n\r\n\r\n\r\n", ""),
    ("Transfer_Encoding: chunked\r\n\r\n", ""),
    // A line feed ends a line (RFC 9112, section 2.2).
    ("X: a\nContent-Length: 5\r\n\r\nhello", "hello"),
    ("X: a\n\n", ""),
    ("X: a\n\r\n", ""),
    ("X: a\r\n\n", ""),
];

/// A session that accepts only what can be read in one way, and records it.
#[derive(Debug, Default)]
struct Recorded {
    /// Paths and bodies.
    requests: Vec<(String, String)>,
    /// What is left of a request that does not end.
    incomplete: String,
}

async fn record(stream: &mut TcpStream, recorded: &Mutex<Recorded>) {
    let mut bytes = Vec::new();
    loop {
        let text = String::from_utf8(bytes.clone()).expect("text");
        recorded
            .lock()
            .expect("no panic")
            .incomplete
            .clone_from(&text);
        if let Some((request, length)) = strict_request(&text) {
            recorded.lock().expect("no panic").requests.push(request);
            bytes.drain(..length);
            let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
            if stream.write_all(answer).await.is_err() {
                return;
            }
            continue;
        }
        if stream.read_buf(&mut bytes).await.unwrap_or(0) == 0 {
            return;
        }
    }
}

/// The first request with its length, if it is complete.
fn strict_request(text: &str) -> Option<((String, String), usize)> {
    let (head, body) = text.split_once("\r\n\r\n")?;
    let mut lines = head.split("\r\n");
    let line: Vec<&str> = lines.next()?.split(' ').collect();
    assert_eq!((line.len(), line[2]), (3, "HTTP/1.1"), "{text:?}");
    let mut framing = Vec::new();
    for line in lines {
        let (name, value) = line.split_once(": ").expect(line);
        let token = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
        assert!(!name.is_empty() && name.bytes().all(token), "{line:?}");
        assert!(!value.contains(char::is_control), "{line:?}");
        if ["content-length", "transfer-encoding"].contains(&name) {
            framing.push(value);
        }
    }
    let (body, rest) = match framing[..] {
        [] => (String::new(), body),
        ["chunked"] => dechunk(body)?,
        [length] => {
            let length: usize = length.parse().expect(length);
            (body.get(..length)?.to_owned(), &body[length..])
        }
        _ => panic!("more than one framing: {text:?}"),
    };
    Some(((line[1].to_owned(), body), text.len() - rest.len()))
}

fn dechunk(mut rest: &str) -> Option<(String, &str)> {
    let mut body = String::new();
    loop {
        let (size, after) = rest.split_once("\r\n")?;
        let size = usize::from_str_radix(size, 16).expect(size);
        if size == 0 {
            // Trailers, and the empty line.
            let end = if after.starts_with("\r\n") {
                2
            } else {
                after.find("\r\n\r\n")? + 4
            };
            return Some((body, &after[end..]));
        }
        body.push_str(after.get(..size)?);
        rest = after[size..].strip_prefix("\r\n")?;
    }
}

/// Sends the request, and further ones behind it. Returns the answers and what reached the session.
async fn sent(request: &str) -> (String, Recorded) {
    let fixture = Fixture::with_options(ProxyOptions {
        body_stall_timeout: Duration::from_millis(500),
        ..ProxyOptions::default()
    });
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("bound");
    let recorded = Arc::new(Mutex::new(Recorded::default()));
    let record_into = Arc::clone(&recorded);
    let recording = tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            record(&mut stream, &record_into).await;
        }
    });
    let alice = fixture.session("alice", address);
    let answers = fixture.exchange(format!("{request}{FOLLOWING}")).await;
    until("the end of all", || alice.activity.in_flight() == 0).await;
    if recording.is_finished() {
        recording.await.expect("every request is strictly formed");
    } else {
        recording.abort();
    }
    let recorded = std::mem::take(&mut *recorded.lock().expect("no panic"));
    (answers, recorded)
}

fn assert_refused(request: &str, answers: &str) {
    // 431 if the length is too great to be counted.
    let refused = ["400", "431"].contains(&status(answers));
    assert!(refused, "{request:?}: {answers}");
    let count = answers.matches("\r\ndate: ").count();
    assert_eq!(count, 1, "{request:?}: one answer, then closed: {answers}");
}

#[tokio::test]
async fn heads_that_can_be_read_in_two_ways_are_refused_and_never_forwarded() {
    let host = "POST / HTTP/1.1\r\nHost: alice.localhost\r\n";
    let fields = REFUSED_FIELDS.map(|fields| format!("{host}{fields}\r\n\r\n0\r\n\r\n"));
    let heads = REFUSED_HEADS.map(str::to_owned);
    for request in fields.iter().chain(&heads) {
        let (answers, recorded) = sent(request).await;
        assert_refused(request, &answers);
        assert!(recorded.requests.is_empty(), "{request:?}: {recorded:?}");
        assert_eq!(recorded.incomplete, "", "{request:?}");
    }
}

#[tokio::test]
async fn a_broken_chunk_ends_the_request_and_the_connection() {
    for body in BROKEN_BODIES {
        let request = format!(
            "POST / HTTP/1.1\r\nHost: alice.localhost\r\nTransfer-Encoding: chunked\r\n\r\n\
             3\r\nabc\r\n{body}"
        );
        let (answers, recorded) = sent(&request).await;
        assert_refused(&request, &answers);
        assert!(recorded.requests.is_empty(), "{request:?}: {recorded:?}");
    }
}

#[tokio::test]
async fn what_arrives_is_one_request_that_can_be_read_in_one_way() {
    for (rest, body) in ALONE.into_iter().chain(FOLLOWED) {
        let request = format!("POST /first HTTP/1.1\r\nHost: alice.localhost\r\n{rest}");
        let (answers, recorded) = sent(&request).await;
        let first = ("/first".to_owned(), body.to_owned());
        let mut expected = vec![first];
        if FOLLOWED.contains(&(rest, body)) {
            expected.extend(["/next", "/end"].map(|path| (path.to_owned(), String::new())));
        }
        assert_eq!(recorded.requests, expected, "{request:?}: {answers}");
        assert_eq!(recorded.incomplete, "", "{request:?}");
        let count = answers.matches("HTTP/1.1 200 ").count();
        assert_eq!(count, expected.len(), "{request:?}: {answers}");
    }
}

#[tokio::test]
async fn another_protocol_is_refused() {
    let fixture = Fixture::new();
    let backend = RawBackend::new().await;
    let alice = fixture.session("alice", backend.address);
    let hello = "\x16\x03\x01\x02\x00\x01\x00\x01\u{fc}\x03\x03 a TLS hello\r\n\r\n";
    assert_refused(hello, &fixture.exchange(hello).await);
    let http_2 = fixture
        .exchange("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
        .await;
    assert!(!http_2.contains(" 200 "), "{http_2}");
    assert_eq!(alice.connections(), 0);
}

#[tokio::test]
async fn a_chunked_get_keeps_its_body() {
    let fixture = Fixture::new();
    let mut backend = RawBackend::new().await;
    fixture.session("alice", backend.address);
    let mut client = fixture.connect().await;
    client
        .send(
            "GET /1 HTTP/1.1\r\nHost: alice.localhost\r\nTransfer-Encoding: Chunked\r\n\r\n\
             5;x=y\r\nhello\r\n0\r\n\r\n",
        )
        .await;
    let mut session = backend.accept().await;
    let first = session.read_until("0\r\n\r\n").await;
    assert!(first.starts_with("GET /1 HTTP/1.1\r\n"), "{first}");
    assert!(first.contains("transfer-encoding: chunked\r\n"), "{first}");
    assert!(
        first.ends_with("\r\n\r\n5\r\nhello\r\n0\r\n\r\n"),
        "{first}"
    );
}

#[tokio::test]
async fn lengths_arrive_as_they_were_sent() {
    let fixture = Fixture::new();
    let mut backend = RawBackend::new().await;
    fixture.session("alice", backend.address);
    let mut client = fixture.connect().await;
    for (request, expected) in [
        (
            "POST / HTTP/1.1\r\nHost: alice.localhost\r\nContent-Length: 0\r\n\r\n",
            "content-length: 0\r\n",
        ),
        (
            "POST / HTTP/1.1\r\nHost: alice.localhost\r\nContent-Length: 3\r\n\r\nabc",
            "content-length: 3\r\n",
        ),
        (
            "GET / HTTP/1.1\r\nHost: alice.localhost\r\nContent-Length: 3\r\n\r\nabc",
            "content-length: 3\r\n",
        ),
    ] {
        client.send(request).await;
        let mut session = backend.accept().await;
        let head = session.read_head().await;
        assert!(head.contains(expected), "{head}");
        assert!(!head.contains("transfer-encoding"), "{head}");
        if request.ends_with("abc") {
            session.read_until("abc").await;
        }
        session
            .send("HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
            .await;
        client.read_head().await;
    }
}
