//! Compares random operations on the embedded registry, with restarts and failing disks in between,
//! with the same operations on the model.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use conman_proto::{Generation, ResolvedSpec, RuntimeKind, SessionId};
use conman_testkit::resolved_spec;
use jiff::Timestamp;
use proptest::prelude::*;
use tempfile::TempDir;

use crate::database::tests::faults::Faults;
use crate::registry_model::ModelRegistry;
use crate::{
    ContainerIdentity, EmbeddedOptions, EmbeddedRegistry, Ending, Phase, Phases, RecordState,
    Registry, RegistryError, Release, SessionRecord,
};

const IDS: [&str; 3] = ["a", "b", "c"];

/// Which generation of a session an operation acts for.
#[derive(Debug, Clone, Copy)]
enum Which {
    Current,
    Earlier,
    Never,
}

#[derive(Debug, Clone)]
enum Operation {
    Claim(usize, Spec),
    SetContainer(usize, Which, i32),
    SetSpec(usize, Which, Spec),
    SetState(usize, Which, RecordState),
    Release(Vec<(usize, Which, bool)>),
    Forget(usize, Which),
    Reopen,
    /// After so many disk operations, so many fail, because the disk is full or broken.
    Fault(u32, i64, bool),
}

#[derive(Debug, Clone)]
pub(super) struct Spec {
    pub(super) image: String,
    pub(super) cpus: Option<f64>,
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let id = 0..IDS.len();
    let which =
        prop_oneof![5 => Just(Which::Current), 1 => Just(Which::Earlier), 1 => Just(Which::Never)];
    let spec = (".{0,20}", proptest::option::of(0.01..64.0))
        .prop_map(|(image, cpus)| Spec { image, cpus });
    let state = prop_oneof![
        (0.0..1e9).prop_map(|duration_ms| RecordState::Running {
            started_at: Timestamp::UNIX_EPOCH,
            paused: false,
            phases: Phases::from(vec![Phase {
                name: "create".into(),
                started_at: Timestamp::UNIX_EPOCH,
                duration_ms,
            }]),
        }),
        ".{0,20}".prop_map(|reason| RecordState::Stopping {
            reason,
            cause: None
        }),
        ".{0,20}".prop_map(|reason| RecordState::Stuck {
            reason,
            cause: None
        }),
        Just(RecordState::Starting),
    ];
    let operation = prop_oneof![
        4 => (id.clone(), spec.clone()).prop_map(|(id, spec)| Operation::Claim(id, spec)),
        2 => (id.clone(), which.clone(), spec)
            .prop_map(|(id, which, spec)| Operation::SetSpec(id, which, spec)),
        2 => (id.clone(), which.clone(), any::<i32>())
            .prop_map(|(id, which, pid)| Operation::SetContainer(id, which, pid)),
        2 => (id.clone(), which.clone(), state)
            .prop_map(|(id, which, state)| Operation::SetState(id, which, state)),
        3 => proptest::collection::vec((id.clone(), which.clone(), any::<bool>()), 0..4)
            .prop_map(Operation::Release),
        2 => (id, which).prop_map(|(id, which)| Operation::Forget(id, which)),
        1 => Just(Operation::Reopen),
        1 => (0_u32..12, 1_i64..4, any::<bool>())
            .prop_map(|(operations, failures, full)| Operation::Fault(operations, failures, full)),
    ];
    proptest::collection::vec(operation, 1..60)
}

/// Both registries and the mapping between their generations.
struct Pair {
    dir: TempDir,
    faults: Arc<Faults>,
    embedded: Option<EmbeddedRegistry>,
    model: ModelRegistry,
    /// The model's generation for each of the embedded one's.
    twins: BTreeMap<Generation, Generation>,
    claimed: BTreeMap<SessionId, Vec<Generation>>,
    greatest: u64,
}

impl Pair {
    fn new() -> Self {
        // In memory where possible: disk failures are injected, and real syncs would dominate the
        // run time.
        let dir = tempfile::tempdir_in("/dev/shm")
            .or_else(|_| tempfile::tempdir())
            .expect("a directory");
        let faults = Faults::install(&dir.path().join("registry.redb"));
        Self {
            embedded: Some(open(dir.path())),
            faults,
            dir,
            model: ModelRegistry::new(),
            twins: BTreeMap::new(),
            claimed: BTreeMap::new(),
            greatest: 0,
        }
    }

    fn embedded(&self) -> &EmbeddedRegistry {
        self.embedded.as_ref().expect("it is open")
    }

    /// A generation of the embedded registry to act for.
    fn generation(&self, id: &SessionId, which: Which) -> Generation {
        let claimed = self.claimed.get(id).map_or(&[][..], Vec::as_slice);
        match (which, claimed) {
            (Which::Current, [.., last]) => *last,
            (Which::Earlier, [first, _, ..]) => *first,
            _ => Generation::new(1 << 40).expect("not zero"),
        }
    }

    fn twin(&self, generation: Generation) -> Generation {
        self.twins.get(&generation).copied().unwrap_or(generation)
    }

    async fn run(&mut self, operation: Operation) {
        match operation {
            Operation::Claim(id, spec) => self.claim(&id_of(id), &spec).await,
            Operation::SetContainer(id, which, pid) => {
                let id = id_of(id);
                let generation = self.generation(&id, which);
                let container = container(pid);
                let given = self
                    .embedded()
                    .set_container(&id, generation, &container)
                    .await;
                if !failed(&given) {
                    let twin = self.twin(generation);
                    let expected = self.model.set_container(&id, twin, &container).await;
                    self.same(&given, &expected);
                }
            }
            Operation::SetSpec(id, which, spec) => {
                let (id, spec) = (id_of(id), resolved(&spec));
                let generation = self.generation(&id, which);
                let given = self.embedded().set_spec(&id, generation, &spec).await;
                if !failed(&given) {
                    let twin = self.twin(generation);
                    let expected = self.model.set_spec(&id, twin, &spec).await;
                    self.same(&given, &expected);
                }
            }
            Operation::SetState(id, which, state) => {
                let id = id_of(id);
                let generation = self.generation(&id, which);
                let given = self
                    .embedded()
                    .set_state(&id, generation, state.clone())
                    .await;
                if !failed(&given) {
                    let expected = self
                        .model
                        .set_state(&id, self.twin(generation), state)
                        .await;
                    self.same(&given, &expected);
                }
            }
            Operation::Release(entries) => self.release(&entries).await,
            Operation::Forget(id, which) => {
                let id = id_of(id);
                let generation = self.generation(&id, which);
                let given = self.embedded().forget(&id, generation).await;
                if !failed(&given) {
                    let expected = self.model.forget(&id, self.twin(generation)).await;
                    self.same(&given, &expected);
                }
            }
            Operation::Reopen => {
                self.faults.heal();
                self.embedded = None;
                self.embedded = Some(open(self.dir.path()));
            }
            Operation::Fault(operations, failures, full) => {
                self.faults.set_full(full);
                self.faults.fail_after(operations, failures);
            }
        }
        self.same_records().await;
    }

    async fn claim(&mut self, id: &SessionId, spec: &Spec) {
        let spec = resolved(spec);
        let given = self.embedded().claim(id, &spec).await;
        if failed(&given) {
            return;
        }
        let expected = self.model.claim(id, &spec).await;
        match (&given, &expected) {
            (Ok(given), Ok(expected)) => {
                assert!(given.generation.get() > self.greatest, "generations grow");
                self.greatest = given.generation.get();
                self.twins.insert(given.generation, expected.generation);
                self.claimed
                    .entry(id.clone())
                    .or_default()
                    .push(given.generation);
            }
            (Err(given), Err(expected)) => self.same_error(given, expected),
            (given, expected) => panic!("embedded: {given:?}, model: {expected:?}"),
        }
    }

    async fn release(&self, entries: &[(usize, Which, bool)]) {
        let batch: Vec<_> = entries
            .iter()
            .map(|&(id, which, failed)| {
                let id = id_of(id);
                let generation = self.generation(&id, which);
                Release {
                    id,
                    generation,
                    ending: ending(failed),
                }
            })
            .collect();
        let twins = batch
            .iter()
            .map(|one| Release {
                generation: self.twin(one.generation),
                ..one.clone()
            })
            .collect();
        let given = self.embedded().release(batch).await;
        if given.iter().any(failed) {
            assert!(
                given.iter().all(failed),
                "a batch fails as a whole: {given:?}"
            );
            return;
        }
        let expected = self.model.release(twins).await;
        assert_eq!(given.len(), expected.len());
        for (given, expected) in given.iter().zip(&expected) {
            self.same(given, expected);
        }
    }

    fn same(&self, given: &Result<(), RegistryError>, expected: &Result<(), RegistryError>) {
        match (given, expected) {
            (Ok(()), Ok(())) => {}
            (Err(given), Err(expected)) => self.same_error(given, expected),
            (given, expected) => panic!("embedded: {given:?}, model: {expected:?}"),
        }
    }

    fn same_error(&self, given: &RegistryError, expected: &RegistryError) {
        let given = match given.clone() {
            RegistryError::Owned { id, generation } => RegistryError::Owned {
                id,
                generation: self.twin(generation),
            },
            RegistryError::Ended { id, generation } => RegistryError::Ended {
                id,
                generation: self.twin(generation),
            },
            RegistryError::Superseded {
                id,
                generation,
                current,
            } => RegistryError::Superseded {
                id,
                generation: self.twin(generation),
                current: current.map(|current| self.twin(current)),
            },
            other => other,
        };
        assert_eq!(format!("{given:?}"), format!("{expected:?}"));
    }

    /// Both hold the same records, except for generation numbers and claim times.
    async fn same_records(&self) {
        let given: Vec<SessionRecord> = self.embedded().list().await.expect("listed");
        let expected = self.model.list().await.expect("listed");
        assert_eq!(
            given.len(),
            expected.len(),
            "{given:?} against {expected:?}"
        );
        for (given, expected) in given.into_iter().zip(expected) {
            let generation = self.twin(given.generation);
            assert_eq!(
                SessionRecord {
                    generation,
                    created_at: expected.created_at,
                    ..given
                },
                expected
            );
        }
    }
}

/// Whether the disk, not the registry, refused.
fn failed<T>(result: &Result<T, RegistryError>) -> bool {
    matches!(result, Err(error) if error.is_retryable())
}

pub(super) fn open(dir: &Path) -> EmbeddedRegistry {
    EmbeddedRegistry::open(dir, EmbeddedOptions::default()).expect("it opens")
}

pub(super) fn id_of(index: usize) -> SessionId {
    IDS[index].parse().expect("an id")
}

pub(super) fn resolved(spec: &Spec) -> ResolvedSpec {
    ResolvedSpec {
        cpus: spec.cpus,
        pids: 256,
        ..resolved_spec(RuntimeKind::Docker, &spec.image)
    }
}

fn container(pid: i32) -> ContainerIdentity {
    ContainerIdentity {
        container_id: "container".to_owned(),
        pid,
        start_time_ticks: 7,
        boot_id: "boot".to_owned(),
        addresses: Vec::new(),
    }
}

pub(super) fn ending(failed: bool) -> Ending {
    Ending {
        cause: None,
        failed_phase: None,
        failed,
        reason: "over".to_owned(),
        exit_code: failed.then_some(1),
        ended_at: Timestamp::UNIX_EPOCH,
        started_at: None,
        phases: Phases::default(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn random_lives_with_restarts_and_failing_disks_go_as_on_the_model(
        operations in operations(),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        runtime.block_on(async {
            let mut pair = Pair::new();
            for operation in operations {
                pair.run(operation).await;
            }
            // Whatever the last disk operation was, a restart finds exactly the acknowledged state.
            pair.run(Operation::Reopen).await;
        });
    }
}
