//! A socket between a runtime and dockerd, for the trouble that a healthy dockerd does not make.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinHandle;

pub(crate) const DOCKER_SOCKET: &str = "/var/run/docker.sock";

/// What becomes of one request. Each comes on a connection of its own.
#[derive(Debug, Clone)]
pub(crate) enum Treatment {
    Pass,
    /// dockerd gets it, and its answer gets lost.
    LoseAnswer,
    /// dockerd gets it, and its answer breaks off behind this text.
    CutAnswer(&'static str),
    /// Nobody gets it, and it is never answered.
    Swallow,
    /// Nobody gets it; this is the answer.
    Answer(u16, &'static str),
    /// dockerd gets it and answers, and this comes instead.
    Misreport(u16, &'static str),
}

/// Ends with its value.
pub(crate) struct Relay {
    dir: tempfile::TempDir,
    open: Arc<AtomicUsize>,
    task: JoinHandle<()>,
}

impl Relay {
    /// `treat` sees the request's first line.
    pub(crate) fn start(treat: impl Fn(&str) -> Treatment + Send + Sync + 'static) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        Self::start_in(dir, treat)
    }

    pub(crate) fn start_in(
        dir: tempfile::TempDir,
        treat: impl Fn(&str) -> Treatment + Send + Sync + 'static,
    ) -> Self {
        let listener = UnixListener::bind(socket_in(dir.path())).expect("a new socket");
        let open = Arc::new(AtomicUsize::new(0));
        let (treat, counter) = (Arc::new(treat), Arc::clone(&open));
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (treat, counter) = (Arc::clone(&treat), Arc::clone(&counter));
                counter.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(async move {
                    // A connection that breaks is the client's to notice.
                    let _ = relay(client, &*treat).await;
                    counter.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        Self { dir, open, task }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        socket_in(self.dir.path())
    }

    /// Connections that the client has not closed.
    pub(crate) fn open(&self) -> usize {
        self.open.load(Ordering::SeqCst)
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub(crate) fn socket_in(dir: &Path) -> PathBuf {
    dir.join("docker.sock")
}

async fn relay(
    mut client: UnixStream,
    treat: &(dyn Fn(&str) -> Treatment + Send + Sync),
) -> std::io::Result<()> {
    let mut head = Vec::new();
    while !head.contains(&b'\n') {
        if client.read_buf(&mut head).await? == 0 {
            return Ok(());
        }
    }
    let line = String::from_utf8_lossy(&head);
    match treat(line.lines().next().unwrap_or_default()) {
        Treatment::Pass => {
            let mut docker = UnixStream::connect(DOCKER_SOCKET).await?;
            docker.write_all(&head).await?;
            tokio::io::copy_bidirectional(&mut client, &mut docker).await?;
        }
        Treatment::LoseAnswer => {
            let mut docker = UnixStream::connect(DOCKER_SOCKET).await?;
            docker.write_all(&head).await?;
            let (mut from_client, _) = client.split();
            let (mut from_docker, mut to_docker) = docker.split();
            tokio::io::copy(&mut from_client, &mut to_docker).await?;
            tokio::io::copy(&mut from_docker, &mut tokio::io::sink()).await?;
        }
        Treatment::CutAnswer(text) => {
            let mut docker = UnixStream::connect(DOCKER_SOCKET).await?;
            docker.write_all(&head).await?;
            let mut answer = Vec::new();
            while !String::from_utf8_lossy(&answer).contains(text) {
                let passed = answer.len();
                if docker.read_buf(&mut answer).await? == 0 {
                    break;
                }
                client.write_all(&answer[passed..]).await?;
            }
        }
        Treatment::Swallow => {
            tokio::io::copy(&mut client, &mut tokio::io::sink()).await?;
        }
        Treatment::Answer(status, message) => answer(client, status, message).await?,
        Treatment::Misreport(status, message) => {
            let mut docker = UnixStream::connect(DOCKER_SOCKET).await?;
            docker.write_all(&head).await?;
            let (mut from_client, _) = client.split();
            let (mut from_docker, mut to_docker) = docker.split();
            let mut first = [0];
            tokio::select! {
                // Cut short: the request is whole once dockerd answers.
                sent = tokio::io::copy(&mut from_client, &mut to_docker) => drop(sent?),
                answered = from_docker.read(&mut first) => drop(answered?),
            }
            answer(client, status, message).await?;
        }
    }
    Ok(())
}

async fn answer(mut client: UnixStream, status: u16, message: &str) -> std::io::Result<()> {
    let body = format!("{{\"message\":\"{message}\"}}");
    let length = body.len();
    let answer = format!(
        "HTTP/1.1 {status} Said\r\nContent-Type: application/json\r\n\
         Content-Length: {length}\r\n\r\n{body}"
    );
    client.write_all(answer.as_bytes()).await?;
    tokio::io::copy(&mut client, &mut tokio::io::sink()).await?;
    Ok(())
}
