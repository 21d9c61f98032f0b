//! Commands on pipes that the shim keeps.

use std::fs;
use std::time::Duration;

use conman_shim::{
    CallError, ClientError, CommandView, ContainerState, ExecSpec, Hardening, KEPT_OUTPUT_BYTES,
    KeptCommandSpec, KeptStreamsSpec, OutputStream, Position, Reply, Request, StreamEvent,
    StreamInput,
};

use crate::support::probe::{Arg, Probe};
use crate::support::{Attachment, Client, Shim, available, next_end, subscribe, until};

/// What one container may have, and what its kept output may cost the shim.
const MOST: usize = 128;
const MOST_GROWTH: u64 = 2 * (MOST * KEPT_OUTPUT_BYTES) as u64;

const LOOK: Duration = Duration::from_millis(50);

fn command(shim: &Shim, name: &str, script: &str) -> ExecSpec {
    ExecSpec {
        with_client: false,
        files: None,
        name: format!("home.1_{name}"),
        container: "home.1".to_owned(),
        program: shim.spec("unused", script).program,
        terminal: false,
        ptys: 0,
        kept: Some(KeptCommandSpec {
            streams: KeptStreamsSpec::Pipes { stdin: true },
            timeout_ms: None,
            label: format!("label of {name}"),
        }),
        hardening: Hardening::default(),
    }
}

fn home(shim: &Shim) -> Client {
    let mut client = shim.client();
    let mut spec = shim.spec("home.1", "exec sleep 1000");
    spec.limits.pids = Some(1_024);
    client.launch(spec).expect("launched");
    client
}

fn commands(client: &mut Client, container: &str) -> Vec<CommandView> {
    let mut all: Vec<CommandView> = Vec::new();
    loop {
        let request = Request::Commands {
            container: container.to_owned(),
            after: all.last().map(|one| one.name.clone()),
        };
        match client.ask(request).expect("listed") {
            Reply::Commands { commands, more } => {
                all.extend(commands);
                if !more {
                    return all;
                }
            }
            other => panic!("{other:?}"),
        }
    }
}

/// A watcher, and what it has got.
struct Watcher {
    attachment: Attachment,
    positions: Vec<Position>,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    ended: bool,
}

impl Watcher {
    fn attach(client: &mut Client, name: &str) -> Self {
        Self::of(client.attach(name, None, None).expect("attached"))
    }

    fn of(attachment: Attachment) -> Self {
        Self {
            attachment,
            positions: Vec::new(),
            stdout: Vec::new(),
            stderr: Vec::new(),
            ended: false,
        }
    }

    fn after(client: &mut Client, name: &str, after: u64) -> Self {
        Self::of(client.attach(name, None, Some(after)).expect("attached"))
    }

    fn until(&mut self, done: impl Fn(&Self) -> bool) -> bool {
        until(|| {
            match self.attachment.next(LOOK).expect("an event") {
                Some(StreamEvent::Output(OutputStream::Stdout, bytes)) => self.stdout.extend(bytes),
                Some(StreamEvent::Output(OutputStream::Stderr, bytes)) => self.stderr.extend(bytes),
                Some(StreamEvent::Position(position)) => self.positions.push(position),
                Some(StreamEvent::End) => self.ended = true,
                Some(other) => panic!("{other:?} of pipes"),
                None => {}
            }
            done(self)
        })
    }

    fn has_all(&mut self) -> bool {
        self.until(|one| one.ended)
    }
}

#[test]
fn every_byte_comes_back_to_every_watcher_and_the_input_has_an_end() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = home(&shim);
    let script = "cat; echo done >&2; exit 3";
    client
        .exec_kept(command(&shim, "cat", script))
        .expect("begun");
    let mut first = Watcher::attach(&mut client, "home.1_cat");
    let mut second = Watcher::attach(&mut client, "home.1_cat");
    let bytes: Vec<u8> = (0..40_000_usize).map(|at| (at % 256) as u8).collect();
    first.attachment.send_input(&bytes).expect("sent");
    assert!(second.until(|one| one.stdout.len() == bytes.len()));
    // One watcher's end is not the input's.
    drop(second);
    first.attachment.send(&StreamInput::End).expect("sent");
    assert!(first.has_all());
    assert_eq!(first.stdout, bytes);
    assert_eq!(first.stderr, b"done\n");
    let start = Position {
        offset: 0,
        dropped: 0,
    };
    assert_eq!(first.positions, [start]);
    let [one] = &commands(&mut client, "home.1")[..] else {
        panic!("one command")
    };
    assert_eq!(one.label, "label of cat");
    assert_eq!(one.output_bytes, Some(40_005));
    assert!(until(|| {
        commands(&mut client, "home.1")[0].state == ContainerState::Exited { code: 3 }
    }));
    // After the end, from any offset.
    let mut late = Watcher::after(&mut client, "home.1_cat", 39_990);
    assert!(late.has_all());
    assert_eq!(
        (&late.stdout[..], &late.stderr[..]),
        (&bytes[39_990..], &b"done\n"[..])
    );
    client.kill_all().expect("killed");
}

#[test]
fn what_a_watcher_missed_is_counted_and_the_command_is_not_slowed() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = home(&shim);
    let script = "read go; i=0; while [ $i -lt 40000 ]; do echo number $i of many; i=$((i+1)); \
                  done; echo done; cat";
    client
        .exec_kept(command(&shim, "flood", script))
        .expect("begun");
    let mut slow = Watcher::attach(&mut client, "home.1_flood");
    let mut quick = Watcher::attach(&mut client, "home.1_flood");
    quick.attachment.send_input(b"go\n").expect("sent");
    assert!(quick.until(|one| one.stdout.ends_with(b"done\n")));
    assert!(slow.until(|one| one.stdout.ends_with(b"done\n")));
    let dropped: u64 = slow.positions.iter().map(|one| one.dropped).sum();
    assert!(dropped > 0, "{:?}", slow.positions);
    let got = slow.stdout.len() as u64;
    assert_eq!(
        commands(&mut client, "home.1")[0].output_bytes,
        Some(dropped + got)
    );
    client.kill_all().expect("killed");
}

#[test]
fn a_command_continues_while_the_shim_becomes_another_program() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = home(&shim);
    let script = "echo before; echo error >&2; while read line; do echo \"<$line>\"; done";
    client
        .exec_kept(command(&shim, "loop", script))
        .expect("begun");
    let mut watcher = Watcher::attach(&mut client, "home.1_loop");
    assert!(watcher.until(|one| one.stderr == b"error\n"));
    let pid = commands(&mut client, "home.1")[0].inner_pid;
    client
        .ask(Request::Replace { program: None })
        .expect("replaced");
    watcher.attachment.send_input(b"one\n").expect("sent");
    assert!(watcher.until(|one| one.stdout == b"before\n<one>\n"));
    let mut other = Watcher::after(&mut client, "home.1_loop", 7);
    assert!(other.until(|one| one.stdout == b"<one>\n" && one.stderr == b"error\n"));
    assert_eq!(commands(&mut client, "home.1")[0].inner_pid, pid);
    watcher.attachment.send(&StreamInput::End).expect("sent");
    assert!(watcher.has_all() && other.has_all());
    client.kill_all().expect("killed");
}

#[test]
fn a_commands_own_pid_is_told_and_its_time_ends_it_with_its_group() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = home(&shim);
    let mut spec = command(&shim, "timed", "sleep 1000 & echo $$; wait");
    spec.kept.as_mut().expect("kept").timeout_ms = Some(5_000);
    client.exec_kept(spec).expect("begun");
    let mut watcher = Watcher::attach(&mut client, "home.1_timed");
    // The end of the output needs the end of both processes.
    assert!(watcher.has_all());
    let printed = String::from_utf8(watcher.stdout).expect("text");
    assert!(until(|| {
        let view = &commands(&mut client, "home.1")[0];
        view.state == ContainerState::Signalled { signal: 9 } && view.timed_out
    }));
    let view = &commands(&mut client, "home.1")[0];
    assert_eq!(view.inner_pid.map(|pid| format!("{pid}\n")), Some(printed));
    client.kill_all().expect("killed");
}

#[test]
fn many_commands_that_nobody_reads_are_bounded_and_make_room_once_they_have_ended() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = home(&shim);
    let resident =
        || conman_observer::resident_bytes(shim.process.id().cast_signed()).expect("it runs");
    let before = resident();
    let script = "head -c 262144 /dev/zero; echo done >&2; exec sleep 1000";
    for number in 0..MOST {
        let spec = command(&shim, &format!("{number:03}"), script);
        client.exec_kept(spec).expect("begun");
    }
    let error = client.exec_kept(command(&shim, "more", "true"));
    let error = error.expect_err("there is a bound");
    let is_full = matches!(error, ClientError::Refused(CallError::Full { .. }));
    assert!(is_full, "{error}");
    assert!(until(|| {
        let all = commands(&mut client, "home.1");
        all.len() == MOST && all.iter().all(|one| one.output_bytes == Some(262_149))
    }));
    let after = resident();
    assert!(after < before + MOST_GROWTH, "{before} and then {after}");
    // Another container's are not among them.
    client
        .launch(shim.spec("home.2", "exec sleep 1000"))
        .expect("launched");
    let mut other = command(&shim, "x", "echo well");
    (other.name, other.container) = ("home.2_x".to_owned(), "home.2".to_owned());
    client.exec_kept(other).expect("begun");
    let mut watcher = Watcher::attach(&mut client, "home.2_x");
    assert!(watcher.has_all());
    assert_eq!(watcher.stdout, b"well\n");
    // The oldest that has ended goes first.
    for name in ["home.1_007", "home.1_003"] {
        let name = name.to_owned();
        client.ask(Request::Kill { name }).expect("killed");
    }
    assert!(until(|| {
        let all = commands(&mut client, "home.1");
        all.iter().filter(|one| !one.state.is_alive()).count() == 2
    }));
    client
        .exec_kept(command(&shim, "more", "exec sleep 1000"))
        .expect("there is room");
    let all = commands(&mut client, "home.1");
    let has = |name: &str| all.iter().any(|one| one.name == name);
    assert!(!has("home.1_003") && has("home.1_007") && has("home.1_more"));
    client.kill_all().expect("killed");
}

#[test]
fn a_containers_commands_are_forgotten_with_it() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = home(&shim);
    subscribe(&mut client);
    client
        .exec_kept(command(&shim, "one", "exec sleep 1000"))
        .expect("begun");
    let mut watcher = Watcher::attach(&mut client, "home.1_one");
    let name = "home.1".to_owned();
    client
        .ask(Request::Kill { name: name.clone() })
        .expect("killed");
    assert!(watcher.has_all());
    assert!(until(|| {
        let names = vec![name.clone()];
        client.ask(Request::Acknowledge { names }).is_ok()
    }));
    assert!(until(|| client.list().expect("listed").is_empty()));
    assert_eq!(commands(&mut client, "home.1"), []);
    assert!(client.attach("home.1_one", None, None).is_err());
}

/// Memory of the probe. The kernel writes the numbers of a pair of sockets to its first page.
const MEMORY: u64 = 0x1000_0000;
const PAGE: u64 = 4_096;

/// Bytes that a pipe holds.
const PIPE: u64 = 16 * PAGE;

#[test]
fn a_command_that_holds_its_pipes_lock_delays_neither_others_nor_its_death() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    // A socket that has no data is spliced into standard output, whose lock is held meanwhile. Before that, the
    // pipe is filled, so that somebody reads it while the lock is held.
    let numbers = |numbers: &[u64]| numbers.iter().copied().map(Arg::Number).collect::<Vec<_>>();
    let memory = [MEMORY, PAGE + PIPE, 3, 0x32, u64::MAX];
    let probe = Probe::of(libc::SYS_mmap, &numbers(&memory))
        .call(libc::SYS_socketpair, &numbers(&[1, 1, 0, MEMORY]))
        .call(libc::SYS_write, &numbers(&[1, MEMORY + PAGE, PIPE]))
        .call(libc::SYS_splice, &numbers(&[3, 0, 1, 0, PAGE]));
    probe.write(&shim.path("store").join("holder").join("probe"), 0o755);
    shim.made_layer("holder");
    let mut client = shim.client();
    subscribe(&mut client);
    let mut spec = shim.spec("home.1", "exec sleep 1000");
    spec.root.layers.insert(0, "holder".into());
    client.launch(spec).expect("launched");

    let mut holder = command(&shim, "holder", "");
    holder.program.argv = vec!["/probe".to_owned()];
    let pid = client.exec_kept(holder).expect("begun").pid;
    let splices = format!("{} ", libc::SYS_splice);
    assert!(until(|| {
        let call = fs::read_to_string(format!("/proc/{pid}/syscall"));
        call.is_ok_and(|call| call.starts_with(&splices))
    }));
    let other = command(&shim, "other", "echo here; exit 4");
    client.exec_kept(other).expect("begun");
    let mut other = Watcher::attach(&mut client, "home.1_other");
    assert!(other.has_all());
    assert_eq!(other.stdout, b"here\n");

    client.kill_all().expect("killed");
    while next_end(&mut client).name != "home.1" {}
}
