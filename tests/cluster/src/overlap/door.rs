//! The connections to a witness. A WebSocket learns at once which witness answers, and echoes from then on; any
//! other request gets the same answer.

use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Duration;

use tokio_tungstenite::tungstenite::{self, Message};

use super::Line;

/// More than what tests and the proxy say together.
const MAX_HEAD_BYTES: usize = 16 * 1024;
const END_OF_HEAD: &str = "\r\n\r\n";
/// Between two looks at a head that comes in parts.
const PEEK_PAUSE: Duration = Duration::from_millis(5);

/// Answers on a port from now on, by threads of its own: a witness has nothing else that could wait.
///
/// # Errors
/// When it cannot be listened on.
pub fn answer(port: u16, line: &Line) -> io::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))?;
    let text = serde_json::to_string(line).map_err(io::Error::other)?;
    let accept = move || {
        for stream in listener.incoming().flatten() {
            let text = text.clone();
            // Whoever asks is a test's few clients.
            let _ = std::thread::Builder::new().spawn(move || greet(stream, text));
        }
    };
    std::thread::Builder::new().spawn(accept).map(drop)
}

fn greet(mut stream: TcpStream, text: String) {
    let _ = stream.set_nodelay(true);
    // A look at whether anybody listens ends here.
    let Ok(Some(head)) = peek_head(&stream) else {
        return;
    };
    let asks = head.to_ascii_lowercase();
    if !asks.contains("\r\nupgrade: websocket\r\n") {
        let length = text.len();
        // Read, so that closing does not reset the connection before the answer has arrived.
        let read = stream.read_exact(&mut vec![0; head.len()]);
        let answer = format!(
            "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{text}"
        );
        let _ = read.and_then(|()| stream.write_all(answer.as_bytes()));
        return;
    }
    let Ok(mut socket) = tungstenite::accept(stream) else {
        return;
    };
    if socket.send(Message::from(text)).is_err() {
        return;
    }
    while let Ok(message) = socket.read() {
        if (message.is_text() || message.is_binary()) && socket.send(message).is_err() {
            return;
        }
    }
}

/// The head of a request, left to be read; `None` where none comes.
#[expect(clippy::disallowed_methods, reason = "a thread of its own")]
fn peek_head(stream: &TcpStream) -> io::Result<Option<String>> {
    let mut bytes = [0; MAX_HEAD_BYTES];
    loop {
        let length = stream.peek(&mut bytes)?;
        let text = String::from_utf8_lossy(&bytes[..length]);
        if let Some(end) = text.find(END_OF_HEAD) {
            return Ok(Some(text[..end + END_OF_HEAD.len()].to_owned()));
        }
        if length == 0 || length == bytes.len() {
            return Ok(None);
        }
        // A part of it has come: what is there already wakes nobody.
        std::thread::sleep(PEEK_PAUSE);
    }
}
