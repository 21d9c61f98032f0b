//! The setting of a measurement: what somebody needs to know before comparing figures.

use std::fs;
use std::process::{Command, Stdio};

use jiff::Timestamp;
use serde_json::{Value, json};

/// Programs whose versions are shown if they are installed, with the argument that prints it.
const PROGRAMS: [(&str, &str); 6] = [
    ("docker", "--version"),
    ("etcd", "--version"),
    ("haproxy", "-v"),
    ("nginx", "-v"),
    ("redis-server", "--version"),
    ("fio", "--version"),
];

/// When, where and by which command was measured.
#[derive(Debug, Clone)]
pub(crate) struct Setting {
    command: String,
    begun: Timestamp,
    /// The processes that wanted a processor in the minute before.
    load_before: String,
}

impl Setting {
    /// Of this process and machine, now.
    pub(crate) fn begin() -> Self {
        Self {
            command: command(std::env::args().skip(1)),
            begun: Timestamp::now(),
            load_before: load(),
        }
    }

    /// Names and values, for people.
    pub(super) fn lines(&self) -> Vec<(&'static str, String)> {
        let ended = Timestamp::now();
        let seconds = ended.duration_since(self.begun).as_secs();
        let second = |time: Timestamp| time.strftime("%Y-%m-%d %H:%M:%S UTC").to_string();
        vec![
            ("Command", self.command.clone()),
            ("Machine", machine()),
            ("Kernel", kernel()),
            ("Versions", versions().join("; ")),
            ("Date", format!("{}, {seconds} s", second(self.begun))),
            (
                "Load",
                format!("{} before, {} at the end", self.load_before, load()),
            ),
        ]
    }

    pub(super) fn to_json(&self) -> Value {
        json!({
            "command": self.command, "machine": machine(), "kernel": kernel(),
            "versions": versions(), "begun": self.begun.to_string(),
            "ended": Timestamp::now().to_string(), "load_before": self.load_before, "load_after": load(),
        })
    }
}

/// As a user types it: `conman bench` adds the path of conman.
fn command(mut arguments: impl Iterator<Item = String>) -> String {
    let mut words = vec!["conman bench".to_owned()];
    while let Some(argument) = arguments.next() {
        if argument == "--conman" {
            arguments.next();
        } else {
            words.push(argument);
        }
    }
    words.join(" ")
}

fn machine() -> String {
    let processors = std::thread::available_parallelism().map_or(0, usize::from);
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.split_once(':'))
            .map(|(_, value)| value.trim().to_owned())
    };
    let model = field(&read("/proc/cpuinfo"), "model name");
    let kib = field(&read("/proc/meminfo"), "MemTotal")
        .and_then(|text| text.split_whitespace().next()?.parse::<u64>().ok());
    format!(
        "{processors} × {}, {} GiB of memory",
        model.unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
        kib.map_or(0, |kib| (kib + (1 << 19)) >> 20),
    )
}

fn kernel() -> String {
    let uname = rustix::system::uname();
    let [name, release, machine] =
        [uname.sysname(), uname.release(), uname.machine()].map(|text| text.to_string_lossy());
    format!("{name} {release} {machine}")
}

fn versions() -> Vec<String> {
    let own = format!("conman {}", env!("CARGO_PKG_VERSION"));
    let found = PROGRAMS.iter().filter_map(|(program, argument)| {
        let output = Command::new(program)
            .arg(argument)
            .stdin(Stdio::null())
            .output()
            .ok()?;
        // nginx prints it on standard error.
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text);
        let line = text.lines().find(|line| !line.trim().is_empty())?;
        Some(line.trim().to_owned())
    });
    std::iter::once(own).chain(found).collect()
}

fn load() -> String {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().unwrap_or("unknown").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_is_the_one_that_a_user_types() {
        let words = ["--conman", "/usr/bin/conman", "kill", "--count", "200"];
        let shown = command(words.map(str::to_owned).into_iter());
        assert_eq!(shown, "conman bench kill --count 200");
    }
}
