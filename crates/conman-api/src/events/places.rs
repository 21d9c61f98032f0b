//! Bounds how many streams merge other nodes' events at a time, in all and for one caller.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use conman_auth::Caller;

use crate::problem::{ApiError, IntoApiError as _, Kind};

/// Each stream opens a connection to every other node.
const MOST: usize = 100;

/// No caller can exclude the others. A frontend that shares its streams among its users needs
/// few.
const MOST_A_CALLER: usize = MOST / 4;

/// The places for streams of the fleet's events on this node.
#[derive(Debug, Clone, Default)]
pub struct StreamPlaces(Arc<Mutex<Vec<Caller>>>);

/// One place, given back when it is dropped.
#[derive(Debug)]
pub(super) struct StreamPlace {
    places: StreamPlaces,
    caller: Caller,
}

impl StreamPlaces {
    pub(super) fn take(&self, caller: &Caller) -> Result<StreamPlace, ApiError> {
        const INSTEAD: &str =
            "end one, use another node, or request only this one's events with `local=true`";
        let mut taken = self.taken();
        let own = taken.iter().filter(|&other| other == caller).count();
        if own >= MOST_A_CALLER {
            return Err(Kind::MANY_OWN_STREAMS.because(format!(
                "{own} streams of the fleet's events are open on this node for `{caller}`, the \
                 most that one caller may have; {INSTEAD}"
            )));
        }
        if taken.len() >= MOST {
            return Err(Kind::TOO_MANY_STREAMS.because(format!(
                "{MOST} streams of the fleet's events are open on this node; {INSTEAD}"
            )));
        }
        taken.push(caller.clone());
        Ok(StreamPlace {
            places: self.clone(),
            caller: caller.clone(),
        })
    }

    /// A panic while the lock is held leaves the list valid.
    fn taken(&self) -> MutexGuard<'_, Vec<Caller>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for StreamPlace {
    fn drop(&mut self) {
        let mut taken = self.places.taken();
        if let Some(own) = taken.iter().position(|caller| *caller == self.caller) {
            taken.swap_remove(own);
        }
    }
}

#[cfg(test)]
mod tests {
    use conman_auth::{CallerOrigin, Scope};

    use super::*;

    fn token(name: &str) -> Caller {
        Caller {
            name: name.to_owned(),
            scope: Scope::Read,
            origin: CallerOrigin::Token,
        }
    }

    #[test]
    fn no_caller_takes_all_places_and_all_callers_together_take_no_more_than_there_are() {
        let places = StreamPlaces::default();
        let slug = |caller: &str| {
            let refused = places.take(&token(caller)).expect_err("no place");
            refused.problem().slug().to_owned()
        };
        let mut held = Vec::new();
        for caller in ["a", "b", "c", "d"] {
            for _ in 0..MOST_A_CALLER {
                held.push(places.take(&token(caller)).expect("a place"));
            }
            assert_eq!(slug(caller), "too-many-own-streams");
        }
        assert_eq!(slug("e"), "too-many-streams");
        let a = held.swap_remove(0);
        drop(a);
        let e = places.take(&token("e")).expect("it was given back");
        assert_eq!(slug("a"), "too-many-streams");
        drop(e);
        places.take(&token("a")).expect("it was given back");
    }
}
