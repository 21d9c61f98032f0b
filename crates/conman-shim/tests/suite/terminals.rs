//! Terminals that the shim keeps, and the programs in them.

use std::fs;
use std::num::NonZero;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use conman_shim::{
    ContainerState, ExecSpec, Hardening, KEPT_OUTPUT_BYTES, KeptCommandSpec, KeptStreamsSpec,
    Request, StreamEvent, StreamInput, TerminalSize,
};

use crate::support::{
    Attachment, Client, SOON, Shim, available, copy_program, next_end, subscribe, until, wait_dead,
};

const SIZE: TerminalSize = TerminalSize { rows: 24, cols: 80 };

/// Before what a program has passed over is tried again.
const AGAIN: Duration = Duration::from_secs(5);
/// A look at a terminal.
const LOOK: Duration = Duration::from_millis(50);

fn dimensions(size: TerminalSize) -> (NonZero<u16>, NonZero<u16>) {
    let some = |n| NonZero::new(n).expect("a size");
    (some(size.rows), some(size.cols))
}

fn parser(size: TerminalSize) -> vt100::Parser {
    let (rows, cols) = dimensions(size);
    vt100::Parser::new(rows, cols, 0)
}

/// What somebody sees who watches.
struct Screen {
    attachment: Attachment,
    parser: vt100::Parser,
    ended: bool,
    dropped: u64,
}

impl Screen {
    fn new(attachment: Attachment) -> Self {
        Self {
            attachment,
            parser: parser(SIZE),
            ended: false,
            dropped: 0,
        }
    }

    fn attach(client: &mut Client, name: &str) -> Self {
        Self::new(client.attach(name, Some(SIZE), None).expect("attached"))
    }

    /// Looks until the screen is as it should be.
    fn shows(&mut self, wanted: impl Fn(&str) -> bool) -> bool {
        self.shows_within(SOON, wanted)
    }

    fn shows_within(&mut self, patience: Duration, wanted: impl Fn(&str) -> bool) -> bool {
        let deadline = Instant::now() + patience;
        while Instant::now() < deadline {
            if wanted(&self.text()) {
                return true;
            }
            self.look();
        }
        false
    }

    fn look(&mut self) -> bool {
        match self.attachment.next(LOOK).expect("told") {
            Some(StreamEvent::Output(_, bytes)) => self.parser.process(&bytes),
            Some(StreamEvent::Screen(position, bytes)) => {
                self.parser = parser(SIZE);
                self.parser.process(&bytes);
                self.dropped += position.dropped;
            }
            Some(StreamEvent::Position(_)) => {}
            Some(StreamEvent::End) => self.ended = true,
            None => return false,
        }
        true
    }

    fn ends(&mut self) -> bool {
        until(|| {
            self.look();
            self.ended
        })
    }

    /// Until nothing more comes.
    fn settle(&mut self) -> String {
        while self.look() {}
        self.text()
    }

    fn text(&self) -> String {
        self.parser.screen().contents()
    }

    fn type_in(&self, bytes: &[u8]) {
        self.attachment.send_input(bytes).expect("typed");
    }
}

/// A program of the host's and its libraries in the image; `false` where it is missing.
#[expect(clippy::print_stderr, reason = "a skipped test says so there")]
fn install(shim: &Shim, program: &str) -> bool {
    let root = shim.path("store/base");
    let copy = |from: &Path| {
        let to = root.join(from.strip_prefix("/").expect("absolute"));
        fs::create_dir_all(to.parent().expect("a parent")).expect("made");
        fs::copy(from, &to).expect("copied");
    };
    let Ok(real) = fs::canonicalize(program) else {
        eprintln!("skipped: {program} is missing");
        return false;
    };
    let output = Command::new("ldd").arg(&real).output().expect("ldd");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    for word in text.split_ascii_whitespace().filter(|w| w.starts_with('/')) {
        copy(Path::new(word));
    }
    fs::create_dir_all(root.join("usr/bin")).expect("made");
    let name = Path::new(program).file_name().expect("a name");
    fs::copy(&real, root.join("bin").join(name)).expect("copied");
    for terminfo in ["/lib/terminfo/x/xterm", "/usr/share/terminfo/x/xterm"] {
        if Path::new(terminfo).exists() {
            copy(Path::new(terminfo));
        }
    }
    true
}

fn command(shim: &Shim, name: &str, script: &str) -> ExecSpec {
    let mut program = shim.spec("unused", script).program;
    program.env.push(("TERM".to_owned(), "xterm".to_owned()));
    ExecSpec {
        with_client: false,
        files: None,
        name: format!("home.1_{name}"),
        container: "home.1".to_owned(),
        program,
        terminal: false,
        ptys: 0,
        kept: Some(KeptCommandSpec {
            streams: KeptStreamsSpec::Terminal(SIZE),
            timeout_ms: None,
            label: String::new(),
        }),
        hardening: Hardening::default(),
    }
}

fn home(shim: &Shim) -> Client {
    let mut client = shim.client();
    client
        .launch(shim.spec("home.1", "exec sleep 1000"))
        .expect("launched");
    client
}

#[test]
fn an_editor_shows_the_same_screen_to_whoever_attaches_again() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let vim = ["vim.tiny", "vim"]
        .into_iter()
        .find(|name| Path::new("/usr/bin").join(name).exists())
        .unwrap_or("vim");
    if !install(&shim, &format!("/usr/bin/{vim}")) {
        return;
    }
    let mut client = home(&shim);
    // Without fsync(2), which takes minutes on a disk that others write to.
    let script = format!(
        "echo 'the first line' > /tmp/text; exec {vim} -u NONE -N -n -c 'set nofsync' /tmp/text"
    );
    client
        .exec_kept(command(&shim, "vim", &script))
        .expect("executed");
    let mut screen = Screen::attach(&mut client, "home.1_vim");
    assert!(
        screen.shows(|text| text.contains("the first line") && text.contains('~')),
        "{}",
        screen.text()
    );
    screen.type_in(b"oa second one, typed\x1bOand one between\x1b");
    // It leaves its mode a moment after the last key.
    assert!(
        screen.shows(|text| {
            text.contains("typed") && text.contains("between") && !text.contains("INSERT")
        }),
        "{}",
        screen.text()
    );
    let before = screen.settle();
    // Both the watcher's and the client's connections are cut, in the middle of it.
    drop(screen);
    drop(client);
    let mut client = shim.client();
    let mut again = Screen::attach(&mut client, "home.1_vim");
    assert!(again.shows(|text| text == before), "{}", again.text());
    // Another program of the shim's, and the editor goes on.
    let newer = shim.path("newer");
    copy_program(Path::new(env!("CARGO_BIN_EXE_conman-shim")), &newer);
    let program = Some(newer);
    client.ask(Request::Replace { program }).expect("replaced");
    let mut third = Screen::attach(&mut client, "home.1_vim");
    assert!(third.shows(|text| text == before), "{}", third.text());
    assert!(again.shows(|text| text == before), "{}", again.text());
    again.type_in(b":wq\r");
    assert!(third.ends(), "{}", third.text());
    let written = shim.path("scratch/home.1/upper/tmp/text");
    let text = fs::read_to_string(written).expect("written");
    assert_eq!(
        text,
        "the first line\nand one between\na second one, typed\n"
    );
    client.kill_all().expect("killed");
}

#[test]
fn a_pager_redraws_for_another_size() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    if !install(&shim, "/usr/bin/less") {
        return;
    }
    let mut client = home(&shim);
    let script = "i=0; while [ $i -lt 200 ]; do echo line $i; i=$((i+1)); done > /tmp/l; \
                  exec less /tmp/l";
    client
        .exec_kept(command(&shim, "less", script))
        .expect("executed");
    let mut screen = Screen::attach(&mut client, "home.1_less");
    assert!(
        screen.shows(|text| text.contains("line 22")),
        "{}",
        screen.text()
    );
    assert!(!screen.text().contains("line 30"));
    screen.type_in(b" ");
    assert!(
        screen.shows(|text| text.contains("line 45")),
        "{}",
        screen.text()
    );
    // `less` passes over a size that changes just before it begins to read, so that it is told of
    // another one then.
    let redraws = (40..60).any(|rows| {
        let size = TerminalSize { rows, cols: 80 };
        let (rows, cols) = dimensions(size);
        screen.parser.screen_mut().set_size(rows, cols);
        let resize = StreamInput::Resize(size);
        screen.attachment.send(&resize).expect("sent");
        screen.shows_within(AGAIN, |text| text.contains("line 61"))
    });
    assert!(redraws, "{}", screen.text());
    screen.type_in(b"q");
    client.kill_all().expect("killed");
}

#[test]
fn a_container_of_its_own_terminal_lives_on_without_anybody() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    subscribe(&mut client);
    let mut spec = shim.spec(
        "shell.1",
        "[ -t 0 ] && [ -t 2 ] && echo on a terminal > /dev/tty; \
         while read line; do echo \"read <$line>\"; [ \"$line\" = end ] && exit 6; done",
    );
    spec.terminal = Some(SIZE);
    let launched = client.launch(spec).expect("launched");
    let mut first = Screen::attach(&mut client, "shell.1");
    assert!(
        first.shows(|text| text.contains("on a terminal")),
        "{}",
        first.text()
    );
    first.type_in(b"one\r");
    assert!(
        first.shows(|text| text.contains("read <one>")),
        "{}",
        first.text()
    );
    drop(first);
    let mut second = Screen::attach(&mut client, "shell.1");
    assert!(second.shows(|text| text.contains("read <one>")));
    second.type_in(b"end\r");
    wait_dead(&launched);
    let view = next_end(&mut client);
    assert_eq!(view.state, ContainerState::Exited { code: 6 });
    assert!(second.ends());
    // What it last said can be read until its end is acknowledged.
    let mut third = Screen::attach(&mut client, "shell.1");
    assert!(third.shows(|text| text.contains("read <end>")));
    let names = vec!["shell.1".to_owned()];
    client
        .ask(Request::Acknowledge { names })
        .expect("acknowledged");
    assert!(client.attach("shell.1", None, None).is_err());
}

#[test]
fn who_does_not_read_is_skipped_and_holds_up_nobody() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = home(&shim);
    let script = "read go; i=0; while [ $i -lt 40000 ]; do echo number $i of many; \
                  i=$((i+1)); done; echo done; exec sleep 1000";
    client
        .exec_kept(command(&shim, "flood", script))
        .expect("executed");
    let mut slow = Screen::attach(&mut client, "home.1_flood");
    let mut quick = Screen::attach(&mut client, "home.1_flood");
    quick.type_in(b"go\r");
    assert!(
        quick.shows(|text| text.contains("done")),
        "{}",
        quick.text()
    );
    // The shim answers others all the while.
    assert_eq!(client.list().expect("listed").len(), 2);
    assert!(slow.shows(|text| text.contains("done")), "{}", slow.text());
    assert!(slow.dropped > KEPT_OUTPUT_BYTES as u64, "{}", slow.dropped);
    assert_eq!(slow.settle(), quick.settle());
    client.kill_all().expect("killed");
}

#[test]
fn what_nobody_reads_does_not_fill_the_shim() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = home(&shim);
    client
        .exec_kept(command(&shim, "deaf", "exec sleep 1000"))
        .expect("executed");
    let attachment = client.attach("home.1_deaf", None, None).expect("attached");
    rustix::io::ioctl_fionbio(&attachment, true).expect("not blocking");
    let typed = vec![b'x'; conman_shim::MAX_INPUT_BYTES];
    let mut sent = 0_usize;
    // The socket fills, since the shim stops reading.
    while attachment.send_input(&typed).is_ok() {
        sent += typed.len();
        assert!(sent < 64 << 20, "it takes everything");
    }
    assert_eq!(client.list().expect("listed").len(), 2);
    client.kill_all().expect("killed");
}

#[test]
fn what_is_no_message_of_a_watchers_ends_its_connection_alone() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = home(&shim);
    client
        .exec_kept(command(&shim, "cat", "exec cat"))
        .expect("executed");
    for bytes in [
        &b"?"[..],
        b"s1",
        b"i",
        b"ee",
        b"s\x00\x00\x00\x00",
        &[b'i'; 9_000],
    ] {
        let attachment = client
            .attach("home.1_cat", Some(SIZE), None)
            .expect("attached");
        let _ = rustix::net::send(&attachment, bytes, rustix::net::SendFlags::NOSIGNAL);
    }
    let mut screen = Screen::attach(&mut client, "home.1_cat");
    screen.type_in(b"still here\r");
    assert!(screen.shows(|text| text.matches("still here").count() == 2));
    client.kill_all().expect("killed");
}
