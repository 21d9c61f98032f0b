//! A worker as users have it: installed from a medium, run by systemd on cgroup v2 alone, switched
//! off by its cloud; on the distribution's kernel and on the oldest that is served.

mod clock;
mod floor;
mod namespaces;
mod quotas;
mod restarts;
mod upgrade;

use std::time::{Duration, SystemTime};

use conman_e2e::{NATIVE_TEMPLATES, ROOT, native};
use conman_vm::{
    INSTALL, Kernel, MOUNT, Machine, Programs, in_full_length, installation, say, worker,
};
use serde_json::Value;

/// The machine may share its processors with the tests of a whole workspace being built.
const PATIENCE: Duration = Duration::from_secs(900);
const SECONDS_A_DAY: u64 = 86_400;
const SESSIONS: [&str; 3] = ["ann", "ben", "cat"];
const MEMORY_BYTES: u64 = 64 << 20;

/// Tests of what a container sees and may do: at full length on the distribution's kernel.
const INSIDE: [&str; 2] = ["conman-shim/confinement", "conman-shim/hardening"];

/// All tests of packages that depend on the kernel: at full length on the oldest one.
const ALL: [&str; 12] = [
    "conman-linux/cgroup",
    "conman-linux/launching",
    "conman-shim/commands",
    "conman-shim/confinement",
    "conman-shim/containers",
    "conman-shim/ending",
    "conman-shim/fence",
    "conman-shim/foreign",
    "conman-shim/hardening",
    "conman-shim/layouts",
    "conman-shim/opening",
    "conman-shim/standing_still",
];

/// Connects to every session, checks its page, and returns the sessions as the machine shows them then. One
/// command, since each takes an emulated machine a second.
fn reached_sessions(machine: &Machine) -> Vec<Value> {
    let urls = SESSIONS.map(|id| format!("http://127.0.0.1:7701/s/{id}/"));
    let urls = urls.join(" ");
    let shown = format!("curl -sS --fail-early -f {urls} && conman ps --json");
    let shown = machine.run(&shown).ok();
    let list = shown.strip_prefix(&"hello\n".repeat(SESSIONS.len()));
    let list = list.unwrap_or_else(|| panic!("not the pages: {shown}"));
    let list: Value = serde_json::from_str(list).expect("JSON");
    let list = list["sessions"].as_array().expect("a list");
    let shown = |id| list.iter().find(|one| one["id"] == id);
    SESSIONS
        .map(|id| shown(id).expect("it is listed").clone())
        .to_vec()
}

/// Each is reached, and is the very process that it was.
fn assert_the_same(machine: &Machine, before: &[Value]) {
    for (session, now) in before.iter().zip(reached_sessions(machine)) {
        for field in ["pid", "generation", "started_at"] {
            assert_eq!(session[field], now[field], "{field} of {now}");
        }
        assert_eq!(now["state"], "running", "{now}");
    }
}

fn generation(session: &Value) -> u64 {
    session["generation"].as_u64().expect("a generation")
}

/// The first two numbers of a release.
fn version(release: &str) -> (u32, u32) {
    let mut numbers = release.split('.').map_while(|part| part.parse().ok());
    let major = numbers.next().expect("a release begins with a number");
    (major, numbers.next().unwrap_or(0))
}

/// `conman doctor` tells what the machine's kernel is too old for, and what follows.
fn assert_what_the_kernel_lacks_is_told(machine: &Machine, kernel: Kernel) {
    let asked = "conman doctor --runtime native --target 1";
    let told = machine.run(&format!("{asked} --json")).ok();
    let told: Value = serde_json::from_str(&told).expect("JSON");
    let told = &told["kernel"];
    let release = told["release"].as_str().expect("a release");
    if kernel == Kernel::Floor {
        assert_eq!(version(release), (5, 10), "{told}");
    }
    assert_eq!(told["missing"], Value::Array(Vec::new()), "{told}");
    let text = machine.run(asked).ok();
    for interface in told["optional"].as_array().expect("a list") {
        let since = version(interface["since"].as_str().expect("a release"));
        let present = version(release) >= since;
        assert_eq!(interface["present"], present, "{interface} on {release}");
        let without = interface["without"].as_str().expect("what follows");
        assert_ne!(text.contains(without), present, "{text}");
    }
}

/// Its template's limits are the kernel's, and inside it is the owner of everything.
fn assert_confined(machine: &Machine, session: &Value) {
    let pid = &session["pid"];
    let limits = format!(
        "cd /sys/fs/cgroup$(sed s/0::// /proc/{pid}/cgroup) && cat memory.max cpu.max pids.max"
    );
    let limits = machine.run(&limits).ok();
    // One process more, for the init.
    assert_eq!(limits, format!("{MEMORY_BYTES}\n50000 100000\n17\n"));
    let owners = "conman exec ann -- sh -c 'touch /x && stat -c %u /x /bin/busybox'";
    assert_eq!(machine.run(owners).ok(), "0\n0\n");
}

/// Whichever of the two ends, by order or not, nothing of it is noticed.
fn assert_outlives_daemon_and_shim(machine: &Machine, started: &[Value]) {
    let daemon = "systemctl show -p MainPID --value conman";
    let first = machine.run(daemon).ok();
    let _ = machine.run("systemctl restart conman").ok();
    machine.until_ok("conman ps", PATIENCE);
    assert_ne!(first, machine.run(daemon).ok());
    assert_the_same(machine, started);

    for unit in ["conman", "conman-shim"] {
        let _ = machine
            .run(&format!(
                "kill -KILL $(systemctl show -p MainPID --value {unit})"
            ))
            .ok();
        machine.until_ok(
            &format!("systemctl is-active {unit} && conman ps"),
            PATIENCE,
        );
        assert_the_same(machine, started);
    }
    let after = machine.run("conman exec ann -- cat /www/index.html").ok();
    assert_eq!(after, "hello\n", "the shim that took over runs commands");
}

/// From its installation to the end of its power.
fn a_worker_serves(kernel: Kernel, programs: &[&'static str]) {
    let (Some(disk), Some(native)) = (worker(), native()) else {
        return;
    };
    let Some(files) = kernel.files(&disk) else {
        return;
    };
    let templates = NATIVE_TEMPLATES.replace(
        "[templates.web]",
        &format!("[templates.web]\nmemory_bytes = {MEMORY_BYTES}\ncpus = 0.5\npids = 16"),
    );
    let mut medium = installation(&native, &templates);
    let programs = in_full_length().then(|| Programs::built(&disk, programs));
    let programs = programs.flatten();
    if let Some(programs) = &programs {
        medium = programs.on(medium);
    }
    let machine = Machine::boot(&disk, files, medium);
    let hierarchy = machine.run("stat -f -c %T /sys/fs/cgroup").ok();
    assert_eq!(hierarchy, "cgroup2fs\n");
    let _ = machine.run(MOUNT).ok();
    if let Some(programs) = &programs {
        programs.pass(&machine);
    }

    let _ = machine.run(INSTALL).ok();
    machine.until_ok("conman ps", PATIENCE);
    assert_what_the_kernel_lacks_is_told(&machine, kernel);
    let _ = machine
        .run(&format!("conman image import /media/root.tar {ROOT}"))
        .ok();

    let run = SESSIONS.map(|id| format!("conman run {id} --template web"));
    let _ = machine.run(&run.join(" && ")).ok();
    let started = reached_sessions(&machine);
    assert_the_same(&machine, &started);
    assert_confined(&machine, &started[0]);

    // Once is enough for what the kernel has no part in: half of it on each.
    match kernel {
        _ if !in_full_length() => {}
        Kernel::Distribution => clock::assert_no_setting_of_it_matters(&machine, &started),
        Kernel::Floor => upgrade::assert_a_reload_replaces_the_shim(&machine, &started),
    }
    assert_outlives_daemon_and_shim(&machine, &started);
    if kernel == Kernel::Floor && in_full_length() {
        restarts::assert_never_stays_down(&machine, &started);
    }

    let _ = machine.run("conman rm ben").ok();
    let _ = machine
        .run(&format!("! [ -e /proc/{} ]", started[1]["pid"]))
        .ok();
    // By a connection, which its template starts it for.
    let again = reached_sessions(&machine);
    assert!(generation(&again[1]) > generation(&started[1]), "{again:?}");

    if kernel == Kernel::Distribution && in_full_length() {
        floor::assert_what_the_readme_says_gets_past_it(&machine, &again);
        namespaces::row_27_a_start_is_refused_by_the_limits_name(&machine);
        quotas::assert_the_file_system_enforces_them(&machine);
    }
    let console = machine.power_off();
    let killed = format!("{} of {} sessions killed", SESSIONS.len(), SESSIONS.len());
    assert!(console.contains(&killed), "{console}");
    assert!(console.contains("Power down"), "{console}");
}

/// At full length: both; otherwise the distribution's on even days, and the oldest on odd ones.
fn is_of_the_day(kernel: Kernel) -> bool {
    let since = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    let is_even = (since.as_secs() / SECONDS_A_DAY).is_multiple_of(2);
    if in_full_length() || is_even == (kernel == Kernel::Distribution) {
        return true;
    }
    say("skipped: a worker with the other kernel; `cargo xtask acceptance machines` boots both");
    false
}

#[test]
fn a_worker_keeps_its_sessions_until_its_power_goes() {
    if is_of_the_day(Kernel::Distribution) {
        a_worker_serves(Kernel::Distribution, &INSIDE);
    }
}

#[test]
fn a_worker_does_so_on_the_oldest_kernel_that_is_served() {
    if is_of_the_day(Kernel::Floor) {
        a_worker_serves(Kernel::Floor, &ALL);
    }
}
