//! Somebody who is connected to a session, and wants to be so again.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use futures_util::StreamExt as _;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tokio_tungstenite::WebSocketStream;

use crate::overlap::{Line, visit};

/// A node holds a request for longer; whoever waits loads the page anew at last.
const ATTEMPT: Duration = Duration::from_secs(30);
/// Between a refusal, which no client ought to see, and the next attempt.
const PAUSE: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(super) struct Client {
    through: SocketAddr,
    id: String,
    socket: WebSocketStream<TcpStream>,
    greeting: Line,
    reloads: bool,
}

/// How a client came back.
#[derive(Debug)]
pub(super) struct Served {
    /// When its connection was closed for it; `None` for one that did not wait for that.
    pub(super) closed: Option<Instant>,
    pub(super) again: Instant,
    /// What it was told instead of being served.
    pub(super) refusals: Vec<String>,
}

impl Client {
    /// Connects to a session that runs.
    pub(super) async fn connect(through: SocketAddr, id: String, reloads: bool) -> Result<Self> {
        let opened = timeout(ATTEMPT, visit(through, &id)).await;
        let (socket, greeting) = opened
            .with_context(|| format!("{id} does not answer"))?
            .with_context(|| format!("cannot connect to {id}"))?;
        ensure!(greeting.host == "n1", "{id} runs on {}", greeting.host);
        Ok(Self {
            through,
            id,
            socket,
            greeting,
            reloads,
        })
    }

    /// Connects until a newer container greets.
    pub(super) async fn come_back(mut self, mut going: watch::Receiver<Option<Instant>>) -> Served {
        let closed = if self.reloads {
            // Its sender lives as long as the benchmark.
            let _ = going.wait_for(Option::is_some).await;
            None
        } else {
            while let Some(Ok(message)) = self.socket.next().await {
                if message.is_close() {
                    break;
                }
            }
            Some(Instant::now())
        };
        drop(self.socket);
        let mut refusals = Vec::new();
        loop {
            match timeout(ATTEMPT, visit(self.through, &self.id)).await {
                Ok(Ok((_socket, line))) if line.generation > self.greeting.generation => {
                    let again = Instant::now();
                    return Served {
                        closed,
                        again,
                        refusals,
                    };
                }
                Ok(Ok(_)) => refusals.push("the old container answered".to_owned()),
                Ok(Err(error)) => refusals.push(format!("{error:#}")),
                Err(_) => refusals.push(format!("no answer within {ATTEMPT:?}")),
            }
            sleep(PAUSE).await;
        }
    }
}
