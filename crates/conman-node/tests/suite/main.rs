//! A node on real processes, its registry and runtime failing on demand.

mod adoption;
mod drain;
mod gce;
mod notices;
mod preemption;
mod routes;
mod sessions;
mod stage;
mod trouble;
