//! What a session can make the host hold, and make it clean up: each kind of it in a session of its own.

use std::time::Duration;

use crate::world::{Verdict, World, line_with};
use crate::{pools, releases};

/// The kinds of `BURDENS` in `inside.py`.
const KINDS: [&str; 12] = [
    "sockets",
    "timers",
    "triggers",
    "files",
    "watches",
    "nests",
    "connections",
    "mappings",
    "filters",
    "pipes",
    "terminals",
    "nulls",
];

/// Longest death in multiples of an idle session's, for a machine that is busy.
const DEATH_FACTOR: u32 = 4;

/// How long the noise of counters is measured first.
const NOISE: Duration = Duration::from_secs(2);

/// Starts a session with this burden. Returns its id and how much it took.
async fn burdened(world: &World, kind: &str) -> (String, String) {
    let mut spec = world.spec(&["burden", kind]);
    spec["cpus"] = serde_json::json!(1.0);
    let id = world.id(kind);
    let log = world.start_until(&id, &spec, "burdened").await;
    (id, line_with(&log, "burdened").to_owned())
}

/// A session with much to clean up dies as fast as one without.
pub(crate) async fn long_deaths(world: &World) -> Verdict {
    let (id, _) = world
        .helper("idle", &["show_first_descriptors"], "descriptors")
        .await;
    let idle = world.stop(&id).await.took;
    let bound = releases::ALONE.max(idle * DEATH_FACTOR);
    let (mut slow, mut all) = (Vec::new(), Vec::new());
    for kind in KINDS {
        let (id, taken) = burdened(world, kind).await;
        let release = world.stop(&id).await;
        let line = format!("{kind} ({taken}): {:.0?}", release.took);
        if release.took > bound {
            slow.push(format!("{line} in {}", release.place));
        }
        all.push(line);
    }
    if slow.is_empty() {
        return Verdict::Held(format!("idle: {idle:.0?}; {}", all.join("; ")));
    }
    Verdict::Reached(format!("bound {bound:.0?}; {}", slow.join("; ")))
}

/// No counter of the host moves by more than a session's limits explain, and all return after its death.
pub(crate) async fn shared_pools(world: &World) -> Verdict {
    let (noise, ()) = pools::noise_during(tokio::time::sleep(NOISE)).await;
    let mut found = Vec::new();
    for kind in KINDS {
        let before = pools::sample();
        let (id, taken) = burdened(world, kind).await;
        let during = pools::taken(&before, &noise);
        world.stop(&id).await;
        let after = pools::left(&before, &noise, pools::Cause::DeadSession).await;
        let after = after
            .into_iter()
            .map(|what| format!("after its death: {what}"));
        let both = during.into_iter().chain(after);
        found.extend(both.map(|what| format!("{kind} ({taken}): {what}")));
    }
    if found.is_empty() {
        let counters = pools::available();
        return Verdict::Held(format!(
            "{counters} counters moved within what limits explain"
        ));
    }
    Verdict::Reached(found.join("; "))
}
