//! Machines under systemd, in an emulator.

mod fleet;
mod worker;
