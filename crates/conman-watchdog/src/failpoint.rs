//! Lets a test make an essential task hang or panic. Only in debug builds; otherwise it is a function
//! that does nothing.

/// Names the file that selects the failure: a task's name makes the task hang while the file contains it,
/// `panic NAME` makes it panic.
#[cfg(debug_assertions)]
const FILE: &str = "CONMAN_FAILPOINT_FILE";

#[cfg(debug_assertions)]
pub(crate) async fn pass(name: &str) {
    use std::path::PathBuf;
    use std::sync::OnceLock;
    use std::time::Duration;

    static PATH: OnceLock<Option<PathBuf>> = OnceLock::new();
    const PAUSE: Duration = Duration::from_millis(20);

    let Some(path) = PATH.get_or_init(|| std::env::var_os(FILE).map(PathBuf::from)) else {
        return;
    };
    loop {
        let wanted = std::fs::read_to_string(path).unwrap_or_default();
        let wanted = wanted.trim();
        assert!(
            wanted.strip_prefix("panic ") != Some(name),
            "requested by a test"
        );
        if wanted != name {
            return;
        }
        tokio::time::sleep(PAUSE).await;
    }
}

#[cfg(not(debug_assertions))]
pub(crate) async fn pass(_name: &str) {}
