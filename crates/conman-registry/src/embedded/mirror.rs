//! The committed records in memory, for readers.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use conman_proto::SessionId;

use super::schema::Records;
use crate::SessionRecord;

/// The content of the file at the last acknowledged commit.
///
/// The writer changes it after a commit is durable and before the commit is acknowledged. Readers
/// never wait for the disk and never see data that may still be lost. The lock is held to look up
/// or exchange pointers, never across I/O.
#[derive(Debug)]
pub(super) struct Mirror {
    records: RwLock<Records>,
}

impl Mirror {
    pub(super) fn new(records: Records) -> Self {
        Self {
            records: RwLock::new(records),
        }
    }

    pub(super) fn get(&self, id: &SessionId) -> Option<Arc<SessionRecord>> {
        self.records
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(id)
            .cloned()
    }

    pub(super) fn snapshot(&self) -> Records {
        self.records
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    pub(super) fn apply(&self, changes: BTreeMap<SessionId, Option<Arc<SessionRecord>>>) {
        let mut records = self.records.write().unwrap_or_else(PoisonError::into_inner);
        for (id, record) in changes {
            match record {
                Some(record) => records.insert(id, record),
                None => records.remove(&id),
            };
        }
    }
}
