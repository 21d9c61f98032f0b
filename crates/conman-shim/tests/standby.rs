//! One shim at a time, and others that wait for their turn.

mod support;

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use conman_linux::{PidFd, Signal};
use conman_shim::Request;

use support::fencing::{arm, is_fenced, unfence};
use support::{SOON, Shim, available, boottime_ns, copy_program, until, wait_dead, write_program};

const PROGRAM: &str = env!("CARGO_BIN_EXE_conman-shim");

/// A shim that waits for another one's end; it ends with the test.
struct Standby(Child);

impl Standby {
    /// By this program, for the place of that shim's; it waits from here on.
    fn begin(program: &Path, socket: &Path, shim: &Shim) -> Self {
        let child = Command::new(program)
            .arg(socket)
            .arg(&shim.cgroup)
            .arg("--standby")
            .arg(shim.directory.path())
            .stderr(Stdio::piped())
            .spawn();
        let standby = Self(child.expect("it starts"));
        assert!(until(|| standby.waits()), "it does not wait");
        standby
    }

    fn pid(&self) -> i32 {
        i32::try_from(self.0.id()).expect("a PID")
    }

    fn waits(&self) -> bool {
        let locks = fs::read_to_string("/proc/locks").expect("readable");
        let pid = self.0.id().to_string();
        locks
            .lines()
            .any(|line| line.contains("->") && line.split_whitespace().any(|word| word == pid))
    }

    /// As nothing else would.
    fn kill(mut self) {
        self.0.kill().expect("killed");
        self.0.wait().expect("reaped");
    }
}

impl Drop for Standby {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn kill(shim: &mut Shim) {
    shim.process.kill().expect("killed");
    shim.process.wait().expect("reaped");
}

#[test]
fn of_two_shims_on_standby_one_at_a_time_succeeds_one_that_dies() {
    if !available() {
        return;
    }
    let mut shim = Shim::start();
    let mut client = shim.client();
    let kept = client
        .launch(shim.spec("kept.1", "exec sleep 1000"))
        .expect("launched");
    let begin = || Standby::begin(Path::new(PROGRAM), &shim.socket(), &shim);
    let (one, other) = (begin(), begin());
    assert_eq!(shim.client().shim_pid(), client.shim_pid());
    kill(&mut shim);
    let now = shim.client().shim_pid();
    let (first, second) = match now == one.pid() {
        true => (one, other),
        false => (other, one),
    };
    assert_eq!(now, first.pid());
    assert!(second.waits(), "both took their turn");
    first.kill();
    let mut client = shim.client();
    assert_eq!(client.shim_pid(), second.pid());
    let views = client.list().expect("listed");
    assert!(views.iter().any(|view| view.state.is_alive()), "{views:?}");
    client.ask(Request::KillAll).expect("killed");
    wait_dead(&kept);
}

#[test]
fn a_shim_on_standby_begins_as_the_program_that_was_put_in_place_meanwhile() {
    if !available() {
        return;
    }
    let mut shim = Shim::start();
    let mut client = shim.client();
    let kept = client
        .launch(shim.spec("kept.1", "exec sleep 1000"))
        .expect("launched");
    let program = shim.path("program");
    copy_program(Path::new(PROGRAM), &program);
    let standby = Standby::begin(&program, &shim.socket(), &shim);
    let newer = shim.path("newer");
    copy_program(Path::new(PROGRAM), &newer);
    fs::rename(&newer, &program).expect("put in place");
    let runs = format!("/proc/{}/exe", standby.pid());
    let runs = || fs::read_link(&runs).expect("it lives");
    assert_ne!(runs(), program, "it runs what was removed");
    kill(&mut shim);
    let mut client = shim.client();
    assert_eq!(client.shim_pid(), standby.pid());
    // A moment after it serves.
    assert!(until(|| runs() == program), "it stays what it was");
    client.ask(Request::KillAll).expect("killed");
    wait_dead(&kept);
}

#[test]
fn a_shim_on_standby_closes_a_fence_that_is_due_before_it_asks_the_program_in_its_place() {
    if !available() {
        return;
    }
    let mut shim = Shim::start();
    let mut client = shim.client();
    let kept = client
        .launch(shim.spec("kept.1", "exec sleep 1000"))
        .expect("launched");
    let (program, newer, asked) = (shim.path("program"), shim.path("newer"), shim.path("asked"));
    copy_program(Path::new(PROGRAM), &program);
    let standby = Standby::begin(&program, &shim.socket(), &shim);
    // Is not as quick as any answer could be, and keeps what the fence was when it was asked.
    let (state, draft) = (shim.path("shim.state"), shim.path("draft"));
    let script = format!(
        "#!/bin/sh\ncp {} {draft} && mv {draft} {}\nexec sleep 1000\n",
        state.display(),
        asked.display(),
        draft = draft.display()
    );
    write_program(&newer, script.as_bytes());
    fs::rename(&newer, &program).expect("put in place");
    let deadline = arm(&mut client, 1_000);
    let dying = PidFd::open(client.shim_pid()).expect("it lives");
    dying.signal(Signal::STOP).expect("stopped");
    assert!(until(|| boottime_ns() > deadline));
    kill(&mut shim);
    assert!(until(|| asked.exists()), "it does not ask");
    let mut client = shim.client();
    assert_eq!(client.shim_pid(), standby.pid());
    assert!(is_fenced(&mut client));
    let then = fs::read_to_string(&asked).expect("kept");
    let fence = then.lines().rfind(|line| line.contains("deadline_ms"));
    let fence = fence.expect("it is armed");
    assert!(!fence.contains("\"fired_ms\":null"), "{fence}");
    client.ask(Request::KillAll).expect("killed");
    wait_dead(&kept);
}

#[test]
fn a_shim_on_standby_that_cannot_read_what_a_later_one_wrote_keeps_all_frozen_for_that_one() {
    if !available() {
        return;
    }
    let mut shim = Shim::start();
    let mut client = shim.client();
    let kept = client
        .launch(shim.spec("kept.1", "while :; do echo ran; sleep 0.02; done"))
        .expect("launched");
    let (program, newer) = (shim.path("program"), shim.path("newer"));
    copy_program(Path::new(PROGRAM), &program);
    let standby = Standby::begin(&program, &shim.socket(), &shim);
    copy_program(Path::new(PROGRAM), &newer);
    fs::rename(&newer, &program).expect("put in place");
    let state = shim.path("shim.state");
    let written = fs::read_to_string(&state).expect("read");
    let later = written.replacen("\"version\":1,", "\"version\":99,", 1);
    assert_ne!(later, written);
    fs::write(&state, later).expect("written");
    kill(&mut shim);
    let mut client = shim.client();
    assert_eq!(client.shim_pid(), standby.pid());
    let runs = format!("/proc/{}/exe", standby.pid());
    let runs = || fs::read_link(&runs).expect("it lives");
    assert!(until(|| runs() == program), "it stays what it was");
    assert!(is_fenced(&mut client));
    let length = shim.log("kept.1").len();
    client.ask(unfence(None)).expect("opened");
    assert!(until(|| shim.log("kept.1").len() > length), "it stands");
    client.ask(Request::KillAll).expect("killed");
    wait_dead(&kept);
}

#[test]
fn a_shim_on_standby_does_not_wait_for_a_program_that_does_not_answer() {
    if !available() {
        return;
    }
    let mut shim = Shim::start();
    let mut client = shim.client();
    let kept = client
        .launch(shim.spec("kept.1", "exec sleep 1000"))
        .expect("launched");
    let (program, newer) = (shim.path("program"), shim.path("newer"));
    copy_program(Path::new(PROGRAM), &program);
    let standby = Standby::begin(&program, &shim.socket(), &shim);
    write_program(&newer, b"#!/bin/sh\nexec sleep 1000\n");
    fs::rename(&newer, &program).expect("put in place");
    kill(&mut shim);
    let mut client = shim.client();
    assert_eq!(client.shim_pid(), standby.pid());
    // It serves while it asks; or has given that up, and asks because it is told to.
    let replace = Request::Replace { program: None };
    let error = client
        .ask(replace.clone())
        .expect_err("refused")
        .to_string();
    let asks = ["is under way", "does not answer"];
    assert!(asks.iter().any(|what| error.contains(what)), "{error}");
    // The right one has its turn once the other is given up.
    copy_program(Path::new(PROGRAM), &newer);
    fs::rename(&newer, &program).expect("put in place");
    assert!(until(|| client.ask(replace.clone()).is_ok()), "it stays");
    let runs = fs::read_link(format!("/proc/{}/exe", standby.pid()));
    assert_eq!(runs.expect("it lives"), program);
    client.ask(Request::KillAll).expect("killed");
    wait_dead(&kept);
}

#[test]
fn a_shim_on_standby_stays_what_it_is_where_no_shim_was_put_in_its_place() {
    if !available() {
        return;
    }
    let whole = fs::read(PROGRAM).expect("read");
    let cut = &whole[..whole.len() / 2];
    for (what, bytes) in [("cut short", cut), ("another program", b"#!/bin/true\n")] {
        let mut shim = Shim::start();
        let mut client = shim.client();
        let kept = client
            .launch(shim.spec("kept.1", "exec sleep 1000"))
            .expect("launched");
        let (program, newer) = (shim.path("program"), shim.path("newer"));
        copy_program(Path::new(PROGRAM), &program);
        let standby = Standby::begin(&program, &shim.socket(), &shim);
        write_program(&newer, bytes);
        fs::rename(&newer, &program).expect("put in place");
        kill(&mut shim);
        let mut client = shim.client();
        assert_eq!(client.shim_pid(), standby.pid(), "{what}");
        client.ask(Request::KillAll).expect("killed");
        wait_dead(&kept);
    }
}

#[test]
fn a_shim_on_standby_whose_place_is_cleared_away_ends_and_says_so() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    shim.client();
    let place = shim.path("place");
    fs::create_dir(&place).expect("made");
    let first = Command::new(PROGRAM)
        .arg(place.join("shim.sock"))
        .arg(&shim.cgroup)
        .arg(shim.directory.path())
        .spawn();
    let first = Standby(first.expect("it starts"));
    assert!(until(|| place.join("shim.state").exists()), "it begins");
    let mut standby = Standby::begin(Path::new(PROGRAM), &place.join("shim.sock"), &shim);
    fs::remove_dir_all(&place).expect("removed");
    first.kill();
    let process = PidFd::open(standby.pid()).expect("it lives");
    assert!(process.wait_dead(SOON).expect("waited"), "it goes on");
    let mut said = String::new();
    let mut stderr = standby.0.stderr.take().expect("piped");
    std::io::Read::read_to_string(&mut stderr, &mut said).expect("read");
    assert!(!standby.0.wait().expect("reaped").success(), "{said}");
    let lock = place.join("shim.lock").display().to_string();
    assert!(said.contains(&format!("cannot open {lock}")), "{said}");
}

#[test]
fn one_shim_at_a_time_has_the_state() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let client = shim.client();
    let second = Command::new(PROGRAM)
        .arg(shim.socket())
        .arg(&shim.cgroup)
        .arg(shim.directory.path())
        .output()
        .expect("it ends");
    assert!(!second.status.success());
    let text = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(text.contains("another shim"), "{text}");
    assert_eq!(shim.client().shim_pid(), client.shim_pid());
}
