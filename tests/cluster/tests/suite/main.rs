//! Whole fleets: what clusters are made of, witnesses, faults row by row.

mod cluster;
mod fabric;
mod fabric_moves;
mod overlap;
mod people;
mod programs;
mod rows;
mod witness;
