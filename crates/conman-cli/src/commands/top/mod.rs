//! `conman top`: nodes and sessions with what they use, read once a second.
//!
//! [`screen`] is what is shown and what keys do, without I/O. This file reads keys in a thread and
//! figures over the API, and draws.

mod screen;

use std::io::IsTerminal as _;
use std::time::Duration;

use ratatui::crossterm::event::{self, Event};
use tokio::sync::mpsc;

use self::screen::Screen;
use super::Context;
use super::stats::read_fleet;
use crate::failure::{Exit, Failure};
use crate::terminal::{Interrupt, Interrupts};

/// Time between two readings.
const INTERVAL: Duration = Duration::from_secs(1);

/// Keys that wait until a frame is drawn. A full queue holds up only the thread that reads keys.
const MAX_KEYS: usize = 64;

pub(super) async fn run(context: &Context) -> Result<Exit, Failure> {
    let terminals = [
        std::io::stdin().is_terminal(),
        std::io::stdout().is_terminal(),
    ];
    if context.output.json || terminals.contains(&false) {
        return Err(Failure::usage(
            "`conman top` needs a terminal; `conman stats` prints the same figures",
        ));
    }
    // The first reading comes before the screen changes, so that its error is a usual one.
    let mut screen = Screen::new(read_fleet(context).await?);
    let mut interrupts = Interrupts::listen()?;
    let mut terminal = ratatui::try_init()?;
    let outcome = show(context, &mut screen, &mut terminal, &mut interrupts).await;
    ratatui::try_restore()?;
    outcome
}

async fn show(
    context: &Context,
    screen: &mut Screen,
    terminal: &mut ratatui::DefaultTerminal,
    interrupts: &mut Interrupts,
) -> Result<Exit, Failure> {
    let mut keys = read_keys();
    loop {
        let next = async {
            tokio::time::sleep(INTERVAL).await;
            read_fleet(context).await
        };
        tokio::pin!(next);
        loop {
            terminal.draw(|frame| screen.draw(frame))?;
            // Every arm is cancel safe: `next` is only borrowed, and keys and signals are kept.
            tokio::select! {
                reading = &mut next => {
                    match reading {
                        Ok(reading) => screen.update(reading),
                        Err(error) => screen.fail(error.to_string()),
                    }
                    break;
                }
                key = keys.recv() => match key {
                    Some(Event::Key(key)) => if screen.key(key) { return Ok(Exit::Done) },
                    // A new size is drawn above.
                    Some(_) => {}
                    None => return Err(Failure::usage("the terminal is gone")),
                },
                interrupt = interrupts.next() => if let Interrupt::End(signal) = interrupt {
                    return Ok(Exit::Command(128 + signal));
                },
            }
        }
    }
}

/// Terminal events, from a thread that ends with the process: a read of a terminal cannot be
/// cancelled.
fn read_keys() -> mpsc::Receiver<Event> {
    let (sender, receiver) = mpsc::channel(MAX_KEYS);
    std::thread::spawn(move || {
        while let Ok(event) = event::read() {
            if sender.blocking_send(event).is_err() {
                return;
            }
        }
    });
    receiver
}
