//! Injected failures of the disk, for the tests of what uses the database.

pub(crate) mod faults;
