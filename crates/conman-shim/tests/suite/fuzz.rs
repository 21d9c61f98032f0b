//! Clients that say anything at all: the shim answers, refuses or drops them, and goes on.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use conman_shim::{
    Ahead, Call, ExecSpec, Hardening, KeptCommandSpec, KeptStreamsSpec, LaunchSpec, Message,
    NetworkSpec, PAGE, ProgramSpec, Reply, Request, RootKind, RootSpec, TerminalSize, VERSION,
    encode, socket,
};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::support::{SOON, Shim, available, until};

/// Requests that are sent.
const REQUESTS: usize = 3_000;

/// What the shim may grow by, in KiB: its bounded buffers, not what it was sent.
const MOST_GROWTH_KB: u64 = 24 * 1_024;

fn name() -> impl Strategy<Value = String> {
    prop_oneof![
        Just("a.1".to_owned()),
        Just("stays.1".to_owned()),
        "[a-z.]{0,3}[0-9]{0,2}",
        "\\PC{0,200}",
        Just("../../etc".to_owned()),
    ]
}

fn size() -> impl Strategy<Value = TerminalSize> {
    (any::<u16>(), any::<u16>()).prop_map(|(rows, cols)| TerminalSize { rows, cols })
}

fn program() -> impl Strategy<Value = ProgramSpec> {
    let strings = proptest::collection::vec("\\PC{0,20}", 0..6);
    (strings, "\\PC{0,30}", any::<u32>(), any::<u32>()).prop_map(|(argv, workdir, uid, gid)| {
        ProgramSpec {
            argv,
            env: Vec::new(),
            workdir,
            uid,
            gid,
            groups: vec![uid; 3],
            nofile: Some(u64::from(gid)),
        }
    })
}

fn launch(shim: &Shim) -> impl Strategy<Value = Request> + use<> {
    let path = prop_oneof![
        "/?[a-z./]{0,20}".prop_map(PathBuf::from),
        Just(shim.path("scratch/a.1")),
        Just(shim.path("store")),
        Just(PathBuf::from("/proc/self/root")),
    ];
    let below = shim.cgroup.clone();
    let cgroup = prop_oneof![
        "/?[a-z./]{0,20}",
        name().prop_map(move |name| format!("{below}/{name}")),
    ];
    let paths = (path.clone(), path.clone(), path);
    let whole = (
        name(),
        cgroup,
        paths,
        program(),
        proptest::option::of(size()),
        any::<bool>(),
        prop_oneof![
            Just(Ahead::No),
            Just(Ahead::Make),
            name().prop_map(|name| Ahead::Take { name })
        ],
    );
    whole.prop_map(
        |(name, cgroup, (store, scratch, log), program, terminal, shared_ids, ahead)| {
            let spec = LaunchSpec {
                name,
                cgroup,
                limits: conman_linux::CgroupLimits::default(),
                root: RootSpec {
                    kind: RootKind::Overlay,
                    store,
                    layers: vec!["base".into()],
                    scratch,
                    read_only: false,
                    durable: false,
                    shared_ids,
                },
                hostname: "inside".to_owned(),
                program,
                log,
                log_bytes: None,
                log_stderr: None,
                ptys: 0,
                ptys_when_asked: false,
                sys: false,
                init: false,
                files: Vec::new(),
                binds: Vec::new(),
                terminal,
                network: NetworkSpec::Loopback,
                hardening: Hardening::default(),
                ahead: Ahead::No,
            };
            let kind = spec.kind();
            Request::Launch(Box::new(match ahead {
                Ahead::Make => LaunchSpec {
                    name: spec.name,
                    cgroup: spec.cgroup,
                    log: spec.log,
                    root: spec.root,
                    ..kind
                },
                ahead => LaunchSpec { ahead, ..spec },
            }))
        },
    )
}

fn request(shim: &Shim) -> impl Strategy<Value = Request> + use<> {
    let names = || proptest::collection::vec(name(), 0..5);
    let kept = (
        proptest::option::of(size()),
        any::<bool>(),
        any::<Option<u64>>(),
        "\\PC{0,20}",
    );
    let kept = kept.prop_map(|(size, stdin, timeout_ms, label)| KeptCommandSpec {
        streams: size.map_or(KeptStreamsSpec::Pipes { stdin }, KeptStreamsSpec::Terminal),
        timeout_ms,
        label,
    });
    let exec = (name(), name(), program(), proptest::option::of(kept));
    let exec = exec.prop_map(|(name, container, program, kept)| {
        let name = match kept {
            Some(_) if !name.is_empty() => format!("{container}_{name}"),
            _ => name,
        };
        Request::Exec(Box::new(ExecSpec {
            with_client: false,
            files: None,
            name,
            container,
            program,
            terminal: false,
            ptys: 0,
            kept,
            hardening: Hardening::default(),
        }))
    });
    let whole = prop_oneof![
        launch(shim),
        exec,
        proptest::option::of(name()).prop_map(|after| Request::List { after }),
        names().prop_map(|names| Request::Acknowledge { names }),
        Just(Request::Subscribe),
        Just(Request::Fence),
        any::<u64>().prop_map(|until_boottime_ns| Request::ExtendDeadline { until_boottime_ns }),
        (
            proptest::option::of(any::<u64>()),
            proptest::option::of(names())
        )
            .prop_map(|(until_boottime_ns, names)| Request::Unfence {
                until_boottime_ns,
                names
            }),
        "/?\\PC{0,20}".prop_map(|program| Request::Replace {
            program: Some(program.into())
        }),
        any::<u32>().prop_map(|version| Request::Hello { version }),
    ];
    let of_one = prop_oneof![
        name().prop_map(|name| Request::Find { name }),
        name().prop_map(|name| Request::Hold { name }),
        name().prop_map(|name| Request::Freeze { name }),
        name().prop_map(|name| Request::Thaw { name }),
        (name(), -70..70).prop_map(|(name, signal)| Request::Signal { name, signal }),
        (name(), "/?[a-z/.]{0,20}").prop_map(|(name, cgroup)| Request::Guard { name, cgroup }),
        (name(), any::<i32>()).prop_map(|(name, pid)| Request::Appeared { name, pid }),
        name().prop_map(|name| Request::NotStarted { name }),
        (name(), proptest::option::of(size()), any::<Option<u64>>()).prop_map(
            |(name, size, after)| Request::Attach {
                name,
                size,
                after,
                quiet: false,
            }
        ),
        (name(), proptest::option::of(name()))
            .prop_map(|(container, after)| Request::Commands { container, after }),
    ];
    prop_oneof![whole, of_one]
}

fn connect(shim: &Shim) -> OwnedFd {
    let mut connected = None;
    assert!(until(|| {
        connected = socket::connect(&shim.socket()).ok();
        connected.is_some()
    }));
    connected.expect("connected")
}

fn send(socket: &OwnedFd, bytes: &[u8], fds: usize) -> bool {
    let null = std::fs::File::open("/dev/null").expect("there is one");
    let fds = vec![null.as_fd(); fds];
    socket::send(socket, bytes, &fds).is_ok()
}

/// The answer to one call, of all that comes; `None` when the shim has closed.
fn answer(socket: &OwnedFd, id: u64, buffer: &mut Vec<u8>) -> Option<Reply> {
    loop {
        let mut fds = [PollFd::new(socket, PollFlags::IN)];
        let timeout = Timespec::try_from(SOON).ok();
        let ready = poll(&mut fds, timeout.as_ref()).expect("polled");
        assert!(ready > 0, "no answer to {id}");
        let incoming = socket::receive(socket, buffer).ok()??;
        match incoming
            .message
            .expect("the shim's own words are understood")
        {
            Message::Reply { id: of, reply } if of == id => return Some(reply),
            Message::Reply { .. } | Message::Ended { .. } | Message::Fence { .. } => {}
        }
    }
}

fn resident_kb(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it lives");
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let number = line.and_then(|line| line.split_ascii_whitespace().next());
    number.expect("a number").parse().expect("a number")
}

#[test]
fn whatever_is_asked_is_answered_and_costs_no_memory() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    let kept = client
        .launch(shim.spec("stays.1", "exec sleep 1000"))
        .expect("launched");
    let before = resident_kb(shim.process.id());
    let mut runner = TestRunner::deterministic();
    let requests = request(&shim);
    let mut socket = connect(&shim);
    let mut buffer = Vec::new();
    let hello = Request::Hello { version: VERSION };
    assert!(send(
        &socket,
        &encode(&Call {
            id: 0,
            request: hello.clone()
        })
        .expect("short"),
        0
    ));
    for id in 1..=REQUESTS as u64 {
        let request = requests.new_tree(&mut runner).expect("made").current();
        let text = format!("{request:?}");
        let bytes = encode(&Call { id, request }).expect("short");
        let fds = usize::try_from(id % 4).expect("small");
        let answered = send(&socket, &bytes, fds) && answer(&socket, id, &mut buffer).is_some();
        assert!(answered, "dropped for {text}");
        if id % 97 == 0 {
            socket = connect(&shim);
            let call = Call {
                id: 0,
                request: hello.clone(),
            };
            assert!(send(&socket, &encode(&call).expect("short"), 0));
        }
    }
    let after = resident_kb(shim.process.id());
    assert!(
        after < before + MOST_GROWTH_KB,
        "{before} KiB, then {after}"
    );
    // The fence may be closed by now, and what there is may be frozen.
    let all = Request::Unfence {
        until_boottime_ns: None,
        names: None,
    };
    client.ask(all).expect("opened");
    assert!(client.list().expect("listed").len() <= PAGE);
    let process = kept.process.expect("a hold");
    process.kill().expect("killed");
    assert!(process.wait_dead(SOON).expect("waited"));
    let mut last = shim.client();
    last.launch(shim.spec("last.1", "true")).expect("launched");
}

#[test]
fn whatever_bytes_come_only_their_sender_is_dropped() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    let mut runner = TestRunner::deterministic();
    let strategy = proptest::collection::vec(any::<u8>(), 0..3_000);
    for round in 0..300 {
        let bytes = strategy.new_tree(&mut runner).expect("made").current();
        let socket = connect(&shim);
        let _ = send(&socket, &bytes, round % 5);
    }
    assert_eq!(client.list().expect("listed"), []);
}
