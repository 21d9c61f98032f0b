//! Echoes and printed lines of a session's program.

use std::time::Duration;

use crate::{Api, eventually_some};

/// Bound on the wait for a line of a log, which Docker writes in its own time.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a session's program has printed, once `mark` is in it.
///
/// # Panics
/// When it does not come.
pub async fn log_with(api: &Api, id: &str, mark: &str) -> String {
    let path = format!("/v1/sessions/{id}/logs");
    let what = format!("`{mark}` is in the log of {id}");
    eventually_some(&what, PATIENCE, async || {
        let log = api.get(&path).await.text();
        log.contains(mark).then_some(log)
    })
    .await
}

/// A table for [`Builder::toml`](crate::Builder::toml): the template `echo`, whose program tells
/// what it was sent.
///
/// It answers every request with the request's head as it came, and a WebSocket with the same in
/// one message, selecting the first subprotocol offered. `/page` is HTML that loads `/part.js`,
/// which sets `loaded`. Every request's first line goes to the session's log.
pub const ECHO_TEMPLATE: &str = r#"
[templates.echo]
image = "conman-test:python"
port = 8080
start_on_connect = true
command = ["python3", "-c", '''
import base64, hashlib, socketserver

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
PAGE = b"<!doctype html><meta charset=utf-8><title>echo</title><script src=/part.js></script>"

def take_head(connection):
    head = b""
    while b"\r\n\r\n" not in head:
        data = connection.recv(65536)
        if not data:
            return None
        head += data
    return head[:head.index(b"\r\n\r\n") + 4]

class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        head = take_head(self.request)
        if head is None:
            return
        first, *lines = head.strip().split(b"\r\n")
        print(first.decode("latin-1"), flush=True)
        fields = {}
        for line in lines:
            name, _, value = line.partition(b":")
            fields.setdefault(name.strip().lower(), value.strip())
        key = fields.get(b"sec-websocket-key")
        if key is None:
            self.answer(first.split(b" ")[1].split(b"?")[0], head)
        else:
            self.upgrade(key, fields.get(b"sec-websocket-protocol"), head)

    def answer(self, path, head):
        kind, body = b"text/plain", head
        if path == b"/page":
            kind, body = b"text/html", PAGE
        elif path == b"/part.js":
            kind, body = b"text/javascript", b"globalThis.loaded = true;"
        self.request.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\nConnection: close\r\n"
            b"Set-Cookie: own=program\r\nCache-Control: no-store\r\n\r\n%s" % (kind, len(body), body))

    def upgrade(self, key, offered, head):
        accept = base64.b64encode(hashlib.sha1(key + GUID).digest())
        answer = (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n"
                  b"Connection: Upgrade\r\nSec-WebSocket-Accept: " + accept + b"\r\n")
        if offered:
            answer += b"Sec-WebSocket-Protocol: " + offered.split(b",")[0].strip() + b"\r\n"
        message = head[:65535]
        frame = b"\x81\x7e" + len(message).to_bytes(2, "big") + message
        self.request.sendall(answer + b"\r\n" + frame)
        while self.request.recv(65536):
            pass

class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
    request_queue_size = 128

Server(("127.0.0.1", 8080), Echo).serve_forever()
''']
"#;
