use std::mem;

/// Most bytes of an incomplete head that are kept; hyper's limit is lower.
const MAX_PARTIAL_BYTES: usize = 1 << 20;

/// Longest `Content-Length` in digits that surely fits a `u64`.
const MAX_LENGTH_DIGITS: usize = 19;

/// Tracks the message framing of one client connection in parallel with hyper, and approves each
/// request head that can be read in only one way.
///
/// hyper accepts some heads that another reader might frame differently: a `Content-Length` next
/// to a `Transfer-Encoding` is dropped silently, repeated lengths are merged, bare line feeds end
/// lines. This watches the same bytes before hyper has them. It changes nothing. It counts the
/// heads it approves, and the service refuses a request whose head is not among them. After the
/// first head that it does not approve it approves none, because from there on the two might
/// disagree about where a message begins.
///
/// ```text
///  ┌─> Head ──> Sized(n) ──┐
///  │    │ └───> Chunked ───┤
///  │    v                  │
///  │   Lost (final)        │
///  └───────────────────────┘
/// ```
#[derive(Debug, Default)]
pub(crate) struct Framing {
    state: State,
    /// The beginning of an incomplete head.
    partial: Vec<u8>,
    /// Between the CR and the LF of an empty line before a head.
    empty_line: bool,
    approved: u64,
    broken_body: bool,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum State {
    #[default]
    Head,
    /// Bytes of a body with a length that are still to come.
    Sized(u64),
    Chunked(Chunk),
    Lost,
}

/// Position within a chunked body (RFC 9112, section 7.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Chunk {
    Start,
    Size(u64),
    SpaceAfterSize(u64),
    Extension(u64),
    SizeLineFeed(u64),
    Data(u64),
    DataReturn,
    DataLineFeed,
    TrailerStart,
    Trailer,
    TrailerLineFeed,
    EndLineFeed,
    End,
}

/// How the body behind an approved head is framed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Body {
    Sized(u64),
    Chunked,
}

impl Framing {
    /// Heads approved so far.
    pub(crate) fn approved(&self) -> u64 {
        self.approved
    }

    /// Whether some, but not all, of a head has arrived.
    pub(crate) fn is_mid_head(&self) -> bool {
        !self.partial.is_empty()
    }

    /// Whether a chunked body is malformed. hyper detects that except for details, such as a bare
    /// line feed in a trailer.
    pub(crate) fn has_broken_body(&self) -> bool {
        self.broken_body
    }

    /// Whether the last byte seen ended a message, so that no byte of the client is unread if the
    /// connection is closed at this point.
    pub(crate) fn is_between_messages(&self) -> bool {
        self.state == State::Head && self.partial.is_empty()
    }

    /// Processes the next bytes of the connection.
    pub(crate) fn observe(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let used = match self.state {
                State::Head => self.observe_head(bytes),
                State::Sized(left) => {
                    let used = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
                    let left = left - used as u64;
                    self.state = if left == 0 {
                        State::Head
                    } else {
                        State::Sized(left)
                    };
                    used
                }
                State::Chunked(chunk) => self.observe_chunked(chunk, bytes),
                State::Lost => return,
            };
            bytes = &bytes[used..];
        }
    }

    /// Returns how many of the bytes belong to the head.
    fn observe_head(&mut self, bytes: &[u8]) -> usize {
        if self.partial.is_empty() {
            // Empty lines before a request line are skipped (RFC 9112, section 2.2).
            match (self.empty_line, bytes[0]) {
                (false, b'\r') => {
                    self.empty_line = true;
                    return 1;
                }
                (true, b'\n') => {
                    self.empty_line = false;
                    return 1;
                }
                (true, _) => {
                    self.lose();
                    return bytes.len();
                }
                (false, _) => {}
            }
            if let Some(end) = head_end(bytes, 0) {
                self.judge(&bytes[..end]);
                return end;
            }
        }
        let known = self.partial.len();
        self.partial.extend_from_slice(bytes);
        if let Some(end) = head_end(&self.partial, known) {
            let mut head = mem::take(&mut self.partial);
            head.truncate(end);
            self.judge(&head);
            return end - known;
        }
        if self.partial.len() > MAX_PARTIAL_BYTES {
            self.lose();
        }
        bytes.len()
    }

    fn judge(&mut self, head: &[u8]) {
        match judge_head(head) {
            Some(body) => {
                self.approved += 1;
                self.state = match body {
                    Body::Sized(0) => State::Head,
                    Body::Sized(length) => State::Sized(length),
                    Body::Chunked => State::Chunked(Chunk::Start),
                };
            }
            None => self.lose(),
        }
    }

    fn lose(&mut self) {
        self.state = State::Lost;
        self.partial = Vec::new();
    }

    /// Returns how many of the bytes belong to the chunked body.
    fn observe_chunked(&mut self, mut chunk: Chunk, bytes: &[u8]) -> usize {
        let mut used = 0;
        while used < bytes.len() {
            if let Chunk::Data(left) = chunk {
                let step = usize::try_from(left)
                    .unwrap_or(usize::MAX)
                    .min(bytes.len() - used);
                used += step;
                let left = left - step as u64;
                chunk = if left == 0 {
                    Chunk::DataReturn
                } else {
                    Chunk::Data(left)
                };
                continue;
            }
            let Some(next) = chunk.after(bytes[used]) else {
                self.broken_body = true;
                self.lose();
                return bytes.len();
            };
            used += 1;
            chunk = next;
            if chunk == Chunk::End {
                self.state = State::Head;
                return used;
            }
        }
        self.state = State::Chunked(chunk);
        used
    }
}

impl Chunk {
    /// The position after `byte`, or `None` if the grammar does not allow it. `Data` is skipped by
    /// its length and never occurs here.
    fn after(self, byte: u8) -> Option<Self> {
        match (self, byte) {
            (Self::Start, _) => digit(0, byte).map(Self::Size),
            (Self::Size(size) | Self::SpaceAfterSize(size), b' ' | b'\t') => {
                Some(Self::SpaceAfterSize(size))
            }
            (Self::Size(size) | Self::SpaceAfterSize(size), b';') => Some(Self::Extension(size)),
            (Self::Size(size) | Self::SpaceAfterSize(size) | Self::Extension(size), b'\r') => {
                Some(Self::SizeLineFeed(size))
            }
            (Self::Size(size), _) => digit(size, byte).map(Self::Size),
            (Self::Extension(_), b'\n') => None,
            (Self::Extension(size), _) => Some(Self::Extension(size)),
            (Self::SizeLineFeed(0), b'\n') => Some(Self::TrailerStart),
            (Self::SizeLineFeed(size), b'\n') => Some(Self::Data(size)),
            (Self::DataReturn, b'\r') => Some(Self::DataLineFeed),
            (Self::DataLineFeed, b'\n') => Some(Self::Start),
            (Self::TrailerStart, b'\r') => Some(Self::EndLineFeed),
            (Self::Trailer, b'\r') => Some(Self::TrailerLineFeed),
            (Self::TrailerStart | Self::Trailer, b'\n') => None,
            (Self::TrailerStart | Self::Trailer, _) => Some(Self::Trailer),
            (Self::TrailerLineFeed, b'\n') => Some(Self::TrailerStart),
            (Self::EndLineFeed, b'\n') => Some(Self::End),
            (
                Self::SpaceAfterSize(_)
                | Self::SizeLineFeed(_)
                | Self::Data(_)
                | Self::DataReturn
                | Self::DataLineFeed
                | Self::TrailerLineFeed
                | Self::EndLineFeed
                | Self::End,
                _,
            ) => None,
        }
    }
}

fn digit(size: u64, byte: u8) -> Option<u64> {
    let digit = char::from(byte).to_digit(16)?;
    size.checked_mul(16)?.checked_add(u64::from(digit))
}

/// Position after the empty line that ends a head. Everything before `known` was searched
/// already, except for an end that straddles it.
fn head_end(bytes: &[u8], known: usize) -> Option<usize> {
    const END: &[u8] = b"\r\n\r\n";
    let from = known.saturating_sub(END.len() - 1);
    bytes[from..]
        .windows(END.len())
        .position(|window| window == END)
        .map(|at| from + at + 4)
}

/// The body's framing if the head, including its final empty line, can be read in only one way.
fn judge_head(head: &[u8]) -> Option<Body> {
    let lines = head.strip_suffix(b"\r\n\r\n")?;
    let mut lines = Lines { rest: Some(lines) };
    let http_1_1 = judge_request_line(lines.next()?)?;
    let mut length = None;
    let mut chunked = false;
    for line in lines {
        let colon = line.iter().position(|&byte| byte == b':')?;
        let (name, value) = (&line[..colon], trim(&line[colon + 1..]));
        // An empty name, a space before the colon and a folded line all fail here.
        if name.is_empty() || !name.iter().copied().all(is_token) {
            return None;
        }
        if value
            .iter()
            .any(|&byte| (byte < b' ' && byte != b'\t') || byte == 0x7f)
        {
            return None;
        }
        if name.eq_ignore_ascii_case(b"content-length") {
            if length.replace(parse_length(value)?).is_some() {
                return None;
            }
        } else if name.eq_ignore_ascii_case(b"transfer-encoding") {
            if chunked || !http_1_1 || !value.eq_ignore_ascii_case(b"chunked") {
                return None;
            }
            chunked = true;
        }
    }
    match (length, chunked) {
        (Some(_), true) => None,
        (None, true) => Some(Body::Chunked),
        (length, false) => Some(Body::Sized(length.unwrap_or(0))),
    }
}

/// Whether the version is 1.1 rather than 1.0; `None` for a line of another form.
fn judge_request_line(line: &[u8]) -> Option<bool> {
    let mut parts = line.split(|&byte| byte == b' ');
    let (method, target, version) = (parts.next()?, parts.next()?, parts.next()?);
    let well_formed = parts.next().is_none()
        && !method.is_empty()
        && method.iter().copied().all(is_token)
        && !target.is_empty()
        && target.iter().all(|&byte| byte > b' ' && byte != 0x7f);
    match version {
        b"HTTP/1.1" if well_formed => Some(true),
        b"HTTP/1.0" if well_formed => Some(false),
        _ => None,
    }
}

fn parse_length(value: &[u8]) -> Option<u64> {
    if value.is_empty() || value.len() > MAX_LENGTH_DIGITS {
        return None;
    }
    value.iter().try_fold(0_u64, |length, &byte| {
        byte.is_ascii_digit()
            .then(|| length * 10 + u64::from(byte - b'0'))
    })
}

/// `tchar` of RFC 9110, section 5.6.2.
fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

fn trim(mut value: &[u8]) -> &[u8] {
    while let [b' ' | b'\t', rest @ ..] = value {
        value = rest;
    }
    while let [rest @ .., b' ' | b'\t'] = value {
        value = rest;
    }
    value
}

/// The lines of a head, split at CRLF. A lone CR or LF stays in its line and fails there.
struct Lines<'head> {
    rest: Option<&'head [u8]>,
}

impl<'head> Iterator for Lines<'head> {
    type Item = &'head [u8];

    fn next(&mut self) -> Option<&'head [u8]> {
        let rest = self.rest?;
        match rest.windows(2).position(|pair| pair == b"\r\n") {
            Some(at) => {
                self.rest = Some(&rest[at + 2..]);
                Some(&rest[..at])
            }
            None => {
                self.rest = None;
                Some(rest)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn approved(bytes: &[u8]) -> u64 {
        let mut framing = Framing::default();
        framing.observe(bytes);
        framing.approved()
    }

    #[test]
    fn plain_heads_and_their_bodies_are_followed_to_the_next_head() {
        let bytes = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n\
            POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nGET /\
            \r\nPUT /y HTTP/1.1\r\nTransfer-Encoding: Chunked\r\n\r\n\
            5;name=value\r\nGET /\r\nA \r\n0123456789\r\n0\r\nX: y\r\n\r\n\
            GET /z HTTP/1.0\r\n\r\n";
        let mut framing = Framing::default();
        framing.observe(bytes);
        assert_eq!(framing.approved(), 4);
        assert!(framing.is_between_messages());
    }

    #[test]
    fn heads_that_can_be_read_in_two_ways_are_not_approved() {
        for head in [
            "GET / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
            "GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n",
            "GET / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
            "GET / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\n",
            "GET / HTTP/1.1\r\nContent-Length: 5, 5\r\n\r\n",
            "GET / HTTP/1.1\r\nContent-Length: +5\r\n\r\n",
            "GET / HTTP/1.1\r\nContent-Length: 0x5\r\n\r\n",
            "GET / HTTP/1.1\r\nContent-Length:\r\n\r\n",
            "GET / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
            "GET / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
            "GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
            "GET / HTTP/1.1\r\nTransfer-Encoding: xchunked\r\n\r\n",
            "GET / HTTP/1.1\r\nTransfer-Encoding : chunked\r\n\r\n",
            "GET / HTTP/1.1\r\nTransfer-Encoding:\x0bchunked\r\n\r\n",
            "GET / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n",
            "GET / HTTP/1.1\r\nA: b\r\n folded\r\n\r\n",
            "GET / HTTP/1.1\r\nA: b\nContent-Length: 5\r\n\r\n",
            "GET / HTTP/1.1\r\nA: b\rContent-Length: 5\r\n\r\n",
            "GET / HTTP/1.1\nA: b\n\n",
            "GET  / HTTP/1.1\r\nA: b\r\n\r\n",
            "GET / HTTP/1.1 \r\nA: b\r\n\r\n",
            "GET / HTTP/2.0\r\nA: b\r\n\r\n",
            "GET /\r\n\r\n",
            "GET / HTTP/1.1\r\nno colon\r\n\r\n",
            "GET / HTTP/1.1\r\n: empty\r\n\r\n",
        ] {
            assert_eq!(approved(head.as_bytes()), 0, "{head:?}");
        }
    }

    #[test]
    fn nothing_is_approved_behind_a_broken_chunk() {
        for body in [
            "g\r\n",
            "\r\n",
            "5\nhello\r\n",
            "5\r\nhelloX\r\n",
            "10000000000000000\r\n",
        ] {
            let bytes = format!(
                "PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n{body}0\r\n\r\n\
                 GET / HTTP/1.1\r\n\r\n"
            );
            assert_eq!(approved(bytes.as_bytes()), 1, "{body:?}");
        }
    }

    #[test]
    fn a_head_in_progress_is_told_apart_from_an_idle_connection() {
        let mut framing = Framing::default();
        assert!(!framing.is_mid_head());
        framing.observe(b"\r\n");
        assert!(!framing.is_mid_head());
        framing.observe(b"G");
        assert!(framing.is_mid_head());
        framing.observe(b"ET / HTTP/1.1\r\n\r\n");
        assert!(!framing.is_mid_head());
        assert_eq!(framing.approved(), 1);
    }

    fn message() -> impl Strategy<Value = Vec<u8>> {
        let body = proptest::collection::vec(any::<u8>(), 0..40);
        prop_oneof![
            Just(b"GET /a HTTP/1.1\r\nHost: a\r\n\r\n".to_vec()),
            Just(b"\r\n\r\nGET /a HTTP/1.0\r\n\r\n".to_vec()),
            Just(b"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n".to_vec()),
            body.clone().prop_map(|body| {
                let head = format!("PUT /b HTTP/1.1\r\ncontent-length: {}\r\n\r\n", body.len());
                [head.as_bytes(), &body].concat()
            }),
            (body, any::<bool>()).prop_map(|(body, trailer)| {
                let mut bytes = b"PUT /c HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
                for part in body.chunks(7) {
                    bytes.extend_from_slice(format!("{:x} ;e\r\n", part.len()).as_bytes());
                    bytes.extend_from_slice(part);
                    bytes.extend_from_slice(b"\r\n");
                }
                let end: &[u8] = if trailer {
                    b"0\r\nA: b\r\n\r\n"
                } else {
                    b"0\r\n\r\n"
                };
                bytes.extend_from_slice(end);
                bytes
            }),
            proptest::collection::vec(any::<u8>(), 1..20),
        ]
    }

    /// The bodies of the approved requests that have ended, as this module frames them.
    fn bodies(bytes: &[u8]) -> (Framing, Vec<Vec<u8>>) {
        let mut framing = Framing::default();
        let mut bodies = Vec::new();
        let mut body = Vec::new();
        for &byte in bytes {
            let before = (framing.state, framing.approved());
            framing.observe(&[byte]);
            if matches!(before.0, State::Sized(_) | State::Chunked(Chunk::Data(_))) {
                body.push(byte);
            }
            let ended = before.0 != State::Head || framing.approved() > before.1;
            if ended && framing.state == State::Head {
                bodies.push(std::mem::take(&mut body));
            }
        }
        (framing, bodies)
    }

    /// The bodies that hyper hands to a service, `None` for one that it found broken.
    fn hyper_bodies(bytes: Vec<u8>) -> Vec<Option<Vec<u8>>> {
        use http_body_util::{BodyExt, Empty};
        use hyper::service::service_fn;
        use tokio::io::{AsyncReadExt, AsyncWriteExt};

        let served = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
        let record = std::sync::Arc::clone(&served);
        let service = service_fn(move |request: http::Request<hyper::body::Incoming>| {
            let record = std::sync::Arc::clone(&record);
            async move {
                let body = request.into_body().collect().await;
                let body = body.ok().map(|body| body.to_bytes().to_vec());
                record.lock().expect("no panic while held").push(body);
                Ok::<_, std::convert::Infallible>(http::Response::new(Empty::<bytes::Bytes>::new()))
            }
        });
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .expect("a runtime");
        runtime.block_on(async move {
            let (mut client, server) = tokio::io::duplex(1 << 16);
            let mut http = hyper::server::conn::http1::Builder::new();
            http.half_close(true).header_read_timeout(None);
            let serving = http.serve_connection(hyper_util::rt::TokioIo::new(server), service);
            let asking = async move {
                // hyper may stop reading before everything is sent.
                let _ = client.write_all(&bytes).await;
                let _ = client.shutdown().await;
                let mut answers = Vec::new();
                let _ = client.read_to_end(&mut answers).await;
            };
            let _ = tokio::join!(serving, asking);
        });
        std::sync::Arc::into_inner(served)
            .expect("hyper is done")
            .into_inner()
            .expect("no panic while held")
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 1_000, ..ProptestConfig::default() })]

        #[test]
        fn hyper_frames_every_approved_request_alike(
            messages in proptest::collection::vec(message(), 1..5),
            edits in proptest::collection::vec((any::<usize>(), 0_u8..3, 0_usize..15), 0..4),
        ) {
            let mut bytes = messages.concat();
            for (at, kind, with) in edits {
                let at = at % bytes.len();
                let byte = b"\r\n \t:;,0159aX\0\xff"[with];
                match kind {
                    0 => bytes[at] = byte,
                    1 => bytes.insert(at, byte),
                    _ if bytes.len() > 1 => { bytes.remove(at); }
                    _ => {}
                }
            }
            let (framing, ours) = bodies(&bytes);
            let theirs = hyper_bodies(bytes);
            let approved = usize::try_from(framing.approved()).expect("few messages");
            let last = theirs.len().saturating_sub(1);
            for (number, body) in theirs.into_iter().take(approved).enumerate() {
                match body {
                    Some(body) if framing.has_broken_body() => {
                        prop_assert!(ours.get(number).is_none_or(|ours| *ours == body));
                    }
                    Some(body) => prop_assert_eq!(ours.get(number), Some(&body)),
                    // A trailer that is no field, for example: hyper serves nothing after it.
                    None => prop_assert_eq!(number, last),
                }
            }
        }
    }

    proptest! {
        #[test]
        fn how_the_bytes_arrive_changes_nothing(
            messages in proptest::collection::vec(message(), 1..5),
            cuts in proptest::collection::vec(1_usize..9, 1..200),
        ) {
            let bytes = messages.concat();
            let mut whole = Framing::default();
            whole.observe(&bytes);
            let mut pieces = Framing::default();
            let mut rest = bytes.as_slice();
            for cut in cuts.into_iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (piece, tail) = rest.split_at(cut.min(rest.len()));
                pieces.observe(piece);
                rest = tail;
            }
            prop_assert_eq!(whole.approved(), pieces.approved());
            prop_assert_eq!(whole.state, pieces.state);
            prop_assert_eq!(whole.is_mid_head(), pieces.is_mid_head());
        }
    }
}
