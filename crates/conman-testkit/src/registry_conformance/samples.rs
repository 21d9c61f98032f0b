//! Records, specs and endings of the suite, and its shortest calls.

use std::collections::BTreeMap;

use conman_proto::{Generation, ResolvedSpec, RuntimeKind, SessionId};
use conman_registry::{
    ContainerIdentity, Ending, Phase, Phases, RecordState, Registry, RegistryError, Release,
    SessionRecord,
};
use jiff::Timestamp;

use crate::specs::resolved_spec;

pub(super) async fn claim(registry: &dyn Registry, id: &SessionId) -> SessionRecord {
    let record = registry
        .claim(id, &spec("suite"))
        .await
        .expect("the session can be claimed");
    assert_eq!(record.id, *id, "the record is that of the session");
    record
}

pub(super) async fn release(
    registry: &dyn Registry,
    id: &SessionId,
    generation: Generation,
    ending: Ending,
) -> Result<(), RegistryError> {
    let batch = vec![Release {
        id: id.clone(),
        generation,
        ending,
    }];
    let mut results = registry.release(batch).await;
    assert_eq!(results.len(), 1, "one entry, one result");
    results.remove(0)
}

pub(super) async fn get(registry: &dyn Registry, id: &SessionId) -> Option<SessionRecord> {
    registry.get(id).await.expect("a record can be read")
}

pub(crate) fn id(name: &str) -> SessionId {
    name.parse().expect("the name is a DNS label")
}

pub fn spec(template: &str) -> ResolvedSpec {
    ResolvedSpec {
        template: Some(template.to_owned()),
        command: vec!["sleep".to_owned()],
        args: vec!["infinity".to_owned()],
        env: BTreeMap::from([("KEY".to_owned(), "value with \"quotes\" and ü".to_owned())]),
        port: Some(8080),
        memory_bytes: Some(u64::MAX),
        cpus: Some(0.1 + 0.2),
        ..resolved_spec(RuntimeKind::Process, "conformance:suite")
    }
}

pub(super) fn container(pid: i32) -> ContainerIdentity {
    ContainerIdentity {
        container_id: format!("container-{pid}"),
        pid,
        start_time_ticks: u64::MAX,
        boot_id: "00000000-0000-0000-0000-000000000000".to_owned(),
        addresses: Vec::new(),
    }
}

fn phases() -> Phases {
    let started_at = Timestamp::from_nanosecond(1_234_567_890_123_456_789).expect("in range");
    Phases::from(vec![Phase {
        name: "create".into(),
        started_at,
        duration_ms: 1.0 / 3.0,
    }])
}

pub(super) fn running() -> RecordState {
    let started_at = Timestamp::from_nanosecond(1_234_567_890_987_654_321).expect("in range");
    RecordState::Running {
        started_at,
        paused: false,
        phases: phases(),
    }
}

pub(crate) fn ending(reason: &str) -> Ending {
    let ended_at = Timestamp::from_nanosecond(1_234_567_899_000_000_001).expect("in range");
    Ending {
        cause: None,
        failed_phase: None,
        failed: false,
        reason: reason.to_owned(),
        exit_code: Some(137),
        ended_at,
        started_at: Some(ended_at),
        phases: phases(),
    }
}
