//! The registry and the journal as their users see them, on real files.

mod conformance;
mod damage;
mod disk_full;
mod fleet_model;
mod formats;
mod generations;
mod journal;
mod sigkill;
mod support;
mod two_daemons;
