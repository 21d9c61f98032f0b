//! SIGKILL at random points: what was acknowledged is there, and generations only grow.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;

use conman_proto::SessionId;
use conman_registry::{EmbeddedRegistry, Registry, SessionRecord};

use crate::support::{container, dir_in_memory, id, only, open, release, spec, this_binary};

const DIR: &str = "CONMAN_REGISTRY_TEST_DIR";
const ROUNDS: u64 = 20;
const SESSIONS: usize = 8;

/// The last thing that a session's life had acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Acknowledged {
    Claimed(u64),
    Released(u64),
    Forgotten(u64),
}

impl Acknowledged {
    fn parse(line: &str) -> Option<(SessionId, Self)> {
        let mut words = line.strip_prefix("ack ")?.split(' ');
        let (what, id, generation) = (words.next()?, words.next()?, words.next()?);
        let generation = generation.parse().ok()?;
        let acknowledged = match what {
            "claimed" => Self::Claimed(generation),
            "released" => Self::Released(generation),
            "forgotten" => Self::Forgotten(generation),
            _ => return None,
        };
        Some((id.parse().ok()?, acknowledged))
    }

    fn generation(self) -> u64 {
        match self {
            Self::Claimed(generation)
            | Self::Released(generation)
            | Self::Forgotten(generation) => generation,
        }
    }

    /// Whether a record may be what a crash left, with at most the next step of the life unknown.
    fn allows(self, record: Option<&SessionRecord>) -> bool {
        match (self, record) {
            (Self::Claimed(generation), Some(record)) => record.generation.get() == generation,
            (Self::Claimed(_), None) => false,
            (Self::Released(generation), Some(record)) => {
                let same = record.generation.get() == generation && record.state.is_ended();
                same || record.generation.get() > generation
            }
            // Forgetting may have been under way.
            (Self::Released(_) | Self::Forgotten(_), None) => true,
            (Self::Forgotten(generation), Some(record)) => record.generation.get() > generation,
        }
    }
}

#[tokio::test]
async fn what_was_acknowledged_survives_sigkill_and_generations_only_grow() {
    // A killed process takes nothing of what it wrote along, whether a disk had it already or not.
    let dir = dir_in_memory();
    let mut known = BTreeMap::new();
    // Fixed, so that a failure can be repeated as far as the machine's timing allows.
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    for round in 0..ROUNDS {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let lines = 1 + usize::try_from(random % 300).expect("small");
        live_until_killed(dir.path(), lines, &mut known);

        let registry = open(dir.path());
        for (id, acknowledged) in &known {
            let record = registry.get(id).await.expect("read");
            assert!(
                acknowledged.allows(record.as_ref()),
                "round {round}: {id} had {acknowledged:?} and is {record:?}"
            );
        }
        let greatest = known
            .values()
            .map(|one| one.generation())
            .max()
            .expect("something");
        let probe = id("probe");
        let claimed = registry
            .claim(&probe, &spec())
            .await
            .expect("claimed")
            .generation;
        assert!(
            claimed.get() > greatest,
            "round {round}: {claimed} is not above {greatest}"
        );
        release(&registry, &probe, claimed).await.expect("released");
        known.insert(probe, Acknowledged::Released(claimed.get()));
    }
}

/// Runs the child, and kills it when it has acknowledged so much.
fn live_until_killed(dir: &Path, lines: usize, known: &mut BTreeMap<SessionId, Acknowledged>) {
    let mut child = this_binary()
        .args(only("sigkill::lives_in_a_process_that_will_be_killed"))
        .env(DIR, dir)
        .stdout(Stdio::piped())
        .spawn()
        .expect("the child starts");
    let output = BufReader::new(child.stdout.take().expect("a pipe"));
    let mut seen = 0;
    for line in output.lines() {
        // The pipe also holds what was acknowledged between the decision and the death.
        let Ok(line) = line else { break };
        let Some((id, acknowledged)) = Acknowledged::parse(&line) else {
            continue;
        };
        known.insert(id, acknowledged);
        seen += 1;
        if seen == lines {
            child.kill().expect("killed");
        }
    }
    let status = child.wait().expect("waited for");
    assert!(
        seen >= lines && !status.success(),
        "the child ended by itself: {status}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "the process that a test of this module kills"]
async fn lives_in_a_process_that_will_be_killed() {
    let Some(dir) = std::env::var_os(DIR).map(PathBuf::from) else {
        return;
    };
    let registry = Arc::new(open(&dir));
    for record in registry.list().await.expect("listed") {
        if !record.state.is_ended() {
            release(&registry, &record.id, record.generation)
                .await
                .expect("released");
            acknowledge("released", &record.id, record.generation.get());
        }
    }
    let lives: Vec<_> = (0..SESSIONS)
        .map(|index| tokio::spawn(life(Arc::clone(&registry), id(&format!("life-{index}")))))
        .collect();
    for life in lives {
        life.await.expect("a life does not end");
    }
}

async fn life(registry: Arc<EmbeddedRegistry>, id: SessionId) {
    loop {
        let generation = registry
            .claim(&id, &spec())
            .await
            .expect("claimed")
            .generation;
        acknowledge("claimed", &id, generation.get());
        registry
            .set_container(&id, generation, &container())
            .await
            .expect("noted");
        release(&registry, &id, generation).await.expect("released");
        acknowledge("released", &id, generation.get());
        if generation.get() % 3 == 0 {
            registry.forget(&id, generation).await.expect("forgotten");
            acknowledge("forgotten", &id, generation.get());
        }
    }
}

fn acknowledge(what: &str, id: &SessionId, generation: u64) {
    writeln!(std::io::stdout(), "ack {what} {id} {generation}").expect("the parent reads");
}
