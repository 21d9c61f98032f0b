//! `conman version`: of the client and of the daemon.

use conman_proto::Node;
use serde_json::json;

use super::Context;
use crate::failure::{Exit, Failure};
use crate::human::printable;

/// Version of this client.
const CLIENT: &str = env!("CARGO_PKG_VERSION");

pub(super) async fn run(context: &Context) -> Result<Exit, Failure> {
    let node = context.client.get::<Node>("/v1/nodes/self").await;
    let output = &context.output;
    let server = node.as_ref().ok();
    if output.json {
        let server = server.map(|node| json!({ "version": node.version, "node": node.name }));
        output.value(&json!({ "client": { "version": CLIENT }, "server": server }))?;
    } else {
        output.line(&format!("client  {CLIENT}"))?;
        if let Some(node) = server {
            let (version, name) = (printable(&node.version), printable(&node.name));
            output.line(&format!("server  {version} on {name}"))?;
        }
    }
    match node {
        Ok(_) => Ok(Exit::Done),
        Err(error) => Err(error.into()),
    }
}
