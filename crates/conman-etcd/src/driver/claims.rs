//! Claims under way: their callers and their results.

use std::collections::HashMap;

use conman_core::ownership::{NodeName, NodeProtocol, Ownership, SessionName, Slot, Stake};
use conman_proto::{Generation, ResolvedSpec, SessionId};
use jiff::Timestamp;

use super::super::codec::SessionDetails;
use super::super::notes;
use super::super::records::OwnRecord;
use super::super::shared::{Shared, name};
use super::Reply;
use conman_registry::{RecordState, RegistryError, SessionRecord};

/// How often a claim is tried that conflicts with another write.
const MAX_TRIES: u32 = 3;

#[derive(Debug)]
struct Claim {
    id: SessionId,
    spec: ResolvedSpec,
    /// The revision of the record that the claim is based on.
    read: Option<i64>,
    reply: Reply<SessionRecord>,
    created_at: Timestamp,
    /// Number of the transaction sent last.
    op: Option<u64>,
    details: Option<SessionDetails>,
    revision: Option<i64>,
    forwarded: Option<NodeName>,
    /// Why etcd refuses it.
    refused: Option<String>,
    tries: u32,
    /// Callers of the same claim that came later.
    others: Vec<Reply<SessionRecord>>,
}

#[derive(Debug, Default)]
pub(super) struct Claims {
    under_way: HashMap<SessionName, Claim>,
}

impl Claims {
    /// Registers a claim, unless its answer is already clear. Returns what to request from the
    /// protocol.
    pub(super) fn ask(
        &mut self,
        id: SessionId,
        (spec, read): (ResolvedSpec, Option<i64>),
        reply: Reply<SessionRecord>,
        stake: Option<Stake>,
        shared: &Shared,
    ) -> Option<SessionName> {
        let session = name(&id);
        if let Some(claim) = self.under_way.get_mut(&session) {
            claim.others.push(reply);
            return None;
        }
        if let Some(stake) = stake {
            let _ = reply.send(Err(refusal(&id, stake, shared)));
            return None;
        }
        let claim = Claim {
            id,
            spec,
            read,
            reply,
            created_at: Timestamp::now(),
            op: None,
            details: None,
            revision: None,
            forwarded: None,
            refused: None,
            tries: 1,
            others: Vec::new(),
        };
        self.under_way.insert(session.clone(), claim);
        Some(session)
    }

    /// The revision since which the session's record must be unchanged.
    pub(super) fn read(&self, session: &SessionName) -> Option<i64> {
        self.under_way.get(session)?.read
    }

    /// The record that is written with a claim's transaction.
    pub(super) fn details(
        &mut self,
        op: u64,
        session: &SessionName,
        ownership: &Ownership,
        shared: &Shared,
    ) -> Option<SessionDetails> {
        let claim = self.under_way.get_mut(session)?;
        let record = SessionRecord {
            id: claim.id.clone(),
            generation: Generation::new(ownership.generation)?,
            state: RecordState::Starting,
            spec: claim.spec.clone(),
            container: None,
            created_at: claim.created_at,
        };
        let details = shared.details(ownership.incarnation, record);
        claim.op = Some(op);
        claim.revision = None;
        claim.details = Some(details.clone());
        Some(details)
    }

    /// The record of a claim that is under way.
    pub(super) fn of(&self, slot: &Slot) -> Option<SessionDetails> {
        let details = self.under_way.get(&slot.session)?.details.clone()?;
        (details.record.generation.get() == slot.generation).then_some(details)
    }

    pub(super) fn refused(&mut self, op: u64, reason: &str) {
        let mut claims = self.under_way.values_mut();
        if let Some(claim) = claims.find(|claim| claim.op == Some(op)) {
            claim.refused = Some(reason.to_owned());
        }
    }

    pub(super) fn answered(&mut self, op: u64, revision: i64) {
        let mut claims = self.under_way.values_mut();
        if revision != 0
            && let Some(claim) = claims.find(|claim| claim.op == Some(op))
        {
            claim.revision = Some(revision);
        }
    }

    /// The session is now this node's. Returns its record when the caller is gone.
    pub(super) fn started(&mut self, slot: &Slot, shared: &Shared) -> Option<SessionDetails> {
        let claim = self.under_way.remove(&slot.session)?;
        let details = claim.details?;
        let record = details.record.clone();
        for other in claim.others {
            let _ = other.send(Err(RegistryError::Owned {
                id: record.id.clone(),
                generation: record.generation,
            }));
        }
        shared.note_mine(OwnRecord {
            details: details.clone(),
            mod_revision: claim.revision,
        });
        shared.note_location(&record.id, None);
        match claim.reply.send(Ok(record)) {
            Ok(()) => None,
            Err(_) => Some(details),
        }
    }

    pub(super) fn forwarded(&mut self, session: &SessionName, owner: NodeName) {
        if let Some(claim) = self.under_way.get_mut(session) {
            claim.forwarded = Some(owner);
        }
    }

    /// Answers the claims that the protocol has finished, or returns those to try again.
    pub(super) fn settle(&mut self, protocol: &NodeProtocol, shared: &Shared) -> Vec<SessionName> {
        let mut again = Vec::new();
        let over: Vec<SessionName> = self
            .under_way
            .iter_mut()
            .filter_map(|(session, claim)| match protocol.stake(session) {
                Some(Stake::Claiming) => None,
                Some(_) => Some(session.clone()),
                None => {
                    let may = protocol.may_act(super::boot_time()) && !claim.reply.is_closed();
                    let clear = claim.forwarded.is_some() || claim.refused.is_some();
                    if !clear && claim.tries < MAX_TRIES && may {
                        claim.tries += 1;
                        again.push(session.clone());
                        return None;
                    }
                    Some(session.clone())
                }
            })
            .collect();
        for session in over {
            let Some(mut claim) = self.under_way.remove(&session) else {
                continue;
            };
            let error = match (&claim.forwarded, protocol.stake(&session)) {
                (Some(owner), _) => RegistryError::Elsewhere {
                    id: claim.id.clone(),
                    node: owner.to_string(),
                },
                (None, Some(stake)) => refusal(&claim.id, stake, shared),
                (None, None) => match claim.refused.take() {
                    Some(reason) => notes::unavailable(&reason),
                    None => shared.unavailable(),
                },
            };
            claim.answer(&error);
        }
        again
    }

    pub(super) fn give_up(&mut self, shared: &Shared) {
        for (_, claim) in self.under_way.drain() {
            claim.answer(&shared.unavailable());
        }
    }
}

impl Claim {
    fn answer(self, error: &RegistryError) {
        for reply in self.others.into_iter().chain([self.reply]) {
            let _ = reply.send(Err(error.clone()));
        }
    }
}

fn refusal(id: &SessionId, stake: Stake, shared: &Shared) -> RegistryError {
    let generation = match stake {
        Stake::Held { generation } | Stake::Ending { generation, .. } => {
            Generation::new(generation)
        }
        Stake::Claiming | Stake::Checking => None,
    };
    match generation {
        Some(generation) => RegistryError::Owned {
            id: id.clone(),
            generation,
        },
        None => shared.unavailable(),
    }
}
