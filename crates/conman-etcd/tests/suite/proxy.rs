//! A way to etcd that can be cut, or that loses what etcd answers.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::AbortHandle;

/// Takes so long on a slow way: what is read at once.
const A_PIECE: Duration = Duration::from_millis(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    Open,
    /// What etcd says is swallowed, for ever on the connections that say it.
    Deaf,
    /// What etcd says is kept until the way is another one.
    Held,
    /// What etcd says comes at about a megabyte a second.
    Slow,
    /// Nothing goes through, either way.
    Cut,
}

#[derive(Debug)]
pub(crate) struct Proxy {
    way: watch::Sender<Way>,
    address: SocketAddr,
    accepted: Arc<AtomicUsize>,
    task: AbortHandle,
}

impl Proxy {
    pub(crate) async fn to(etcd: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a listener");
        let address = listener.local_addr().expect("its address");
        let way = watch::Sender::new(Way::Open);
        let ways = way.clone();
        let accepted = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&accepted);
        let task = tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.expect("a client");
                count.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(carry(client, etcd, ways.clone()));
            }
        });
        Self {
            way,
            address,
            accepted,
            task: task.abort_handle(),
        }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// How many connections there have been. Whoever gives an answer up begins another one.
    pub(crate) fn connections(&self) -> usize {
        self.accepted.load(Ordering::SeqCst)
    }

    pub(crate) fn set(&self, way: Way) {
        self.way.send_replace(way);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn carry(client: TcpStream, etcd: SocketAddr, way: watch::Sender<Way>) {
    let Ok(server) = TcpStream::connect(etcd).await else {
        return;
    };
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let way = Arc::new(way);
    let there = Arc::clone(&way);
    let onwards = async move {
        let mut buffer = vec![0; 65_536];
        while let Ok(count @ 1..) = from_client.read(&mut buffer).await {
            if *there.borrow() == Way::Cut || to_server.write_all(&buffer[..count]).await.is_err() {
                break;
            }
        }
    };
    let back = async move {
        let mut buffer = vec![0; 65_536];
        let mut swallows = false;
        while let Ok(count @ 1..) = from_server.read(&mut buffer).await {
            let mut ways = way.subscribe();
            let changed = ways.wait_for(|way| *way != Way::Held).await;
            let now = changed.map_or(Way::Cut, |way| *way);
            if now == Way::Slow {
                tokio::time::sleep(A_PIECE).await;
            }
            // A stream with a hole would be torn at once: what is lost stays lost.
            swallows |= matches!(now, Way::Deaf | Way::Cut);
            if !swallows && to_client.write_all(&buffer[..count]).await.is_err() {
                break;
            }
        }
    };
    tokio::join!(onwards, back);
}
