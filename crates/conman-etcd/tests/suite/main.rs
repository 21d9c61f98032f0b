//! The registry of a fleet over a real etcd, which each test starts for itself.
#![forbid(unsafe_code)]

mod batches;
mod compaction;
mod conformance;
mod etcd;
mod forgetting;
mod joining;
mod lists;
mod log;
mod members;
mod node;
mod outages;
mod ownership;
mod proxy;
mod refusals;
mod talk_names;
mod tls;
mod users;
