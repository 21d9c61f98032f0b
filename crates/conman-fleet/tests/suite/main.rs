//! Calls between nodes, over real connections.

mod asking;
mod map;
mod reuse;
