//! A configuration that cannot be used: everything is told at once, and nothing is begun.

use std::fs;
use std::net::TcpStream;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

/// Runs `conman serve` with this configuration, in which `DIR` stands for a directory of its own.
fn serve(text: &str) -> (TempDir, Output) {
    run("serve", text)
}

fn run(daemon: &str, text: &str) -> (TempDir, Output) {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let own = directory.path().to_str().expect("its name is text");
    let file = directory.path().join("conman.toml");
    fs::write(&file, text.replace("DIR", own)).expect("the config is written");
    // One that wrongly starts would serve for ever.
    let output = Command::new("timeout")
        .arg("60")
        .arg(conman_e2e::binary())
        .args([daemon, "--config"])
        .arg(&file)
        .output()
        .expect("conman can be run");
    (directory, output)
}

fn refused(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(output.stdout.is_empty());
    text
}

fn nothing_was_made(directory: &Path) {
    let made: Vec<_> = fs::read_dir(directory)
        .expect("the directory is there")
        .map(|entry| entry.expect("an entry").file_name())
        .collect();
    assert_eq!(made, ["conman.toml"]);
}

#[test]
fn a_shim_refuses_a_mistake_by_the_same_exit_code_which_its_unit_does_not_try_again() {
    let (directory, output) = run(
        "shim",
        "[node]\nstate_dir = \"DIR/state\"\nruntme = \"native\"\n",
    );
    let told = refused(&output);
    assert!(told.contains("runtme"), "{told}");
    nothing_was_made(directory.path());
}

#[test]
fn every_mistake_is_told_in_one_message_with_its_line_and_nothing_is_bound() {
    let config = r#"[node]
state_dir = "DIR/state"
runtme = "docker"

[listen]
api = "127.0.0.1:31999"
sessions = "no address"
admin = "DIR/conman.sock"

[limits]
max_sessions = 0

[templates.bad]
image = "conman-test:busybox"
pids = "many"
memory_bytes = 5
"#;
    let (directory, output) = serve(config);
    let text = refused(&output);
    for (line, words) in [
        (3, ["runtme", "runtime"]),
        (7, ["listen.sessions", "ADDRESS:PORT"]),
        (11, ["limits.max_sessions", "1"]),
        (15, ["templates.bad.pids", "number"]),
        (16, ["templates.bad.memory_bytes", "6"]),
    ] {
        let told = text
            .lines()
            .find(|own| own.contains(&format!("conman.toml:{line}: ")));
        let told = told.unwrap_or_else(|| panic!("line {line} is missing in: {text}"));
        assert!(words.iter().all(|word| told.contains(word)), "{told}");
    }
    assert!(text.contains("5 mistakes"), "{text}");
    assert!(TcpStream::connect("127.0.0.1:31999").is_err());
    nothing_was_made(directory.path());
}

#[test]
fn listening_beyond_loopback_without_tokens_is_refused() {
    for address in ["0.0.0.0:31998", "[::]:31998", "10.1.2.3:31998"] {
        for listener in ["api", "sessions"] {
            let config = format!(
                "[node]\nstate_dir = \"DIR/state\"\n[listen]\n{listener} = \"{address}\"\n\
                 admin = \"DIR/conman.sock\"\n"
            );
            let (directory, output) = serve(&config);
            let text = refused(&output);
            assert!(text.contains(&format!("listen.{listener}")), "{text}");
            assert!(
                text.contains("conman.toml:4: ") && text.contains("auth.tokens_file"),
                "{text}"
            );
            nothing_was_made(directory.path());
        }
    }
}

#[test]
fn a_fleet_whose_takeovers_would_come_too_early_is_refused_with_what_is_missing() {
    let (directory, output) = serve(
        "[node]\nstate_dir = \"DIR/state\"\n[registry]\nkind = \"etcd\"\n\
         endpoints = [\"http://127.0.0.1:31997\"]\n[fleet]\ntakeover_ms = 6000\n",
    );
    let text = refused(&output);
    for part in [
        "conman.toml:7: `fleet.takeover_ms` is too short",
        "may end 2141 ms after a takeover",
        "kill = 8000 ms) stretched by the clock drift must stay below T = 6000 ms",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    nothing_was_made(directory.path());
}

#[test]
fn text_that_is_no_toml_is_told_with_its_line() {
    let (directory, output) = serve("[node]\nstate_dir = \"DIR/state\"\nname = = 3\n");
    let text = refused(&output);
    assert!(text.contains("conman.toml:3: "), "{text}");
    nothing_was_made(directory.path());
}

#[test]
fn another_user_than_root_is_told_to_run_it_as_root() {
    if !nix::unistd::geteuid().is_root() {
        conman_e2e::lacks("only root can become another user");
        return;
    }
    let nobody = 65_534;
    let directory = tempfile::tempdir().expect("a temporary directory");
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(directory.path(), open).expect("it is ours");
    // The user may not reach the directory that conman was built in.
    let program = directory.path().join("conman");
    conman_e2e::copy_program(conman_e2e::binary(), &program);
    let output = Command::new(&program)
        .arg("serve")
        .env("CONMAN_CONFIG", "")
        .current_dir(directory.path())
        .uid(nobody)
        .gid(nobody)
        .output()
        .expect("conman can be run");
    let text = refused(&output);
    for part in ["run it as root", "sudo conman serve", "Nothing was started"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn a_file_that_is_not_there_is_named() {
    let output = Command::new(conman_e2e::binary())
        .args(["serve", "--config", "/no/such/conman.toml"])
        .output()
        .expect("conman can be run");
    let text = refused(&output);
    assert!(text.contains("/no/such/conman.toml"), "{text}");
}
