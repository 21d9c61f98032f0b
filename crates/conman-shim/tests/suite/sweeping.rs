//! What starts leave that failed or were interrupted is removed, whoever comes to do it, and nothing
//! else is.

use std::fs::{File, read_to_string};
use std::io::Write;

use conman_linux::{CgroupLayout, CgroupPart, Freezer};
use conman_shim::{CallError, ClientError, ContainerState, LaunchError, Reply, Request};

use crate::support::{Client, Shim, available, next_end, subscribe, until, wait_dead};

/// The freezer of version 1, where what is frozen does not die of a signal; says on standard error
/// that this host has none.
#[expect(clippy::print_stderr, reason = "a skipped test says so there")]
fn holding_freezer() -> Option<Freezer> {
    let layout = CgroupLayout::detect().expect("detected");
    let freezer = Freezer::of(&layout.part(CgroupPart::V1)).ok();
    if freezer.is_none() {
        eprintln!("skipped: without cgroups of version 1 what is frozen can be killed");
    }
    freezer
}

/// What is frozen as long as this lives.
struct Frozen(Freezer, String);

impl Frozen {
    fn new(freezer: Freezer, cgroup: &str) -> Self {
        freezer.freeze(cgroup).expect("frozen");
        Self(freezer, cgroup.to_owned())
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        let Self(freezer, cgroup) = self;
        let thawed = freezer.thaw(cgroup);
        if !std::thread::panicking() {
            thawed.expect("thawed");
        }
    }
}

fn is_starting(client: &mut Client, name: &str) -> bool {
    let name = name.to_owned();
    match client.ask(Request::Find { name }).expect("answered") {
        Reply::Found { starting, .. } => starting,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_outlives_its_failed_start_keeps_its_name_and_its_death_is_told_by_a_later_shim() {
    if !available() {
        return;
    }
    let Some(freezer) = holding_freezer() else {
        return;
    };
    let mut shim = Shim::start_with(&["--cgroups", "v1"]);
    let mut client = shim.client();
    let well = client
        .launch(shim.spec("well.1", "exec sleep 1000"))
        .expect("launched");
    let frozen = Frozen::new(freezer, &shim.cgroup);
    // It freezes in the middle of what it does, and neither goes on nor dies.
    let error = client.launch(shim.spec("held.1", "exec sleep 1000"));
    assert!(
        matches!(
            error,
            Err(ClientError::Refused(CallError::Launch {
                error: LaunchError::TimedOut { .. }
            }))
        ),
        "{error:?}"
    );
    assert!(is_starting(&mut client, "held.1"));
    let again = client.launch(shim.spec("held.1", "true"));
    assert!(
        matches!(again, Err(ClientError::Refused(CallError::Exists { .. }))),
        "{again:?}"
    );
    let killed = client.ask(Request::Kill {
        name: "held.1".to_owned(),
    });
    assert_eq!(killed.expect("ordered"), Reply::Done);
    shim.succeed();
    let mut client = shim.client();
    assert!(is_starting(&mut client, "held.1"));
    subscribe(&mut client);
    drop(frozen);
    let end = next_end(&mut client);
    assert_eq!(
        (end.name.as_str(), end.state),
        ("held.1", ContainerState::Lost)
    );
    assert!(!is_starting(&mut client, "held.1"));
    assert!(until(|| !shim.path("scratch/held.1").exists()));
    assert!(
        !well
            .process
            .as_ref()
            .expect("a hold")
            .is_dead()
            .expect("asked")
    );
    client
        .launch(shim.spec("held.1", "true"))
        .expect("its name is free");
    client.kill_all().expect("killed");
    wait_dead(&well);
}

#[test]
fn what_was_swept_without_a_note_of_it_is_not_swept_again_where_a_container_runs_by_now() {
    if !available() {
        return;
    }
    let mut shim = Shim::start();
    let mut client = shim.client();
    let spec = shim.spec("runs.1", "exec sleep 1000");
    let (cgroup, scratch) = (spec.cgroup.clone(), spec.root.scratch.clone());
    let runs = client.launch(spec).expect("launched");
    shim.process.kill().expect("killed");
    shim.process.wait().expect("reaped");
    let left = |ticket: u32, cgroup: &str, scratch: &str| {
        format!(
            "{{\"sweep\":{{\"ticket\":{ticket},\"cgroup\":\"{cgroup}\",\"scratch\":\"{scratch}\",\
             \"killed\":false}}}}\n"
        )
    };
    let other = shim.path("scratch/left.1");
    std::fs::create_dir(&other).expect("made");
    let path = shim.path("shim.state");
    let file = File::options().append(true).open(&path);
    let lines = [
        left(98, &cgroup, &scratch.to_string_lossy()),
        left(
            99,
            &format!("{}/left.1", shim.cgroup),
            &other.to_string_lossy(),
        ),
    ];
    file.expect("opened")
        .write_all(lines.concat().as_bytes())
        .expect("written");
    shim.succeed();
    let mut client = shim.client();
    // They are swept in turns, a little of each.
    assert!(until(|| !other.exists()), "what is left is swept");
    let last = client
        .launch(shim.spec("last.1", "exec sleep 1000"))
        .expect("launched");
    assert!(
        !runs
            .process
            .as_ref()
            .expect("a hold")
            .is_dead()
            .expect("asked")
    );
    assert!(scratch.exists());
    let state = read_to_string(&path).expect("readable");
    assert!(!state.contains("\"ticket\":98"), "{state}");
    client.kill_all().expect("killed");
    wait_dead(&runs);
    wait_dead(&last);
}
