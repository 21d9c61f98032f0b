//! `trait Runtime`: all that a program that makes containers can do.

use crate::{Exec, KeptStreams, Lifecycle};

/// A program that makes containers. Cheap to share; implementations bound the time of every call.
pub trait Runtime: Lifecycle + Exec + KeptStreams {}

impl<T: Lifecycle + Exec + KeptStreams> Runtime for T {}
