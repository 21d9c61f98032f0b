//! A session's fencing token.

use std::fmt;
use std::num::NonZeroU64;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A session's fencing token: strictly greater at every start of the session anywhere.
///
/// At most 2^53 - 1, so that JSON readers that hold numbers as doubles keep it exact.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(transparent)]
#[schema(value_type = u64, minimum = 1, maximum = 9_007_199_254_740_991_u64, example = 7)]
pub struct Generation(NonZeroU64);

impl Generation {
    /// The first generation of a registry that was never used.
    pub const FIRST: Self = Self(NonZeroU64::MIN);

    /// `None` for zero, which stands for "no generation yet" in stored counters.
    #[must_use]
    pub const fn new(value: u64) -> Option<Self> {
        match NonZeroU64::new(value) {
            Some(value) => Some(Self(value)),
            None => None,
        }
    }

    /// The number itself.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0.get()
    }

    /// The next greater generation; `None` once the numbers are used up.
    #[must_use]
    pub const fn next(self) -> Option<Self> {
        match self.0.checked_add(1) {
            Some(value) => Some(Self(value)),
            None => None,
        }
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}
