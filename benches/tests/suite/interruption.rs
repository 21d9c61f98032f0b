//! A benchmark that is interrupted keeps what it has, and leaves nothing.

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::{command, found};

/// Command lines of processes that name a path.
fn processes(path: &Path) -> Vec<String> {
    let path = path.display().to_string();
    let entries = std::fs::read_dir("/proc").expect("/proc").flatten();
    let lines = entries.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
    let lines = lines.map(|line| String::from_utf8_lossy(&line).replace('\0', " "));
    lines.filter(|line| line.contains(&path)).collect()
}

/// All containers of Docker with a label.
fn containers(label: &str) -> String {
    let listed = Command::new("docker")
        .args([
            "ps",
            "--all",
            "--quiet",
            "--filter",
            &format!("label={label}"),
        ])
        .output()
        .expect("docker lists");
    String::from_utf8_lossy(&listed.stdout).into_owned()
}

#[tokio::test]
async fn an_interrupted_benchmark_keeps_the_rounds_it_has_and_leaves_nothing() {
    let Some(_docker) = conman_e2e::docker_shared().await else {
        return;
    };
    if conman_cluster::find("fio").is_none() {
        return conman_e2e::lacks("fio is missing (package fio)");
    }
    let directory = tempfile::tempdir().expect("a directory");
    let disk = ["--loads", "disk", "--seconds", "0.1", "--rounds", "100"];
    let arguments = [&["overhead"], &disk[..]].concat();
    let mut running = command(&arguments, directory.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let pid = running.id();
    let errors = BufReader::new(running.stderr.take().expect("its errors"));
    let mut said = String::new();
    for line in errors.lines() {
        let line = line.expect("text");
        said += &format!("{line}\n");
        if line.contains("round 2: ") && !said.contains("interrupting") {
            said += "interrupting\n";
            kill(Pid::from_raw(pid.cast_signed()), Signal::SIGINT).expect("sent");
        }
    }
    let mut output = Vec::new();
    let mut stdout = running.stdout.take().expect("its output");
    stdout.read_to_end(&mut output).expect("read");
    assert!(running.wait().expect("it ends").success(), "{said}");
    let found = found(&output, said.as_bytes());
    let rounds = |place: &str| {
        let all = found["measurements"].as_array().into_iter().flatten();
        let first = all.filter(|one| one["place"] == place && one["round"] == 0);
        first.count()
    };
    for place in ["plain", "native", "docker"] {
        assert_eq!(rounds(place), 4, "{place}: {found}");
    }
    let skipped = found["skipped"].as_array().into_iter().flatten();
    let mut skipped = skipped.filter(|one| one["what"] == "further rounds");
    let why = skipped.next().and_then(|one| one["why"].as_str());
    assert!(
        why.is_some_and(|why| why.contains("interrupted")),
        "{found}"
    );
    // There is no KVM in most places where tests run; then it says so.
    let machine = |one: &&Value| one["what"] == "a virtual machine" && one["why"].is_string();
    let mut all = found["skipped"].as_array().into_iter().flatten();
    assert!(all.any(|one| machine(&one)), "{found}");

    assert_eq!(containers(&format!("dev.conman.bench.run={pid}")), "");
    assert_eq!(processes(directory.path()), [""; 0]);
    let left = std::fs::read_dir(directory.path()).expect("a directory");
    assert_eq!(
        left.flatten().map(|one| one.path()).collect::<Vec<_>>(),
        [""; 0].map(std::path::PathBuf::from)
    );
}
