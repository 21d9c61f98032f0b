//! What the registry's log says, for all tests of this process.

use std::fmt::{Debug, Write as _};
use std::sync::{Mutex, Once, PoisonError};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// A line of it, and the thread that wrote it.
#[derive(Debug, Clone)]
pub(crate) struct Line {
    pub(crate) thread: String,
    pub(crate) text: String,
}

static LINES: Mutex<Vec<Line>> = Mutex::new(Vec::new());
static BEGUN: Once = Once::new();

/// Keeps warnings and errors from now on.
pub(crate) fn keep() {
    BEGUN.call_once(|| {
        tracing::subscriber::set_global_default(Keeper).expect("nobody else reads the log");
    });
}

/// Those lines kept that hold this.
pub(crate) fn lines(text: &str) -> Vec<Line> {
    let lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
    let found = lines.iter().filter(|line| line.text.contains(text));
    found.cloned().collect()
}

#[derive(Debug)]
struct Keeper;

impl Subscriber for Keeper {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event()
            && *metadata.level() <= Level::WARN
            && metadata.target().starts_with("conman_etcd")
    }

    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields(String::new());
        event.record(&mut fields);
        let line = Line {
            thread: std::thread::current().name().unwrap_or_default().to_owned(),
            text: fields.0,
        };
        let mut lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
        lines.push(line);
    }

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}

struct Fields(String);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let _ = write!(self.0, "{}={value:?} ", field.name());
    }
}
