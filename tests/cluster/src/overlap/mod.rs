//! Do two containers of one session ever run at the same time?
//!
//! Every session is a [witness](write) that appends a [`Line`] about itself to one shared file, again
//! and again. [`Checker`] judges that file alone: it knows nothing of nodes, registries and fences.

mod checker;
mod line;
mod witness;

pub use checker::{Checker, Life, Report, Violation};
pub use line::Line;
pub use witness::{TEMPLATE, journal, make_journal, template, write};
