//! The calls of etcd that conman makes.

/// Path of a call, the size limit of its answer, and the connections that it uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Method {
    pub(super) path: &'static str,
    pub(super) max_answer_bytes: usize,
    pub(super) lines: Lines,
    /// Whether an answer counts that comes after the timeout.
    pub(super) counts_late: bool,
}

/// Large reads use separate connections, so that renewals never queue behind them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lines {
    Common,
    Bulk,
}

impl Method {
    const fn new(path: &'static str) -> Self {
        Self {
            path,
            max_answer_bytes: MAX_ANSWER_BYTES,
            lines: Lines::Common,
            counts_late: false,
        }
    }

    /// The same for many records; a single record may have any size.
    pub(super) const fn bulk(self, records: i64) -> Self {
        Self {
            path: self.path,
            max_answer_bytes: match records {
                ..=1 => MAX_ANSWER_BYTES,
                _ => MAX_BULK_BYTES,
            },
            lines: Lines::Bulk,
            counts_late: false,
        }
    }
}

pub(super) const RANGE: Method = Method::new("/etcdserverpb.KV/Range");
pub(super) const TXN: Method = Method::new("/etcdserverpb.KV/Txn");
pub(super) const RENEWAL: Method = Method {
    counts_late: true,
    ..TXN
};
pub(super) const COMPACT: Method = Method::new("/etcdserverpb.KV/Compact");
pub(super) const WATCH: &str = "/etcdserverpb.Watch/Watch";
pub(super) const AUTHENTICATE: Method = Method::new("/etcdserverpb.Auth/Authenticate");

/// Maximum size of an answer: a page of small values, or a record, which etcd limits to 1.5 MiB, is
/// far below.
pub(super) const MAX_ANSWER_BYTES: usize = 64 * 1_024 * 1_024;

/// Maximum size of an answer with many records, which bounds the work on the fleet's thread.
pub(in super::super) const MAX_BULK_BYTES: usize = 8 * 1_024 * 1_024;
