use crate::{Exec, Lifecycle, Terminals};

/// A program that makes containers. Cheap to share; implementations bound the time of every call.
pub trait Runtime: Lifecycle + Exec + Terminals {}

impl<T: Lifecycle + Exec + Terminals> Runtime for T {}
