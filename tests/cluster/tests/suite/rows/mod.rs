//! Faults that a fleet must survive, each by its number: witnesses tell whether two of a session ever
//! ran, and what was interrupted.
//!
//! Bad input is among them. A number that is missing here is tried where no fleet is needed.

mod access;
mod alone;
mod bulk;
mod client;
mod commands;
mod events;
mod figures;
mod fleet;
mod grey;
mod holds;
mod hop;
mod late;
mod leaving;
mod load;
mod lookups;
mod machine;
mod moves;
mod network;
mod node;
mod restart;
mod secret;
mod shown;
mod single_flight;
mod store;
mod story;
mod terminals;
mod trouble;
mod two_daemons;
mod typed;
mod versions;
