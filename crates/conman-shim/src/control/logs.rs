//! Tells the sweeper, a separate process, which logs to bound.

use std::io;

use rustix::event::epoll::EventFlags;

use super::Control;
use super::poller::Token;

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
        for (name, container) in self.containers.iter() {
            if let (true, Some(log)) = (container.is_alive(), &container.log) {
                self.sweeper.watch(name, log);
            }
        }
        self.update_sweeper();
        Ok(())
    }

    /// Sends the log of a container that has begun or ended.
    pub(super) fn bound_log(&mut self, name: &str) {
        let Some(container) = self.containers.get(name) else {
            return;
        };
        match &container.log {
            Some(log) if container.is_alive() => self.sweeper.watch(name, log),
            Some(_) => self.sweeper.forget(name),
            None => return,
        }
        self.update_sweeper();
    }

    pub(super) fn serve_sweeper(&mut self) {
        self.sweeper.flush();
        self.update_sweeper();
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

    fn update_sweeper(&self) {
        let Some(socket) = self.sweeper.socket() else {
            return;
        };
        // It sends nothing; its end is reported by a signal.
        let mut flags = EventFlags::empty();
        flags.set(EventFlags::OUT, self.sweeper.is_waiting());
        self.poller.change(Token::Sweeper, socket, flags);
    }
}
