//! Do two containers of one session ever run at the same time?
//!
//! Every session is a [witness](write()) that appends a [`Line`] about itself to one shared file, again
//! and again. [`Checker`] judges that file alone: it knows nothing of nodes, registries and fences.
//! [`Drive`] has clients ask for the sessions while it injects faults that [`draw`] plans from a seed.

mod checker;
mod door;
mod drive;
mod faults;
mod inflict;
mod line;
mod tail;
mod visit;
mod witness;

pub use checker::{Checker, Life, Report, Violation};
pub use door::answer;
pub use drive::Drive;
pub use faults::{Event, Fault, Scale, Targets, draw};
pub use line::Line;
pub use tail::Tail;
pub use visit::{ClosedEarly, WITHOUT_CODE, visit};
pub use witness::{
    CALM, DOCKERS, SERVING, TEMPLATE, journal, make_journal, monotonic_ns, template, write,
};
