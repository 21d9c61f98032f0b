//! Changes of a running session's spec.

use conman_proto::{FieldError, ResolvedSpec, SessionPatch};
use jiff::Timestamp;

use super::mistakes::Mistakes;
use super::network::{NODES_PORT, check_ports};
use super::program::check_labels;

/// Returns the spec of a running session after a change.
///
/// # Errors
/// Every mistake of the change, with its field and what is allowed.
pub fn patched(
    spec: &ResolvedSpec,
    patch: &SessionPatch,
    now: Timestamp,
) -> Result<ResolvedSpec, Vec<FieldError>> {
    let mut mistakes = Mistakes::default();
    let mut changed = spec.clone();
    for (key, value) in &patch.labels {
        match value {
            Some(value) => changed.labels.insert(key.clone(), value.clone()),
            None => changed.labels.remove(key),
        };
    }
    check_labels("labels", &changed.labels, &mut mistakes);
    changed.idle_timeout_s = patch.idle_timeout_s.unwrap_or(spec.idle_timeout_s);
    if let Some(ports) = &patch.ports {
        check_ports(ports, &mut mistakes);
        if spec.network.traits().shares_host && *ports != spec.ports {
            mistakes.add("ports", NODES_PORT);
        }
        changed.ports.clone_from(ports);
    }
    if let Some(expires_at) = patch.expires_at {
        changed.expires_at = expires_at;
        if expires_at.is_some_and(|at| at <= now) {
            mistakes.add("expires_at", "is in the past; DELETE the session to end it");
        }
    }
    mistakes.into_result(changed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SpecPolicy;

    fn spec() -> ResolvedSpec {
        let request = conman_proto::SessionRequest {
            image: Some("busybox".to_owned()),
            labels: Some(
                [("a", "1"), ("b", "2")]
                    .map(|(k, v)| (k.into(), v.into()))
                    .into(),
            ),
            idle_timeout_s: Some(60),
            ..Default::default()
        };
        let id = "alice".parse().expect("an id");
        super::super::resolve(&SpecPolicy::default(), &id, &request).expect("a spec")
    }

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(seconds).expect("a time")
    }

    #[test]
    fn what_is_absent_stays_and_null_removes() {
        let spec = spec();
        let none = patched(&spec, &SessionPatch::default(), at(0)).expect("valid");
        assert_eq!(none, spec);
        let patch = SessionPatch {
            labels: [("a".into(), None), ("c".into(), Some("3".into()))].into(),
            idle_timeout_s: Some(5),
            ports: Some(vec!["8080".parse().expect("a port")]),
            expires_at: Some(Some(at(10))),
        };
        let changed = patched(&spec, &patch, at(9)).expect("valid");
        let labels = [("b", "2"), ("c", "3")].map(|(k, v)| (k.into(), v.into()));
        assert_eq!(changed.labels, labels.into());
        assert!(changed.ports[0].contains(8080));
        assert_eq!(
            (changed.idle_timeout_s, changed.expires_at),
            (5, Some(at(10)))
        );
        let patch = SessionPatch {
            expires_at: Some(None),
            ..Default::default()
        };
        assert_eq!(
            patched(&changed, &patch, at(11)).expect("valid").expires_at,
            None
        );
    }

    #[test]
    fn a_port_of_the_node_stays_the_templates() {
        let spec = ResolvedSpec {
            network: conman_proto::Network::Host,
            ..spec()
        };
        let patch = |port: Option<&str>| SessionPatch {
            ports: Some(
                port.into_iter()
                    .map(|port| port.parse().expect("a port"))
                    .collect(),
            ),
            ..Default::default()
        };
        let refused = patched(&spec, &patch(Some("22")), at(0)).expect_err("refused");
        assert_eq!(refused[0].field, "ports");
        patched(&spec, &patch(None), at(0)).expect("nothing changes");
    }

    #[test]
    fn every_mistake_names_its_field() {
        let patch = SessionPatch {
            labels: [("Not A Key".into(), Some(String::new()))].into(),
            ports: Some(vec!["1".parse().expect("a port"); 65]),
            expires_at: Some(Some(at(9))),
            ..Default::default()
        };
        let mistakes = patched(&spec(), &patch, at(9)).expect_err("refused");
        let fields: Vec<_> = mistakes.iter().map(|one| one.field.as_str()).collect();
        assert!(
            fields[0].starts_with("labels") && fields[1..] == ["ports", "expires_at"],
            "{fields:?}"
        );
    }
}
