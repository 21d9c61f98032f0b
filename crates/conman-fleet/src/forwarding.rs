//! What follows when a node does not serve a buffered request to the API about a session, by the request's
//! [`Policy`]. Connections: [`Locator::find_again`](crate::Locator::find_again).
//!
//! ```text
//! locate ─▶ send ─▶ answer
//!    ▲        ├ it does not own the session ─▶ forget the location; pause, unless it was a cached one
//!    │        ├ it cannot be reached ─▶ wait until it can be, or the session has moved, if the policy waits
//!    │        └ it does not accept this node ─▶ the reason, unless the location was a cached one
//!    └────────┘
//! ```

use std::time::Duration;

use conman_proto::SessionId;
use http::Method;
use thiserror::Error;
use tokio::time::{Instant, sleep, timeout};

use crate::FleetMap;
use crate::hold::{CutOff, pause};

/// How much longer than the takeover delay a request waits for a session whose node cannot be
/// reached: other nodes may have begun to count later, and the session must be claimed after that.
const AFTER_TAKEOVER: Duration = Duration::from_secs(18);

/// How one kind of request is treated when a node does not serve it. Which requests may be sent a second
/// time after a lost answer follows from the method alone: [`conman_peer::may_be_repeated`].
/// A body of any size is sent once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// How often nodes may refuse it as misdirected, while the session moves.
    pub max_refusals: u32,
    /// Whether it waits for a node that cannot be reached, somewhat longer than the takeover delay.
    pub waits: bool,
    /// Whether a lost answer leads to the question whether it was carried out, which the registry answers.
    pub is_confirmed: bool,
}

impl Policy {
    /// PUT: starts a session, or changes nothing.
    pub const START: Self = Self::new(6, true, false);
    /// DELETE of a session.
    pub const END: Self = Self::new(6, true, true);
    /// Anything else that is buffered: reads, changes, commands.
    pub const OTHER: Self = Self::new(6, false, false);
    const fn new(max_refusals: u32, waits: bool, is_confirmed: bool) -> Self {
        Self {
            max_refusals,
            waits,
            is_confirmed,
        }
    }

    /// The policy of a buffered request to the API. `is_of_session`: it is about the session itself, not
    /// about something in it.
    #[must_use]
    pub fn of(method: &Method, is_of_session: bool) -> Self {
        match *method {
            Method::PUT => Self::START,
            Method::DELETE if is_of_session => Self::END,
            _ => Self::OTHER,
        }
    }
}

/// Why a request is not sent again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum GivenUp {
    #[error("the session changed its node each time that it was looked up")]
    Moves,
    #[error("the node cannot be reached")]
    Unreachable,
    #[error("too many requests wait for nodes that cannot be reached")]
    Crowded,
}

/// The attempts to have one request served.
#[derive(Debug)]
pub struct Forwarding<'map> {
    map: &'map FleetMap,
    id: &'map SessionId,
    policy: Policy,
    began: Instant,
    /// Attempts since the location was read last, and at least one more once it was.
    tries: u32,
    waits: u32,
}

impl<'map> Forwarding<'map> {
    #[must_use]
    pub fn new(map: &'map FleetMap, id: &'map SessionId, policy: Policy) -> Self {
        Self {
            map,
            id,
            policy,
            began: Instant::now(),
            tries: 0,
            waits: 0,
        }
    }

    /// Whether the location must be read from the registry: a cached one was wrong.
    #[must_use]
    pub fn must_read(&self) -> bool {
        self.tries > 0
    }

    /// Counts an attempt; returns whether the location may have been a cached one.
    pub fn attempted(&mut self) -> bool {
        self.tries += 1;
        self.tries == 1
    }

    /// After an [attempt](Self::attempted) that found the session elsewhere: returns when the request may be
    /// sent again.
    ///
    /// # Errors
    /// It was refused too often.
    pub async fn moved(&self) -> Result<(), GivenUp> {
        if self.tries >= self.policy.max_refusals {
            return Err(GivenUp::Moves);
        }
        metrics::counter!("conman_api_peer_refusals_total").increment(1);
        // The first time, the registry was not read yet.
        if self.tries > 1 {
            sleep(pause(self.tries)).await;
        }
        Ok(())
    }

    /// After an attempt that did not reach the node, which the registry names: returns when the node can be
    /// reached, or the session may be on another one.
    ///
    /// # Errors
    /// The request does not wait, or has waited for too long.
    pub async fn unreachable(&mut self, node: &str) -> Result<(), GivenUp> {
        let patience = self.map.fleet().takeover() + AFTER_TAKEOVER;
        let left = patience.saturating_sub(self.began.elapsed());
        if !self.policy.waits || left.is_zero() {
            return Err(GivenUp::Unreachable);
        }
        let _waiting = self.map.wait_for(node).ok_or(GivenUp::Crowded)?;
        // It may be reachable but unusable, for example because it is full.
        self.waits += 1;
        if self.waits > 1 {
            sleep(pause(self.waits)).await;
        }
        // At the end of its patience, the next attempt reports why.
        let reached = timeout(left, self.map.until_reachable(self.id, node)).await;
        if let Ok(Err(CutOff)) = reached {
            return Err(GivenUp::Unreachable);
        }
        // The location has been read.
        self.tries = 2;
        Ok(())
    }
}
