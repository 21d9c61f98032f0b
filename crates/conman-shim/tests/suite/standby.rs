//! One shim at a time, and others that wait for their turn.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use conman_linux::{PidFd, Signal};
use conman_shim::{Request, VERSION};

use crate::support::fencing::{arm, is_fenced, unfence};
use crate::support::{
    Client, Launched, SOON, Shim, available, boottime_ns, copy_program, until, wait_dead,
    write_program,
};

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
    client.kill_all().expect("killed");
    wait_dead(&kept);
}

/// A shim with a container, and one on standby for it, by a program of its own.
struct Succession {
    standby: Standby,
    client: Client,
    kept: Launched,
    program: PathBuf,
    // Last: whoever serves in its place ends before its directory goes.
    shim: Shim,
}

impl Succession {
    fn prepare(script: &str) -> Self {
        let shim = Shim::start();
        let mut client = shim.client();
        let kept = client.launch(shim.spec("kept.1", script));
        let program = shim.path("program");
        copy_program(Path::new(PROGRAM), &program);
        let standby = Standby::begin(&program, &shim.socket(), &shim);
        Self {
            kept: kept.expect("launched"),
            shim,
            client,
            program,
            standby,
        }
    }

    /// Puts another program in the place of the one that stands by.
    fn put(&self, make: impl FnOnce(&Path)) {
        let newer = self.shim.path("newer");
        make(&newer);
        fs::rename(&newer, &self.program).expect("put in place");
    }

    fn put_shim(&self) {
        self.put(|path| copy_program(Path::new(PROGRAM), path));
    }

    /// The one that stands by serves.
    fn succeed(&mut self) {
        kill(&mut self.shim);
        self.client = self.shim.client();
        assert_eq!(self.client.shim_pid(), self.standby.pid());
    }

    /// What the one that stood by runs by now.
    fn runs(&self) -> PathBuf {
        let link = format!("/proc/{}/exe", self.standby.pid());
        fs::read_link(link).expect("it lives")
    }

    fn end(mut self) {
        self.client.kill_all().expect("killed");
        wait_dead(&self.kept);
    }
}

#[test]
fn a_shim_on_standby_begins_as_the_program_that_was_put_in_place_meanwhile() {
    if !available() {
        return;
    }
    let mut both = Succession::prepare("exec sleep 1000");
    both.put_shim();
    assert_ne!(both.runs(), both.program, "it runs what was removed");
    both.succeed();
    // A moment after it serves.
    assert!(until(|| both.runs() == both.program), "it stays");
    both.end();
}

#[test]
fn a_shim_on_standby_closes_a_fence_that_is_due_before_it_asks_the_program_in_its_place() {
    if !available() {
        return;
    }
    let mut both = Succession::prepare("exec sleep 1000");
    // Is not as quick as any answer could be, and keeps what the fence was when it was asked.
    let path = |name: &str| both.shim.path(name);
    let (state, draft, asked) = (path("shim.state"), path("draft"), path("asked"));
    let script = format!(
        "#!/bin/sh\ncp {} {draft} && mv {draft} {}\nexec sleep 1000\n",
        state.display(),
        asked.display(),
        draft = draft.display()
    );
    both.put(|path| write_program(path, script.as_bytes()));
    let deadline = arm(&mut both.client, 1_000);
    let dying = PidFd::open(both.client.shim_pid()).expect("it lives");
    dying.signal(Signal::SIGSTOP).expect("stopped");
    assert!(until(|| boottime_ns() > deadline));
    both.succeed();
    assert!(until(|| asked.exists()), "it does not ask");
    assert!(is_fenced(&mut both.client));
    let then = fs::read_to_string(&asked).expect("kept");
    let fence = then.lines().rfind(|line| line.contains("deadline_ms"));
    let fence = fence.expect("it is armed");
    assert!(!fence.contains("\"fired_ms\":null"), "{fence}");
    both.end();
}

#[test]
fn a_shim_on_standby_that_cannot_read_what_a_later_one_wrote_keeps_all_frozen_for_that_one() {
    if !available() {
        return;
    }
    let mut both = Succession::prepare("while :; do echo ran; sleep 0.02; done");
    both.put_shim();
    let state = both.shim.path("shim.state");
    let written = fs::read_to_string(&state).expect("read");
    let version = format!("\"version\":{VERSION},");
    let later = written.replacen(&version, "\"version\":99,", 1);
    assert_ne!(later, written);
    fs::write(&state, later).expect("written");
    both.succeed();
    assert!(until(|| both.runs() == both.program), "it stays");
    assert!(is_fenced(&mut both.client));
    let length = both.shim.log("kept.1").len();
    both.client.ask(unfence(None)).expect("opened");
    let goes_on = || both.shim.log("kept.1").len() > length;
    assert!(until(goes_on), "it stands");
    both.end();
}

#[test]
fn a_shim_on_standby_does_not_wait_for_a_program_that_does_not_answer() {
    if !available() {
        return;
    }
    let mut both = Succession::prepare("exec sleep 1000");
    both.put(|path| write_program(path, b"#!/bin/sh\nexec sleep 1000\n"));
    both.succeed();
    // It serves while it asks; or has given that up, and asks because it is told to.
    let replace = Request::Replace { program: None };
    let refused = both.client.ask(replace.clone()).expect_err("refused");
    let error = refused.to_string();
    let asks = ["is under way", "does not answer"];
    assert!(asks.iter().any(|what| error.contains(what)), "{error}");
    // The right one has its turn once the other is given up.
    both.put_shim();
    let replaced = until(|| both.client.ask(replace.clone()).is_ok());
    assert!(replaced, "it stays");
    assert_eq!(both.runs(), both.program);
    both.end();
}

#[test]
fn a_shim_on_standby_stays_what_it_is_where_no_shim_was_put_in_its_place() {
    if !available() {
        return;
    }
    let whole = fs::read(PROGRAM).expect("read");
    let cut = &whole[..whole.len() / 2];
    for bytes in [cut, b"#!/bin/true\n"] {
        let mut both = Succession::prepare("exec sleep 1000");
        both.put(|path| write_program(path, bytes));
        both.succeed();
        both.end();
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
