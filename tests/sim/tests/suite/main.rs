//! The simulation on pinned seeds, over the core as it is and over sabotaged ones.

mod fleet;
mod sabotage;
