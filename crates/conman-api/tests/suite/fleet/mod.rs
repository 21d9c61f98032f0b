//! Several nodes that share one registry: whatever is asked of one is answered by the session's
//! own.

mod events;
mod held;
mod members;
mod moving;
mod owners;
mod refused;
mod shown;
mod world;
