use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow};
use async_trait::async_trait;
use conman_core::{Activity, Closing};
use conman_proto::{Generation, SessionId};
use conman_proxy::{
    Backend, Directory, Gate, Link, Proxy, ProxyOptions, Refusal, Route, Verdict, Way,
};
use tokio::net::TcpStream;
use tokio::sync::watch;

/// conman's proxy alone, in front of a given address: what nginx and HAProxy are compared with.
/// Every session leads to `backend`; nobody is refused.
///
/// # Errors
/// When the address cannot be listened on.
pub async fn serve_forward(listen: SocketAddr, backend: SocketAddr) -> Result<()> {
    let listener =
        std::net::TcpListener::bind(listen).with_context(|| format!("listening on {listen}"))?;
    listener
        .set_nonblocking(true)
        .context("making the listener nonblocking")?;
    let (closing, receiver) = watch::channel(None);
    let directory = Everywhere {
        backend: Arc::new(Address(backend)),
        activity: Arc::default(),
        closing: receiver,
    };
    let proxy = Proxy::start(
        listener,
        ProxyOptions::default(),
        Arc::new(directory),
        Arc::new(Open),
    )
    .map_err(|error| anyhow!("starting the proxy: {error}"))?;
    tokio::signal::ctrl_c()
        .await
        .context("waiting for a signal")?;
    drop((proxy, closing));
    Ok(())
}

struct Everywhere {
    backend: Arc<Address>,
    activity: Arc<Activity>,
    closing: watch::Receiver<Option<Closing>>,
}

#[async_trait]
impl Directory for Everywhere {
    async fn route(&self, id: &SessionId, _may_start: bool) -> Result<Route, Refusal> {
        Ok(Route {
            session: id.clone(),
            generation: Generation::FIRST,
            activity: Arc::clone(&self.activity),
            closing: self.closing.clone(),
            way: Way::Session,
            backend: Arc::<Address>::clone(&self.backend),
        })
    }
}

struct Address(SocketAddr);

#[async_trait]
impl Backend for Address {
    async fn connect(&self) -> io::Result<Link> {
        TcpStream::connect(self.0).await.map(Link::from)
    }
}

struct Open;

impl Gate for Open {
    fn admit(&self, _: &mut http::request::Parts, _: &SessionId, _: &str) -> Verdict {
        Verdict::Admit { may_start: false }
    }
}
