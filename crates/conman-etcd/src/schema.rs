//! Checks that the keys under the prefix are a registry of a known format.

use conman_linux::FORMAT;
use conman_registry::serve_above;

use super::codec::{self, SchemaText};
use super::store::{Entry, ReadError, Store};
use super::wire::{self, TxnRequest};

/// Keys of one read of a registry of another format.
const PAGE: usize = 512;

/// Why the registry is not used. Each attempt checks again.
#[derive(Debug, thiserror::Error)]
pub(super) enum SchemaError {
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error("the registry under {prefix} has format {found}, and this conman uses format {FORMAT}; {}",
        remedy(prefix, *found, *floor))]
    OtherFormat {
        prefix: String,
        found: u32,
        /// The greatest generation in it.
        floor: u64,
    },
    #[error(
        "{prefix} holds keys of something else ({key}); give conman a separate prefix in \
         `registry.prefix`"
    )]
    Foreign { prefix: String, key: String },
    #[error("cannot write the registry's format: {reason}")]
    NotWritten { reason: String },
}

fn remedy(prefix: &str, found: u32, floor: u64) -> String {
    if found > FORMAT {
        return "run the newer conman that wrote it".to_owned();
    }
    format!(
        "nothing was changed. To start afresh: end the fleet's sessions and stop conman on every node \
         with the conman that wrote it, delete the keys (`etcdctl del --prefix {prefix}`) or choose \
         another `registry.prefix`, and start each node once with {}",
        serve_above(Some(floor))
    )
}

/// The greatest number called `generation` in a registry of any format.
async fn greatest_generation(store: &Store) -> Result<u64, ReadError> {
    let generation = |(_, bytes, _): &Entry| {
        let value: serde_json::Value = serde_json::from_slice(bytes).ok()?;
        let within = value["record"]["generation"].as_u64();
        value["generation"].as_u64().max(within)
    };
    let parent = store.keys.all();
    let (mut walk, mut greatest) = (store.walk(parent.clone(), &parent), 0);
    while !walk.is_done() {
        let entries = store.records_below(&mut walk, PAGE).await?;
        let generations = entries.iter().filter_map(generation);
        greatest = generations.fold(greatest, u64::max);
    }
    Ok(greatest)
}

/// Checks the format, and writes it where nothing is stored yet.
pub(super) async fn check(store: &Store) -> Result<(), SchemaError> {
    let prefix = || String::from_utf8_lossy(&store.keys.all()).into_owned();
    let key = store.keys.schema();
    let (found, _) = store.get(std::slice::from_ref(&key)).await?;
    if let Some(Some((name, bytes, _))) = found.into_iter().next() {
        let schema: SchemaText = codec::parse(&name, &bytes).map_err(|_| SchemaError::Foreign {
            prefix: prefix(),
            key: String::from_utf8_lossy(&name).into_owned(),
        })?;
        return match schema.format {
            FORMAT => Ok(()),
            found => Err(SchemaError::OtherFormat {
                prefix: prefix(),
                found,
                floor: greatest_generation(store).await?,
            }),
        };
    }
    let all = store.keys.all();
    if let Some(other) = store.first_below(&all).await? {
        // Unless another node has just created the registry.
        if other != key && !is_begun(store).await? {
            return Err(SchemaError::Foreign {
                prefix: prefix(),
                key: String::from_utf8_lossy(&other).into_owned(),
            });
        }
        return Ok(());
    }
    let text = codec::text(&SchemaText { format: FORMAT });
    let request = TxnRequest {
        compare: vec![wire::is(key.clone(), None)],
        success: vec![wire::put(key, text)],
    };
    let written = store.transact(request).await;
    match written.trouble {
        // A conflict: another node was first; the next check reads what it wrote.
        None if is_begun(store).await? => Ok(()),
        trouble => Err(SchemaError::NotWritten {
            reason: trouble.unwrap_or_else(|| "it was deleted again".to_owned()),
        }),
    }
}

async fn is_begun(store: &Store) -> Result<bool, ReadError> {
    let (found, _) = store.get(&[store.keys.schema()]).await?;
    Ok(found.into_iter().flatten().next().is_some())
}
