//! WebSockets to a witness: each is told at once who answers, and kept.

use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};

use tokio_tungstenite::tungstenite::{self, Message};

use super::Line;

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

fn greet(stream: TcpStream, text: String) {
    let _ = stream.set_nodelay(true);
    // A look at whether anybody listens ends here.
    let Ok(mut socket) = tungstenite::accept(stream) else {
        return;
    };
    if socket.send(Message::from(text)).is_err() {
        return;
    }
    while socket.read().is_ok() {}
}
