//! Who has which session, in etcd, through its gateway from JSON.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use http::Method;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::http_client::request_json;

const PREFIX: &str = "/old/";
/// The first key behind all with the prefix.
const END: &str = "/old0";

/// How long a release is repeated.
const RELEASE_PATIENCE: Duration = Duration::from_secs(60);
const RETRY: Duration = Duration::from_millis(500);

/// The claims of all nodes.
#[derive(Debug)]
pub(crate) struct Claims {
    etcd: String,
}

impl Claims {
    pub(crate) fn new(etcd: SocketAddr) -> Self {
        Self {
            etcd: etcd.to_string(),
        }
    }

    /// The node that has a session.
    pub(super) async fn owner(&self, id: &str) -> Result<Option<String>> {
        let found = self.post("range", json!({ "key": key(id) })).await?;
        Ok(value(&found["kvs"][0]))
    }

    /// Claims a session for `node` unless another one has it. Returns which has it now.
    pub(super) async fn claim(&self, id: &str, node: &str) -> Result<String> {
        let key = key(id);
        let unclaimed =
            json!({ "key": key, "target": "CREATE", "create_revision": "0", "result": "EQUAL" });
        let transaction = json!({
            "compare": [unclaimed],
            "success": [{ "request_put": { "key": key, "value": BASE64_STANDARD.encode(node) } }],
            "failure": [{ "request_range": { "key": key } }],
        });
        let done = self.post("txn", transaction).await?;
        if done["succeeded"] == true {
            return Ok(node.to_owned());
        }
        let other = value(&done["responses"][0]["response_range"]["kvs"][0]);
        other.context("the claim of another node was given up meanwhile")
    }

    /// A number that grows with each claim of a session.
    pub(super) async fn generation(&self, id: &str) -> Result<u64> {
        let found = self.post("range", json!({ "key": key(id) })).await?;
        let revision = found["kvs"][0]["create_revision"].as_str();
        let revision = revision.and_then(|text| text.parse().ok());
        revision.with_context(|| format!("{id} is not claimed"))
    }

    pub(super) async fn release(&self, id: &str) -> Result<()> {
        self.delete(json!({ "key": key(id) })).await
    }

    /// Gives up all sessions of a node that is gone.
    pub(crate) async fn release_all(&self, node: &str) -> Result<()> {
        let all = json!({
            "key": BASE64_STANDARD.encode(PREFIX), "range_end": BASE64_STANDARD.encode(END),
        });
        let found = self.post("range", all).await?;
        for claim in found["kvs"].as_array().into_iter().flatten() {
            if value(claim).as_deref() == Some(node) {
                self.delete(json!({ "key": claim["key"] })).await?;
            }
        }
        Ok(())
    }

    /// Repeats the request while etcd refuses it, which does not end the storm: etcd shares the machine with it.
    async fn delete(&self, key: Value) -> Result<()> {
        let deadline = Instant::now() + RELEASE_PATIENCE;
        loop {
            match self.post("deleterange", key.clone()).await {
                Err(_) if Instant::now() < deadline => sleep(RETRY).await,
                deleted => return deleted.map(drop),
            }
        }
    }

    async fn post(&self, what: &str, body: Value) -> Result<Value> {
        let path = format!("/v3/kv/{what}");
        request_json(&self.etcd, Method::POST, &path, Some(&body)).await
    }
}

fn key(id: &str) -> String {
    BASE64_STANDARD.encode(format!("{PREFIX}{id}"))
}

fn value(record: &Value) -> Option<String> {
    let bytes = BASE64_STANDARD.decode(record["value"].as_str()?).ok()?;
    String::from_utf8(bytes).ok()
}
