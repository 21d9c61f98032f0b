//! The API for requests of other nodes, which the proxy's listener for nodes accepts.

use std::io;

use async_trait::async_trait;
use axum::Router;
use conman_peer::Stream;
use conman_proxy::{ADDED_HEAD_BYTES, ADDED_HEADERS, Backend};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use crate::{ServeOptions, serve_node};

/// Buffered bytes between the listener and the API, in each direction.
const PIPE_BYTES: usize = 64 * 1024;

/// The API of this node, at the other end of a pipe. It runs on the runtime that made this, so that it
/// does not delay session traffic.
#[derive(Debug)]
pub struct ApiBackend {
    router: Router,
    options: ServeOptions,
    closing: CancellationToken,
    main: Handle,
}

impl ApiBackend {
    /// Serves `router` until `closing`, with room for the headers that nodes add.
    #[must_use]
    pub fn new(router: Router, options: ServeOptions, closing: CancellationToken) -> Self {
        Self {
            router,
            options: ServeOptions {
                max_headers: options.max_headers + ADDED_HEADERS,
                max_header_bytes: options.max_header_bytes + ADDED_HEAD_BYTES,
                ..options
            },
            closing,
            main: Handle::current(),
        }
    }
}

#[async_trait]
impl Backend for ApiBackend {
    async fn connect(&self) -> io::Result<Stream> {
        let (here, there) = tokio::io::duplex(PIPE_BYTES);
        let (router, options) = (self.router.clone(), self.options.clone());
        self.main
            .spawn(serve_node(there, router, options, self.closing.clone()));
        Ok(Stream::Other(Box::new(here)))
    }
}
