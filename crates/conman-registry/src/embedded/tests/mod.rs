mod equivalence;
mod failing_disk;
