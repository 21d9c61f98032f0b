//! Whether what is kept under the prefix is a registry that this conman understands.

use super::codec::{self, SchemaText};
use super::store::{ReadError, Store};
use super::wire::{self, TxnRequest};

/// The format that is written and the greatest that is read.
const FORMAT: u32 = 1;

/// Why the registry is not used. Each try finds out anew.
#[derive(Debug, thiserror::Error)]
pub(super) enum SchemaError {
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error(
        "the registry under {prefix} has format {found}, and this conman knows up to {FORMAT}; run \
         the newer conman that wrote it"
    )]
    TooNew { prefix: String, found: u32 },
    #[error(
        "{prefix} holds keys of something else ({key}); give conman a prefix of its own in \
         `registry.prefix`"
    )]
    Foreign { prefix: String, key: String },
    #[error("the format cannot be written down: {reason}")]
    NotWritten { reason: String },
}

/// Checks the format, and writes it down where there is nothing yet.
pub(super) async fn check(store: &Store) -> Result<(), SchemaError> {
    let prefix = || String::from_utf8_lossy(&store.keys.all()).into_owned();
    let key = store.keys.schema();
    let (found, _) = store.get(std::slice::from_ref(&key)).await?;
    if let Some(Some((name, bytes, _))) = found.into_iter().next() {
        let schema: SchemaText = codec::parse(&name, &bytes).map_err(|_| SchemaError::Foreign {
            prefix: prefix(),
            key: String::from_utf8_lossy(&name).into_owned(),
        })?;
        if schema.format > FORMAT {
            let found = schema.format;
            return Err(SchemaError::TooNew {
                prefix: prefix(),
                found,
            });
        }
        return Ok(());
    }
    let all = store.keys.all();
    let (others, _, _) = store.page(&all, &all, 1, 0).await?;
    if let Some((other, _, _)) = others.into_iter().next() {
        // Unless somebody has just begun.
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
        // A conflict: another node was first, and the next look tells what it wrote.
        None if is_begun(store).await? => Ok(()),
        trouble => Err(SchemaError::NotWritten {
            reason: trouble.unwrap_or_else(|| "it is gone again".to_owned()),
        }),
    }
}

async fn is_begun(store: &Store) -> Result<bool, ReadError> {
    let (found, _) = store.get(&[store.keys.schema()]).await?;
    Ok(found.into_iter().flatten().next().is_some())
}
