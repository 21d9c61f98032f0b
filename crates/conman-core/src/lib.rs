//! Pure decisions: no I/O, no clock, no randomness, no tokio.
#![forbid(unsafe_code)]

mod activity;
mod closing;

pub use activity::{Activity, ActivityGuard};
pub use closing::Closing;
