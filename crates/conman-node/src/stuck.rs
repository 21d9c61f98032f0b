//! Describes why a killed process does not die, as far as the kernel shows it.

use conman_linux::{Status, read_proc};

/// The state of process `pid` and where in the kernel it waits.
pub(crate) fn describe(pid: i32) -> String {
    let Ok(status) = read_proc::<Status>(format!("/proc/{pid}/status")) else {
        return format!("process {pid} is gone, but its PID namespace is not empty");
    };
    let state = status.state;
    let place = std::fs::read_to_string(format!("/proc/{pid}/wchan")).unwrap_or_default();
    match place.as_str() {
        "" | "0" => format!("process {pid} is in state {state}"),
        place => format!("process {pid} is in state {state}, in the kernel's {place}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_described_by_its_state() {
        let own = i32::try_from(std::process::id()).expect("a pid");
        let text = describe(own);
        assert!(
            text.contains(&format!("process {own} is in state ")),
            "{text}"
        );
        assert!(describe(i32::MAX).contains("is gone"));
    }
}
