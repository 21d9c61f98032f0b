//! The line that shows the user what is being waited for.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use crate::output::Output;

/// Interval of the spinner.
const TICK: Duration = Duration::from_millis(120);

/// A line on standard error, removed when this is dropped; nothing if no user watches.
///
/// indicatif updates it in a separate thread.
#[derive(Debug)]
pub(crate) struct Progress(Option<ProgressBar>);

impl Progress {
    pub(crate) fn start(output: &Output, text: String) -> Self {
        if !output.shows_progress() {
            return Self(None);
        }
        let bar = ProgressBar::new_spinner();
        // The template is a constant; if it were invalid, the default style would do.
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} ({elapsed})") {
            bar.set_style(style);
        }
        bar.set_message(text);
        bar.enable_steady_tick(TICK);
        Self(Some(bar))
    }

    pub(crate) fn set(&self, text: String) {
        if let Some(bar) = &self.0 {
            bar.set_message(text);
        }
    }

    pub(crate) fn is_shown(&self) -> bool {
        self.0.is_some()
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}
