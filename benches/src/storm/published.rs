//! What others have published, on other hardware and with other clients: to be read beside the figures, not
//! compared with them.

use crate::report::Table;

/// Where the figures are from.
pub(super) const SOURCE: &str = "Published by Replit (\"Killing containers at scale\", 2021) of a production fleet \
    on Google's preemptible machines, on other hardware and with other clients: not comparable with the figures \
    above, only their direction is.";

pub(super) fn table() -> Table {
    let mut table = Table::new(["published", "before", "after"]);
    table.row(["connection errors", "3 %", "below 0.5 %"]);
    table.row(["slowest percentile of boots", "120 s", "15 s"]);
    table.row(["200 containers killed at once", "37.7 s", "–"]);
    table
}
