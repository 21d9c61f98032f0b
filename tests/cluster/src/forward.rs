//! Connections from the machine itself into a host's network namespace.

use std::fs::File;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tokio::io::copy_bidirectional;
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinSet;

/// How long nothing is accepted after that failed, so that it does not take a processor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// Listens on the machine and connects within a namespace: one thread that has entered it, with
/// sockets that it was given before. Nothing is left of it when it is dropped or its process dies.
#[derive(Debug)]
pub struct Forward {
    addresses: Vec<SocketAddr>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Forward {
    /// Forwards each first address, on the machine, to the second, in the namespace. A port 0 is
    /// any free one: [`Self::addresses`] tells.
    ///
    /// # Errors
    /// When an address is taken or the namespace cannot be entered.
    pub fn open(namespace: &Path, pairs: &[(SocketAddr, SocketAddr)]) -> Result<Self> {
        let listeners = listen(pairs)?;
        Self::start(namespace, move || Ok(listeners))
    }

    /// The same with both addresses in the namespace.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn within(namespace: &Path, pairs: &[(SocketAddr, SocketAddr)]) -> Result<Self> {
        let pairs = pairs.to_vec();
        Self::start(namespace, move || listen(&pairs))
    }

    /// `listeners` is called within the namespace.
    fn start(
        namespace: &Path,
        listeners: impl FnOnce() -> Result<Vec<Listener>> + Send + 'static,
    ) -> Result<Self> {
        let file = File::open(namespace)
            .with_context(|| format!("cannot open {}", namespace.display()))?;
        let (stop, stopped) = oneshot::channel();
        // The one message says whether it entered, and where it listens.
        let (entered, answer) = std::sync::mpsc::sync_channel(1);
        let thread = std::thread::Builder::new()
            .name("forward".to_owned())
            .spawn(move || {
                let network = Some(LinkNameSpaceType::Network);
                let result = move_into_link_name_space(file.as_fd(), network);
                let opened = result.map_err(Into::into).and_then(|()| listeners());
                match opened {
                    Ok(listeners) => {
                        let _ = entered.send(addresses(&listeners));
                        run(listeners, stopped);
                    }
                    Err(error) => drop(entered.send(Err(error))),
                }
            })
            .context("cannot make a thread")?;
        let addresses = answer
            .recv()
            .context("a thread ended")?
            .with_context(|| format!("cannot forward into {}", namespace.display()))?;
        Ok(Self {
            addresses,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// Where it listens, in the order of the pairs.
    #[must_use]
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }
}

impl Drop for Forward {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A listener, and where its connections go.
type Listener = (TcpListener, SocketAddr);

fn listen(pairs: &[(SocketAddr, SocketAddr)]) -> Result<Vec<Listener>> {
    let listen = |(here, there): &(SocketAddr, SocketAddr)| {
        let listener =
            TcpListener::bind(here).with_context(|| format!("cannot listen on {here}"))?;
        listener.set_nonblocking(true).context("cannot listen")?;
        Ok((listener, *there))
    };
    pairs.iter().map(listen).collect()
}

fn addresses(listeners: &[Listener]) -> Result<Vec<SocketAddr>> {
    let address = |(listener, _): &Listener| {
        let address = listener.local_addr();
        address.context("a listener has an address")
    };
    listeners.iter().map(address).collect()
}

fn run(listeners: Vec<Listener>, stopped: oneshot::Receiver<()>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let Ok(runtime) = runtime else { return };
    runtime.block_on(async {
        let mut serving = JoinSet::new();
        for (listener, to) in listeners {
            if let Ok(listener) = tokio::net::TcpListener::from_std(listener) {
                serving.spawn(serve(listener, to));
            }
        }
        let _ = stopped.await;
    });
    // Dropping the runtime ends what it serves, wherever that is.
}

async fn serve(listener: tokio::net::TcpListener, to: SocketAddr) {
    let mut connections = JoinSet::new();
    loop {
        // Cancelling an accept loses no connection, nor does that of a join lose a task.
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((mut client, _)) = accepted else {
                    // Too many files are open: some of them will be closed.
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                };
                connections.spawn(async move {
                    // A host that is not reached closes the client's connection at once.
                    if let Ok(mut server) = TcpStream::connect(to).await {
                        let _ = client.set_nodelay(true);
                        let _ = server.set_nodelay(true);
                        let _ = copy_bidirectional(&mut client, &mut server).await;
                    }
                });
            }
            Some(_) = connections.join_next() => {}
        }
    }
}
