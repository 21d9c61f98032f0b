//! Calls between nodes, over real connections, and the sessions of a fleet.

mod asking;
mod map;
mod reuse;
mod sessions;
