//! A client of etcd's version 3 API, with the messages that measuring it takes. Nothing of conman's own client: that
//! batches and repeats.

use anyhow::{Context as _, Result, ensure};
use http::uri::PathAndQuery;
use prost::Message;
use tonic::client::Grpc;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status, Streaming};
use tonic_prost::ProstCodec;

/// Prefixes of the sessions' records, and of the nodes' states.
pub(super) const RECORDS: &str = "/session/";
pub(super) const STATES: &str = "/node/";

const MAX_ANSWER_BYTES: usize = 64 << 20;

#[derive(Clone, PartialEq, Message)]
pub(super) struct Header {
    #[prost(int64, tag = "3")]
    revision: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct KeyValue {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    #[prost(int64, tag = "3")]
    mod_revision: i64,
    #[prost(bytes = "vec", tag = "5")]
    value: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct RangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    range_end: Vec<u8>,
    #[prost(int64, tag = "3")]
    limit: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct RangeResponse {
    #[prost(message, repeated, tag = "2")]
    pub(super) kvs: Vec<KeyValue>,
    #[prost(int64, tag = "4")]
    pub(super) count: i64,
}

#[derive(Clone, PartialEq, Message)]
struct PutRequest {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct PutResponse {
    #[prost(message, optional, tag = "1")]
    header: Option<Header>,
}

#[derive(Clone, PartialEq, Message)]
struct RequestOp {
    #[prost(message, optional, tag = "2")]
    put: Option<PutRequest>,
}

/// That the version of a key is at least this one.
#[derive(Clone, PartialEq, Message)]
struct Compare {
    #[prost(int32, tag = "1")]
    result: i32,
    #[prost(int32, tag = "2")]
    target: i32,
    #[prost(bytes = "vec", tag = "3")]
    key: Vec<u8>,
    #[prost(int64, tag = "4")]
    version: i64,
}

/// `Compare.CompareResult.GREATER`
const GREATER: i32 = 1;

#[derive(Clone, PartialEq, Message)]
struct TxnRequest {
    #[prost(message, repeated, tag = "1")]
    compare: Vec<Compare>,
    #[prost(message, repeated, tag = "2")]
    success: Vec<RequestOp>,
}

#[derive(Clone, PartialEq, Message)]
struct TxnResponse {
    #[prost(bool, tag = "2")]
    succeeded: bool,
}

#[derive(Clone, PartialEq, Message)]
struct CompactionRequest {
    #[prost(int64, tag = "1")]
    revision: i64,
    /// Answer once the space is freed.
    #[prost(bool, tag = "2")]
    physical: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Nothing {}

#[derive(Clone, PartialEq, Message)]
struct WatchRequest {
    #[prost(message, optional, tag = "1")]
    create: Option<RangeRequest>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct WatchResponse {
    #[prost(message, repeated, tag = "11")]
    pub(super) events: Vec<Nothing>,
}

#[derive(Clone)]
pub(super) struct Client {
    channel: Channel,
}

impl Client {
    pub(super) fn new(url: &str) -> Result<Self> {
        let endpoint = Endpoint::from_shared(url.to_owned()).context("an address of etcd")?;
        Ok(Self {
            channel: endpoint.connect_lazy(),
        })
    }

    async fn call<Q, R>(&self, path: &'static str, request: Q) -> Result<R>
    where
        Q: Message + 'static,
        R: Message + Default + 'static,
    {
        let mut grpc = Grpc::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER_BYTES);
        grpc.ready().await.context("connecting to etcd")?;
        let path = PathAndQuery::from_static(path);
        let answer = grpc.unary(Request::new(request), path, ProstCodec::<Q, R>::new());
        Ok(answer.await.context("asking etcd")?.into_inner())
    }

    /// At most `limit` records from `key` up to `range_end`.
    pub(super) async fn range(
        &self,
        key: Vec<u8>,
        range_end: Vec<u8>,
        limit: i64,
    ) -> Result<RangeResponse> {
        let request = RangeRequest {
            key,
            range_end,
            limit,
        };
        self.call("/etcdserverpb.KV/Range", request).await
    }

    /// Returns the revision.
    pub(super) async fn put(&self, key: Vec<u8>, value: Vec<u8>) -> Result<i64> {
        let request = PutRequest { key, value };
        let done: PutResponse = self.call("/etcdserverpb.KV/Put", request).await?;
        Ok(done.header.map_or(0, |header| header.revision))
    }

    pub(super) async fn put_all(&self, puts: Vec<(Vec<u8>, Vec<u8>)>) -> Result<()> {
        if puts.is_empty() {
            return Ok(());
        }
        self.transact(Vec::new(), puts).await
    }

    /// Puts on a condition that holds, as a renewal does.
    pub(super) async fn compare_and_put(&self, key: Vec<u8>, value: Vec<u8>) -> Result<()> {
        let compare = Compare {
            result: GREATER,
            target: 0,
            key: key.clone(),
            version: -1,
        };
        self.transact(vec![compare], vec![(key, value)]).await
    }

    async fn transact(&self, compare: Vec<Compare>, puts: Vec<(Vec<u8>, Vec<u8>)>) -> Result<()> {
        let put = |(key, value)| RequestOp {
            put: Some(PutRequest { key, value }),
        };
        let success = puts.into_iter().map(put).collect();
        let request = TxnRequest { compare, success };
        let done: TxnResponse = self.call("/etcdserverpb.KV/Txn", request).await?;
        ensure!(done.succeeded, "the condition does not hold");
        Ok(())
    }

    pub(super) async fn compact(&self, revision: i64) -> Result<()> {
        let request = CompactionRequest {
            revision,
            physical: true,
        };
        let done: Result<Nothing> = self.call("/etcdserverpb.KV/Compact", request).await;
        done.map(drop)
    }

    /// Changes below a prefix that ends with `/`.
    pub(super) async fn watch(&self, key: Vec<u8>) -> Result<Streaming<WatchResponse>> {
        let mut range_end = key.clone();
        range_end.pop();
        range_end.push(b'0');
        let create = WatchRequest {
            create: Some(RangeRequest {
                key,
                range_end,
                limit: 0,
            }),
        };
        // The request stream stays open: closing it would end the watch.
        let requests = futures_util::StreamExt::chain(
            futures_util::stream::iter([create]),
            futures_util::stream::pending(),
        );
        let mut grpc = Grpc::new(self.channel.clone());
        grpc.ready().await.context("connecting to etcd")?;
        let path = PathAndQuery::from_static("/etcdserverpb.Watch/Watch");
        let codec = ProstCodec::<WatchRequest, WatchResponse>::new();
        let opened: Result<_, Status> = grpc.streaming(Request::new(requests), path, codec).await;
        let mut changes = opened.context("watching etcd")?.into_inner();
        // The first answer says that the watch is there.
        changes.message().await.context("watching etcd")?;
        Ok(changes)
    }
}
