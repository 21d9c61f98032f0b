//! The load of this host, for placement and for load balancers.

use std::fs;

use conman_linux::{Meminfo, parse_pressure_record, read_proc};
use conman_registry::NodeLoad;

/// Pressure and memory, as far as the kernel reports them.
#[must_use]
pub fn host_load() -> NodeLoad {
    let memory = read_proc::<Meminfo>("/proc/meminfo").ok();
    let pressure = fs::read_to_string("/proc/pressure/cpu").ok();
    NodeLoad {
        cpu_pressure_percent: pressure
            .as_deref()
            .and_then(some_percent)
            .unwrap_or_default(),
        memory_available_bytes: memory
            .as_ref()
            .and_then(|memory| memory.mem_available)
            .unwrap_or_default(),
        memory_total_bytes: memory.map_or(0, |memory| memory.mem_total),
        ..NodeLoad::default()
    }
}

/// `avg10` of the line `some`, the only one that every kernel has.
fn some_percent(text: &str) -> Option<f64> {
    let record = parse_pressure_record(text.lines().next()?).ok()?;
    Some((f64::from(record.avg10) * 100.0).round() / 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pressure_is_read_as_the_kernel_writes_it() {
        let some = "some avg10=12.34 avg60=5.00 avg300=1.00 total=1\n";
        let full = "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n";
        assert_eq!(some_percent(&format!("{some}{full}")), Some(12.34));
        assert_eq!(some_percent(some), Some(12.34));
        assert_eq!(some_percent(""), None);
    }

    #[test]
    fn this_host_tells_how_much_memory_it_has() {
        let load = host_load();
        assert!(load.memory_total_bytes >= load.memory_available_bytes);
        assert!(load.memory_total_bytes > 0);
    }
}
