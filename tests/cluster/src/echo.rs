//! What people's sessions run: an echo over HTTP and WebSocket.

use std::io::{self, Cursor};
use std::net::Ipv4Addr;

use futures_util::{SinkExt as _, StreamExt as _};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::accept_async;
use tokio_tungstenite::tungstenite::Message;

use crate::image::WITNESS;

/// Its template.
pub const TEMPLATE: &str = "echo";
const PORT: u16 = 8080;
const MAX_HEAD_BYTES: usize = 16 * 1024;

/// The template's table for a node's configuration.
pub(crate) fn template() -> String {
    format!(
        "[templates.{TEMPLATE}]\n\
         image = \"{}\"\n\
         command = [\"{WITNESS}\", \"--echo\"]\n\
         port = {PORT}\n\
         start_on_connect = true\n\
         on_node_loss = \"restart\"\n",
        conman_e2e::ROOT
    )
}

/// Serves until it fails. Says first which session and generation it is.
///
/// # Errors
/// The port is taken.
pub fn serve() -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT)).await?;
        loop {
            let (stream, _) = listener.accept().await?;
            // A client that leaves is no error of this program.
            tokio::spawn(async { drop(answer(stream).await) });
        }
    })
}

async fn answer(mut stream: TcpStream) -> io::Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") && head.len() < MAX_HEAD_BYTES {
        head.push(stream.read_u8().await?);
    }
    let text = String::from_utf8_lossy(&head).to_ascii_lowercase();
    let own = |name: &str| std::env::var(name).unwrap_or_default();
    let (session, generation) = (own("CONMAN_SESSION_ID"), own("CONMAN_GENERATION"));
    let hello = format!("this is {session}, generation {generation}");
    if text.contains("\r\nupgrade: websocket\r\n") {
        let (input, output) = stream.into_split();
        let stream = tokio::io::join(Cursor::new(head).chain(input), output);
        let mut socket = accept_async(stream).await.map_err(io::Error::other)?;
        let hello = Message::text(hello);
        socket.send(hello).await.map_err(io::Error::other)?;
        while let Some(Ok(message)) = socket.next().await {
            if message.is_text() || message.is_binary() {
                socket.send(message).await.map_err(io::Error::other)?;
            }
        }
        return Ok(());
    }
    let length = text
        .lines()
        .find_map(|line| line.strip_prefix("content-length:"))
        .and_then(|length| length.trim().parse::<u64>().ok());
    let mut body = format!("{hello}\n").into_bytes();
    let length = length.unwrap_or(0);
    let answer = format!(
        "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len() as u64 + length
    );
    body.splice(0..0, answer.into_bytes());
    stream.write_all(&body).await?;
    let (mut input, mut output) = stream.split();
    tokio::io::copy(&mut (&mut input).take(length), &mut output).await?;
    output.shutdown().await
}
