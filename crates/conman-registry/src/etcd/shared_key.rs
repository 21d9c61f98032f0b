//! A key that every node of the fleet has: made at random by whoever asks for it first.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep};

use super::codec;
use super::notes::unavailable;
use super::store::Store;
use super::wire::{self, TxnRequest};
use crate::RegistryError;

/// Writes until there is one: each comes to nothing only where somebody else's was quicker, or etcd
/// does not take it.
const MAX_WRITES: u32 = 4;
/// A start ends when there is no key: this is longer than an etcd that has just let the node join
/// takes to elect another leader or to be started anew.
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two reads that failed.
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
        // Whether it was written, and whose it is, the next look tells.
        trouble = store.transact(request).await.trouble;
    }
    let trouble = trouble.unwrap_or_else(|| "it is gone again".to_owned());
    Err(unavailable(&format!(
        "the fleet's key cannot be written: {trouble}; see that etcd answers and lets this node \
         write below `registry.prefix`, then start conman again"
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
