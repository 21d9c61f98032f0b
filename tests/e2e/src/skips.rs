//! Tests that are skipped, and where that is an error.

use std::io::Write as _;

/// Set where a machine has been made ready for the tests.
const VARIABLE: &str = "CONMAN_NO_SKIPS";

/// Says that a test is skipped, since the machine lacks something that `cargo xtask test` installs.
///
/// # Panics
/// Where `CONMAN_NO_SKIPS` is set: there it must not lack it. What a host's kernel cannot do is no
/// matter of this.
pub fn lacks(what: &str) {
    assert!(
        std::env::var_os(VARIABLE).is_none(),
        "{what}; `cargo xtask test` installs it, and {VARIABLE} is set"
    );
    // Not by `println!`, which the test harness keeps to itself where a test passes.
    let _ = writeln!(std::io::stderr(), "skipped: {what}");
}
