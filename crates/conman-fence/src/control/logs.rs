//! Sends the log sweeper, a separate process, the logs to bound.

use std::io;

use rustix::event::epoll::EventFlags;

use super::Control;
use super::token::Token;

impl Control {
    /// Forks a sweeper when there is none, and sends it every log.
    pub(super) fn ensure_sweeper(&mut self) -> io::Result<()> {
        if !self.sweeper.ensure(&self.sole)? {
            return Ok(());
        }
        if let Some(socket) = self.sweeper.socket() {
            self.poller
                .add(Token::Sweeper, socket, EventFlags::empty())?;
        }
        for (_, container) in self.containers.iter() {
            if container.is_alive() {
                container
                    .logs
                    .iter()
                    .for_each(|log| self.sweeper.watch(log));
            }
        }
        Ok(())
    }

    /// Sends the logs of a container that has begun or ended.
    pub(super) fn bound_logs(&mut self, name: &str) {
        let Some(container) = self.containers.get(name) else {
            return;
        };
        for log in &container.logs {
            match container.is_alive() {
                true => self.sweeper.watch(log),
                false => self.sweeper.forget(log),
            }
        }
    }

    pub(super) fn sweeper_died(&mut self) {
        self.sweeper.died();
        if let Err(error) = self.ensure_sweeper() {
            tracing::error!(
                %error,
                "cannot start the log sweeper; logs grow until the next container begins"
            );
        }
    }
}
