//! Carrying out the parts' effects.

use std::io;

use conman_core::ownership::FenceEvent;
use conman_shim_protocol::Message;

use super::cgroup_orders::unless_gone;
use super::{Control, boottime_ns};
use crate::effect::Effect;
use crate::fence::slot;

/// Most killed containers that one log line names.
pub(super) const MAX_NAMED: usize = 10;

/// What is logged about the fence once all effects are carried out: the log's reader may hang with the
/// disk that keeps containers from freezing.
#[derive(Debug, Default)]
struct FenceLog {
    fired: bool,
    killed: Vec<String>,
    failed: Vec<(&'static str, Option<String>, io::Error)>,
}

impl FenceLog {
    fn add(&mut self, action: &'static str, name: Option<String>, done: io::Result<()>) {
        self.failed
            .extend(done.err().map(|error| (action, name, error)));
    }

    fn write(self, freeze_ms: u64) {
        if self.fired {
            tracing::warn!("the fence's deadline has passed: freezing all containers");
        }
        if !self.killed.is_empty() {
            tracing::warn!(
                count = self.killed.len(),
                first = ?&self.killed[..self.killed.len().min(MAX_NAMED)],
                freeze_ms,
                "the fence killed containers not proven frozen in time, or frozen for too long"
            );
        }
        for (action, name, error) in self.failed {
            tracing::error!(name, %error, "the fence cannot {action}");
        }
    }
}

impl Control {
    /// Carries out effects in their order.
    pub(super) fn carry_out(&mut self, effects: impl IntoIterator<Item = Effect>) {
        let mut log = FenceLog::default();
        for effect in effects {
            self.carry_out_one(effect, &mut log);
        }
        log.write(self.fence.freeze_ms());
    }

    fn carry_out_one(&mut self, effect: Effect, log: &mut FenceLog) {
        match effect {
            Effect::Publish(state) => self.publish(&Message::Fence { state }),
            Effect::RecordFence => self.record_fence(),
            Effect::FreezeAll => {
                log.fired = true;
                log.add("freeze all containers", None, self.cgroups.freeze_all());
                // A start under way would delay the launcher, and its cgroup may not exist yet; what has
                // begun of it is killed and removed.
                self.launching.abort();
            }
            Effect::ReleaseAll => {
                let done = self.cgroups.release_all();
                log.add("thaw the containers that it kills", None, done);
            }
            Effect::Freeze(name) => {
                let done = self.freeze_for_fence(&name);
                log.add("freeze", Some(name), done);
            }
            Effect::Thaw(name) => {
                let done = self.thaw_for_fence(&name);
                log.add("thaw", Some(name), done);
            }
            Effect::Kill(name) => {
                if self.containers.killed_by_fence(&name) {
                    log.killed.push(name.clone());
                    self.record(&name);
                }
                let done = self.kill_for_fence(&name);
                self.containers.kill_sent(&name, boottime_ns());
                log.add("kill", Some(name), done);
            }
            Effect::KillAppeared(name) => self.kill_pending(&name),
            Effect::TimedOut(name) => self.timed_out(&name),
            Effect::ReportEnd(name) => self.report_end(&name),
            Effect::LiftCpuLimit { cgroup } => self.launching.lift_cpu_limit(&cgroup),
            Effect::HoldStarts(held) => {
                self.launching.hold_back(held);
                if held {
                    self.end_all_ahead();
                }
                self.launching.flush();
            }
            Effect::Reply {
                client,
                call,
                reply,
            } => self.reply(client, call, reply, None),
        }
    }

    /// Passes an event to the fence. `false` when it refuses.
    pub(super) fn change(&mut self, event: FenceEvent) -> bool {
        let (admitted, effects) = self.fence.on(boottime_ns(), event);
        self.carry_out(effects);
        admitted
    }

    fn freeze_for_fence(&self, name: &str) -> io::Result<()> {
        let Some(cgroup) = self.cgroup_of(name) else {
            return Ok(());
        };
        let frozen = unless_gone(self.cgroups.freezer.freeze(&cgroup));
        let may_appear = self.containers.get(name).filter(|one| one.may_appear());
        let killed = may_appear.map_or(Ok(()), |one| self.cgroups.kill_strays(one));
        frozen.and(killed)
    }

    fn thaw_for_fence(&self, name: &str) -> io::Result<()> {
        // What a client froze stays frozen until the client thaws it.
        if self.containers.get(name).is_some_and(|one| one.frozen) {
            return Ok(());
        }
        match self.cgroup_of(name) {
            Some(cgroup) => unless_gone(self.cgroups.freezer.thaw(&cgroup)),
            None => Ok(()),
        }
    }

    fn kill_for_fence(&self, name: &str) -> io::Result<()> {
        unless_gone(match self.containers.get(name) {
            Some(container) if container.is_alive() => self.kill(container),
            Some(_) => Ok(()),
            None => match self.launching.left_of(name) {
                Some(left) => self.cgroups.freezer.kill(&left.cgroup),
                None => Ok(()),
            },
        })
    }

    /// Kills a container that must die as soon as it appears.
    pub(super) fn kill_pending(&self, name: &str) {
        let Some(container) = self.containers.get(name) else {
            return;
        };
        if let Err(error) = self.kill(container)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::error!(name, %error, "cannot kill a start that must not run");
        }
    }

    pub(super) fn report_end(&mut self, name: &str) {
        self.bound_logs(name);
        self.record(name);
        self.change(FenceEvent::Died(slot(name)));
        let Some(container) = self.containers.get(name) else {
            return;
        };
        let may_hold_frozen = container.frozen || self.fence.is_closed();
        if may_hold_frozen && container.exec_in.is_none() && !container.external {
            // The relays and helpers of its commands are in its cgroups but not in its PID namespace. Frozen, they
            // would never end.
            let killed = unless_gone(self.cgroups.freezer.kill(&container.cgroup));
            if let Err(error) = killed {
                tracing::error!(name, %error, "cannot kill the relays of an ended container's commands");
            }
        }
        if container.ahead {
            return;
        }
        let container = container.view(name);
        let container_is_gone = container
            .exec_in
            .as_deref()
            .is_some_and(|in_| self.containers.get(in_).is_none());
        self.publish(&Message::Ended { container });
        // Nothing else forgets a kept command whose end became known after that of its container.
        if container_is_gone {
            self.forget_kept(name);
        }
    }
}
