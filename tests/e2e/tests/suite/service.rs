//! conman as a service: what it tells its service manager, and the unit that it comes with.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use conman_e2e::{Conman, binary, docker_shared};
use conman_linux::{Signal, signal_process};
use http::StatusCode;
use tokio::net::UnixDatagram;
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(60);
const UNITS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/systemd");

/// A daemon that ends with the test.
struct Served(Child);

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Reads notifications until one bears this line.
async fn until_told(socket: &UnixDatagram, line: &str) {
    let told = async {
        let mut bytes = [0; 4_096];
        loop {
            let length = socket.recv(&mut bytes).await.expect("the socket is open");
            let text = String::from_utf8_lossy(&bytes[..length]);
            if text.lines().any(|told| told == line) {
                return;
            }
        }
    };
    let told = timeout(PATIENCE, told).await;
    assert!(told.is_ok(), "{line} was not told");
}

#[tokio::test]
async fn the_service_manager_is_told_of_readiness_life_and_the_end() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::builder().prepare(&docker);
    let path = conman.directory().join("notify");
    let socket = UnixDatagram::bind(&path).expect("a socket can be made");
    let mut command = conman.serve();
    command
        .env("NOTIFY_SOCKET", &path)
        .env("WATCHDOG_USEC", "600000")
        .env_remove("WATCHDOG_PID");
    let mut served = Served(command.spawn().expect("conman starts"));

    until_told(&socket, "READY=1").await;
    let answer = conman.api().get("/readyz").await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    for _ in 0..3 {
        until_told(&socket, "WATCHDOG=1").await;
    }
    let pid = i32::try_from(served.0.id()).expect("a process id");
    signal_process(pid, Signal::SIGTERM).expect("the daemon is there");
    until_told(&socket, "STOPPING=1").await;
    let ended = tokio::task::spawn_blocking(move || served.0.wait());
    let ended = timeout(PATIENCE, ended).await.expect("it ends");
    let status = ended.expect("no panic").expect("it can be waited for");
    assert!(status.success(), "{status}");
}

#[test]
fn the_units_are_ones_that_systemd_understands() {
    let systemd_analyze = Path::new("/usr/bin/systemd-analyze");
    if !systemd_analyze.exists() {
        let _ = writeln!(
            std::io::stderr(),
            "skipped: systemd-analyze is not installed"
        );
        return;
    }
    let installed = binary().display().to_string();
    let folder = tempfile::tempdir().expect("a temporary directory can be made");
    let mut units = Vec::new();
    for entry in fs::read_dir(UNITS).expect("the units are there") {
        let source = entry.expect("the folder can be listed").path();
        let unit = fs::read_to_string(&source).expect("a unit can be read");
        let copy = folder.path().join(source.file_name().expect("a name"));
        fs::write(&copy, unit.replace("/usr/bin/conman", &installed)).expect("it can be copied");
        units.push(copy);
    }
    assert!(!units.is_empty());
    let verified = Command::new(systemd_analyze)
        .args(["verify", "--recursive-errors=no", "--man=no"])
        .args(&units)
        .output()
        .expect("systemd-analyze can be run");
    let told = String::from_utf8_lossy(&verified.stderr);
    assert!(
        verified.status.success() && told.trim().is_empty(),
        "{told}"
    );
}
