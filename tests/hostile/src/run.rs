//! Runs the selected probes: those inside one session together, those with sessions of their own
//! some at a time, and those that load the machine one after the other.

use std::collections::BTreeMap;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use conman_doctor::ON_DOCKER;
use conman_e2e::{Docker, Native, lacks};
use conman_linux::{Capabilities, has_capability};
use futures_util::StreamExt as _;
use futures_util::stream;
use serde_json::json;
use tokio::time::{Instant, timeout};

use crate::bystander::Bystander;
use crate::image;
use crate::pools::{self, Cause};
use crate::probes::{How, Probe};
use crate::world::{ATTACKS, Verdict, World};

/// Probes with sessions of their own at a time.
const AT_A_TIME: usize = 3;

/// Bound on a single probe.
const PATIENCE: Duration = Duration::from_secs(90);

/// The same for a long one.
const LONG_PATIENCE: Duration = Duration::from_secs(600);

/// How counters of the host are judged.
#[derive(Debug)]
struct Pools {
    noise: Vec<u64>,
    /// After each probe, which then runs alone, and not only after all.
    each: bool,
}

/// What a probe came to, and how long it took; an error where the probe itself failed.
type Outcome = (Result<Verdict, String>, Duration);

/// Runs them and prints what they came to: whether none has succeeded and the bystander is well.
pub(crate) async fn all(native: &Native, selected: &[&'static Probe], strict: bool) -> bool {
    if let Some(what) = image::missing() {
        lacks(&what);
        return true;
    }
    let begun = Instant::now();
    let world = Arc::new(World::start(native).await);
    let running = world.running.clone();
    // As many as probes run at a time, with a probe's limits.
    let computing = vec![world.spec(&["cpu_share", "8", "3600"]); AT_A_TIME];
    let (api, sessions) = (world.api(), world.conman.sessions());
    let quiet = Bystander::start(api, sessions, running, &computing, strict);
    let (noise, bystander) = pools::noise_during(quiet).await;
    let pools = Pools {
        noise,
        each: strict,
    };
    let before = pools::sample();
    let mut outcomes: BTreeMap<&'static str, Outcome> = BTreeMap::new();
    let (terminal, inside): (Vec<&Probe>, Vec<&Probe>) = selected
        .iter()
        .copied()
        .filter(|probe| matches!(probe.how, How::Inside))
        .partition(|probe| probe.area == "terminals");
    outcomes.extend(together(&world, &inside).await);
    outcomes.extend(with_a_terminal(&world, &terminal).await);
    let several = selected.iter().filter_map(|probe| match probe.how {
        How::Outside(run) => Some(outside(&world, &pools, probe, run)),
        How::Inside | How::Alone(_) => None,
    });
    let at_a_time = if strict { 1 } else { AT_A_TIME };
    let several = stream::iter(several).buffer_unordered(at_a_time);
    outcomes.extend(several.collect::<Vec<_>>().await);
    for probe in selected {
        if let How::Alone(run) = probe.how {
            outcomes.extend([outside(&world, &pools, probe, run).await]);
        }
    }
    let (mut wrong, summary) = bystander.finish(strict).await;
    let (slow, releases) = world.releases.judge(conman_e2e::slowness());
    wrong.extend(slow);
    let left = pools::left(&before, &pools.noise, Cause::DeadSessions)
        .await
        .into_iter();
    wrong.extend(left.map(|what| format!("the whole battery left {what}")));
    let well = report(selected, &outcomes, &wrong);
    println!("bystander: {summary}");
    println!("{releases}");
    println!("{} counters of the host read", pools::available());
    println!(
        "{} probes in {} s",
        selected.len(),
        begun.elapsed().as_secs()
    );
    well
}

/// Probes that look for what gVisor does not have.
const NOT_ON_GVISOR: [&str; 3] = ["host_paths", "join_namespaces", "network_administration"];

/// Probes that succeed in a session with gVisor as its kernel, and why that is harmless.
const ON_GVISOR: &[(&str, &str)] = &[
    (
        "asynchronous_io",
        "gVisor's kernel does that, for the session alone",
    ),
    (
        "capabilities",
        "it is a capability over gVisor's own resources",
    ),
    (
        "core_handlers",
        "a crash in gVisor runs no program of the host",
    ),
    (
        "cve_2022_0185",
        "gVisor's kernel does that, for the session alone",
    ),
    (
        "cve_2022_0492",
        "gVisor's kernel does that, for the session alone",
    ),
    (
        "file_handles",
        "gVisor's kernel does that, for the session alone",
    ),
    ("huge_pages", "the memory is that of any other mapping"),
    (
        "identity_map",
        "it sees gVisor's map; on the host its users are others",
    ),
    ("kernel_log", "it is gVisor's log"),
    ("kernel_settings", "they are gVisor's settings"),
    ("kernel_triggers", "nothing happens in gVisor"),
    ("keys", "gVisor's kernel does that, for the session alone"),
    ("leaving_a_chroot", "the root is that of the sandbox"),
    ("locked_memory", "nothing is locked on the host"),
    ("masked_files", "it is gVisor's command line"),
    ("memory_policies", "nothing is set on the host"),
    (
        "new_namespaces",
        "gVisor's kernel does that, for the session alone",
    ),
    (
        "new_user_namespace",
        "gVisor's kernel does that, for the session alone",
    ),
    (
        "out_of_memory_score",
        "the host's score is that of the sandbox",
    ),
    ("own_filters", "no filter reaches the host's kernel"),
    ("perf_events", "gVisor has none"),
    (
        "personalities",
        "gVisor's kernel does that, for the session alone",
    ),
    ("priorities", "the host's priority is that of the sandbox"),
    ("shared_devices", "they are gVisor's devices"),
    ("socket_filters", "no filter reaches the host's kernel"),
];

/// The probes that need nothing but a session, on Docker's: whether exactly those succeed that are
/// known to.
pub(crate) async fn on_docker(docker: &Docker, selected: &[&'static Probe]) -> bool {
    let world = World::start_on_docker(docker).await;
    let as_listed = with_nothing_but_a_session(world, selected, ON_DOCKER).await;
    let _ = Command::new("docker").args(["rmi", ATTACKS]).output();
    as_listed
}

/// Likewise, on sessions with gVisor as their kernel.
pub(crate) async fn on_gvisor(native: &Native, selected: &[&'static Probe]) -> bool {
    let world = World::start_on_gvisor(native).await;
    let mut able = selected.to_vec();
    able.retain(|probe| !NOT_ON_GVISOR.contains(&probe.name));
    with_nothing_but_a_session(world, &able, ON_GVISOR).await
}

async fn with_nothing_but_a_session(
    world: World,
    selected: &[&'static Probe],
    known: &[(&str, &str)],
) -> bool {
    let (terminal, inside): (Vec<&Probe>, Vec<&Probe>) = selected
        .iter()
        .copied()
        .filter(|probe| matches!(probe.how, How::Inside))
        .partition(|probe| probe.area == "terminals");
    let mut outcomes = together(&world, &inside).await;
    outcomes.extend(with_a_terminal(&world, &terminal).await);
    drop(world);
    let outcomes: BTreeMap<&'static str, Outcome> = outcomes.into_iter().collect();
    report(selected, &outcomes, &[]);
    let mut as_listed = true;
    for (name, (verdict, _)) in &outcomes {
        let listed = known.iter().any(|(known, _)| known == name);
        let reached = match verdict {
            Ok(verdict) => matches!(verdict, Verdict::Reached(_)),
            Err(_) => !listed,
        };
        if reached != listed {
            println!("{name}: listed as reached: {listed}, reached: {reached}");
            as_listed = false;
        }
    }
    as_listed
}

/// The attacks that need nothing but a session, in one, while another one has left its traces.
async fn together(world: &World, probes: &[&Probe]) -> Vec<(&'static str, Outcome)> {
    if probes.is_empty() {
        return Vec::new();
    }
    let other = world.id("traces");
    let mut spec = world.spec(&["hold_traces"]);
    spec["env"] = json!({"LEAK": "of another session"});
    world.start_until(&other, &spec, "holding").await;
    world
        .exec(&other, &["python3", "/inside.py", "try", "leave_traces"])
        .await;
    let ports = [world.conman.api_address(), world.conman.sessions_address()];
    let socket = format!("conman-e2e-port-{}", ports[0].port());
    let ports = ports.map(|address| address.port().to_string()).join(",");
    let mut spec = world.spec(&["sleep_long"]);
    spec["env"] = json!({
        "HOSTILE_STATE_DIR": world.conman.state_dir(),
        "HOSTILE_PORTS": ports,
        "HOSTILE_SOCKET": socket,
    });
    if has_capability(Capabilities::SYS_RESOURCE) {
        spec["env"]["HOSTILE_SCORE_BOUNDED"] = json!("1");
    }
    let id = world.id("inside");
    world.api().ensure(&id, &spec).await;
    let mut outcomes = Vec::new();
    for some in probes.chunks(16) {
        let _running = world
            .running
            .enter(some.iter().map(|probe| probe.name).collect());
        let begun = Instant::now();
        let request = json!({"command": command(some), "timeout_ms": 60_000});
        let text = match timeout(PATIENCE, world.exec_answer(&id, &request)).await {
            Ok(answer) => answer.json()["stdout"]
                .as_str()
                .unwrap_or_default()
                .to_owned(),
            Err(_) => String::new(),
        };
        outcomes.extend(verdicts(some, &text, begun.elapsed()));
    }
    world.stop(&id).await;
    world.stop(&other).await;
    outcomes
}

/// The same for those that want a terminal, as the program of a session that has one.
async fn with_a_terminal(world: &World, probes: &[&Probe]) -> Vec<(&'static str, Outcome)> {
    if probes.is_empty() {
        return Vec::new();
    }
    let _running = world
        .running
        .enter(probes.iter().map(|probe| probe.name).collect());
    let begun = Instant::now();
    let id = world.id("terminal");
    let mut spec = world.spec(&[]);
    spec["command"] = json!(command(probes));
    spec["tty"] = json!(true);
    let text = world.start_until(&id, &spec, "tried all").await;
    world.stop(&id).await;
    verdicts(probes, &text, begun.elapsed())
}

fn command<'a>(probes: &[&'a Probe]) -> Vec<&'a str> {
    let names = probes.iter().map(|probe| probe.name);
    ["python3", "/inside.py", "try"]
        .into_iter()
        .chain(names)
        .collect()
}

fn verdicts(probes: &[&Probe], text: &str, took: Duration) -> Vec<(&'static str, Outcome)> {
    let took = took / u32::try_from(probes.len()).unwrap_or(1);
    let verdict = |name: &str| {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(&format!("{name} ")));
        let line = line.unwrap_or("broken: it reported nothing").trim();
        match line.split_once(": ") {
            Some(("held", why)) => Ok(Verdict::Held(why.to_owned())),
            Some(("reached", what)) => Ok(Verdict::Reached(what.to_owned())),
            _ => Err(line.to_owned()),
        }
    };
    probes
        .iter()
        .map(|probe| (probe.name, (verdict(probe.name), took)))
        .collect()
}

async fn outside(
    world: &Arc<World>,
    pools: &Pools,
    probe: &Probe,
    run: crate::probes::Run,
) -> (&'static str, Outcome) {
    let name = probe.name;
    let _running = world.running.enter(vec![name]);
    let before = pools.each.then(pools::sample);
    let begun = Instant::now();
    let world = Arc::clone(world);
    let patience = if probe.long { LONG_PATIENCE } else { PATIENCE };
    // A task, so that a panic of one probe is not the end of all.
    let task = tokio::task::spawn_local(async move { timeout(patience, run(&world)).await });
    let mut verdict = match task.await {
        Ok(Ok(verdict)) => Ok(verdict),
        Ok(Err(_)) => Err("it took too long".to_owned()),
        Err(error) => Err(error.to_string()),
    };
    let took = begun.elapsed();
    if let (Some(before), Ok(Verdict::Held(_))) = (before, &verdict) {
        let left = pools::left(&before, &pools.noise, Cause::DeadSession).await;
        if !left.is_empty() {
            verdict = Ok(Verdict::Reached(format!("it left {}", left.join("; "))));
        }
    }
    (name, (verdict, took))
}

fn report(
    selected: &[&'static Probe],
    outcomes: &BTreeMap<&'static str, Outcome>,
    wrong: &[String],
) -> bool {
    let (mut reached, mut broken) = (Vec::new(), Vec::new());
    for probe in selected {
        let Some((verdict, took)) = outcomes.get(probe.name) else {
            continue;
        };
        let (word, text) = match verdict {
            Ok(Verdict::Held(why)) => ("held", why.as_str()),
            Ok(Verdict::Reached(what)) => ("REACHED", what.as_str()),
            Ok(Verdict::Skipped(why)) => ("skipped:", *why),
            Err(why) => ("BROKEN", why.as_str()),
        };
        let text: String = text.replace('\n', " ").chars().take(200).collect();
        println!(
            "{:<10} {:<30} {word:<8} {:>6.2} s  {text}",
            probe.area,
            probe.name,
            took.as_secs_f64()
        );
        match word {
            "REACHED" => reached.push(probe.name),
            "BROKEN" => broken.push(probe.name),
            _ => {}
        }
    }
    println!("reached: {}: {}", reached.len(), reached.join(" "));
    println!("broken: {}: {}", broken.len(), broken.join(" "));
    for what in wrong {
        println!("beyond the probes: {what}");
    }
    reached.is_empty() && broken.is_empty() && wrong.is_empty()
}
