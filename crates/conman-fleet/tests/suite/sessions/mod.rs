//! Clients of one node, and sessions of another: two nodes on real processes, with their proxies
//! and listeners, and a fleet in memory.

mod directory;
mod finding;
mod forgetting;
mod member;
mod restarting;
mod reviving;
mod waiting;
