//! Tests of the registry in a file.

mod equivalence;
mod failing_disk;
