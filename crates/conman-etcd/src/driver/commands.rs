//! Commands from the registry's callers to the driver.

use std::sync::Arc;

use conman_core::ownership::{Event, Slot, Stake};
use conman_proto::{Generation, ResolvedSpec, SessionId};
use tokio::sync::oneshot;

use super::super::shared::{Shared, boot_time, name};
use super::{Done, Serving, releases};
use conman_registry::{RegistryError, Release, SessionRecord};

pub(in super::super) type Reply<T> = oneshot::Sender<Result<T, RegistryError>>;

/// A command from the registry's callers.
#[derive(Debug)]
pub(in super::super) enum Command {
    Claim {
        id: SessionId,
        spec: Box<ResolvedSpec>,
        /// The revision of the record that the claim is based on.
        read: Option<i64>,
        reply: Reply<SessionRecord>,
    },
    /// Whether a start may be sent; if so, it will be.
    MayStart {
        id: SessionId,
        generation: Generation,
        reply: Reply<()>,
    },
    Release {
        releases: Vec<(Release, Reply<()>)>,
    },
    /// Ends a session that this node owns without a record.
    EndUndescribed {
        slot: Slot,
        reply: Reply<()>,
    },
}

pub(super) fn refuse(command: Command, shared: &Shared) {
    match command {
        Command::Claim { reply, .. } => {
            let _ = reply.send(Err(shared.unavailable()));
        }
        Command::MayStart { reply, .. } | Command::EndUndescribed { reply, .. } => {
            let _ = reply.send(Err(shared.unavailable()));
        }
        Command::Release { releases } => {
            for (_, reply) in releases {
                let _ = reply.send(Err(shared.unavailable()));
            }
        }
    }
}

impl Serving<'_> {
    pub(super) fn command(&mut self, command: Command) {
        match command {
            Command::Claim {
                id,
                spec,
                read,
                reply,
            } => {
                let stake = self.protocol.stake(&name(&id));
                let asked = (*spec, read);
                let begun = self.claims.ask(id, asked, reply, stake, &self.shared);
                self.inbox.extend(begun.map(Event::EnsureAsked));
            }
            Command::MayStart {
                id,
                generation,
                reply,
            } => {
                let _ = reply.send(self.may_start(id, generation));
            }
            Command::Release { releases } => {
                for (release, reply) in releases {
                    self.release(release, reply);
                }
            }
            Command::EndUndescribed { slot, reply } => {
                self.end_undescribed(slot);
                let _ = reply.send(Ok(()));
            }
        }
    }

    /// If it is still held, no other node may claim it before it is proven dead. In any other state
    /// the protocol ends it automatically.
    fn end_undescribed(&mut self, slot: Slot) {
        let generation = slot.generation;
        if self.protocol.stake(&slot.session) == Some(Stake::Held { generation }) {
            self.inbox.push_back(Event::StopAsked(slot.session));
        }
    }

    fn may_start(&mut self, id: SessionId, generation: Generation) -> Result<(), RegistryError> {
        let slot = Slot {
            session: name(&id),
            generation: generation.get(),
        };
        // A preemption that is over learned of this claim before its caller did: what it gave up must
        // not run, because its certificate counts.
        if self.releases.is_certified(&slot) {
            self.inbox.push_back(Event::DeathCertificate(slot));
            return Err(RegistryError::Superseded {
                id,
                generation,
                current: None,
            });
        }
        if self.protocol.may_start(boot_time(), &slot) {
            // Before any other event of it.
            self.inbox.push_back(Event::StartSent(slot));
            return Ok(());
        }
        let held = match self.protocol.stake(&slot.session) {
            Some(Stake::Held { generation }) => generation == slot.generation,
            _ => false,
        };
        match held && !self.protocol.may_act(boot_time()) {
            true => Err(self.shared.unavailable()),
            false => Err(RegistryError::Superseded {
                id,
                generation,
                current: None,
            }),
        }
    }

    /// Its record must be known before the protocol receives the certificate, because the protocol
    /// then writes the record in a transaction.
    fn release(&mut self, release: Release, reply: Reply<()>) {
        match self.shared.mine(&release.id) {
            Some(mine) if mine.details.record.generation == release.generation => {
                let certified = self.releases.begin(mine.details, release, reply);
                self.inbox.extend(certified.map(Event::DeathCertificate));
            }
            _ => {
                let shared = Arc::clone(&self.shared);
                let looking = releases::look(shared, release, reply, true);
                self.work
                    .push(Box::pin(async { Done::Looked(Box::new(looking.await)) }));
            }
        }
    }
}
