//! Docker's API, as far as the old way needs it.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, Result};
use http::Method;
use serde_json::{Value, json};

use super::{OldNode, PORT};
use crate::http_client::Connection;
use crate::storm::{JOURNAL, MEMORY_BYTES, PAUSE_MS, WITNESS};

/// A session's container.
#[derive(Debug, Clone)]
pub(super) struct Container {
    pub(super) id: String,
    pub(super) address: SocketAddr,
}

pub(super) struct Engine {
    socket: String,
    /// The body of a request to create a container, without its environment.
    container: Value,
    node: String,
}

impl Engine {
    pub(super) fn new(options: &OldNode) -> Self {
        let command = json!([WITNESS, JOURNAL, PORT.to_string(), PAUSE_MS.to_string()]);
        Self {
            socket: format!("unix:{}", options.docker.display()),
            container: json!({
                "Image": options.image, "Cmd": command,
                "HostConfig": {
                    "Binds": [options.bind], "CgroupParent": options.cgroup,
                    "Memory": MEMORY_BYTES, "Init": true,
                },
            }),
            node: options.name.clone(),
        }
    }

    pub(super) async fn start(&self, session: &str, generation: u64) -> Result<Container> {
        let mut body = self.container.clone();
        body["Env"] = json!([
            format!("CONMAN_SESSION_ID={session}"),
            format!("CONMAN_GENERATION={generation}"),
            format!("WITNESS_HOST={}", self.node),
        ]);
        let mut docker = Connection::open(&self.socket).await?;
        let path = "/containers/create";
        let made: Value = docker.json(Method::POST, path, Some(&body)).await?;
        let id = made["Id"].as_str().context("Docker names no container")?;
        let path = format!("/containers/{id}");
        docker.done(Method::POST, &format!("{path}/start")).await?;
        let shown: Value = docker
            .json(Method::GET, &format!("{path}/json"), None)
            .await?;
        let address = shown["NetworkSettings"]["IPAddress"].as_str();
        let address: IpAddr = address
            .and_then(|text| text.parse().ok())
            .context("the container has no address")?;
        Ok(Container {
            id: id.to_owned(),
            address: (address, PORT).into(),
        })
    }

    /// Returns when dockerd has answered.
    pub(super) async fn kill(&self, container: &str) -> Result<()> {
        let path = format!("/containers/{container}/kill");
        let mut docker = Connection::open(&self.socket).await?;
        docker.done(Method::POST, &path).await
    }
}
