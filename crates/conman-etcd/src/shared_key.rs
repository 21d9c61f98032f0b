//! A key that all nodes of the fleet share: random, created by the first node that needs it.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep};

use super::codec;
use super::notes::unavailable;
use super::store::Store;
use super::wire::{self, TxnRequest};
use conman_registry::RegistryError;

/// Number of write attempts: an attempt fails only when another node wrote first, or etcd refuses
/// it.
const MAX_WRITES: u32 = 4;
/// The start fails without a key. This is longer than etcd needs to elect a leader or to be
/// restarted, just after the node has joined.
const PATIENCE: Duration = Duration::from_secs(60);
/// Pause between two failed reads.
const RETRY_PAUSE: Duration = Duration::from_millis(250);

#[derive(Serialize, Deserialize)]
struct KeyText {
    /// 32 bytes in hexadecimal.
    key: String,
}

pub(super) async fn of(store: &Store) -> Result<[u8; 32], RegistryError> {
    let key = store.keys.shared_key();
    let deadline = Instant::now() + PATIENCE;
    let (mut trouble, mut writes) = (None, 0);
    while writes < MAX_WRITES {
        let found = match store.get(std::slice::from_ref(&key)).await {
            Ok((found, _)) => found,
            Err(_) if Instant::now() < deadline => {
                sleep(RETRY_PAUSE).await;
                continue;
            }
            Err(error) => return Err(unavailable(&error.to_string())),
        };
        if let Some((name, bytes, _)) = found.into_iter().flatten().next() {
            let text = codec::parse::<KeyText>(&name, &bytes).ok();
            return text.and_then(|text| parse(&text.key)).ok_or_else(|| {
                unavailable(&format!(
                    "{} holds no key; delete it, and restart all nodes",
                    String::from_utf8_lossy(&name)
                ))
            });
        }
        let mut random = [0; 32];
        getrandom::fill(&mut random).map_err(|error| unavailable(&error.to_string()))?;
        let text = KeyText {
            key: random.map(|byte| format!("{byte:02x}")).concat(),
        };
        let request = TxnRequest {
            compare: vec![wire::is(key.clone(), None)],
            success: vec![wire::put(key.clone(), codec::text(&text))],
        };
        writes += 1;
        // The next read shows whether it was written, and by which node.
        trouble = store.transact(request).await.trouble;
    }
    let trouble = trouble.unwrap_or_else(|| "it was deleted again".to_owned());
    Err(unavailable(&format!(
        "cannot write the fleet's key: {trouble}; make sure that etcd answers and that this node \
         may write below `registry.prefix`, then start conman again"
    )))
}

fn parse(text: &str) -> Option<[u8; 32]> {
    let mut key = [0; 32];
    if text.len() != 2 * key.len() || !text.is_ascii() {
        return None;
    }
    for (index, byte) in key.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * index..2 * index + 2)?, 16).ok()?;
    }
    Some(key)
}
