//! Requests that go by way of another node: an entry proxy for clients, and the owners' proxies
//! for nodes, all in this process.

mod listener;
mod misdirected;
mod nodes;
mod passing;
mod unanswered;
