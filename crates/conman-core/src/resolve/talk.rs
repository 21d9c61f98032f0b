//! The groups of sessions that may connect to each other.

use std::collections::BTreeSet;

use conman_proto::{Network, SessionRequest};

use super::mistakes::{Mistakes, quote};
use crate::egress::EGRESS_DNS_PORT;

/// Maximum number of groups of a session.
const MAX_GROUPS: usize = 8;
/// Maximum length of a group's name: that of a label in a host name.
const MAX_GROUP_BYTES: usize = 63;

/// Returns the groups in order. A node has addresses for each list of groups that its templates have, so a request
/// cannot choose another one.
pub(super) fn talk(
    base: &SessionRequest,
    request: &SessionRequest,
    (network, port): (&Network, Option<u16>),
    mistakes: &mut Mistakes,
) -> Vec<String> {
    let groups = |given: &Option<Vec<String>>| -> BTreeSet<String> {
        given.iter().flatten().cloned().collect()
    };
    let listed = groups(&base.talk);
    if request.talk.is_some() && groups(&request.talk) != listed {
        mistakes.add(
            "talk",
            "only a template can give the groups of its sessions; leave it out",
        );
    }
    if listed.len() > MAX_GROUPS {
        let message = format!("has {} groups; {MAX_GROUPS} are allowed", listed.len());
        mistakes.add("talk", message);
    }
    for group in listed.iter().filter(|group| !is_group(group)) {
        let message = format!(
            "`{}` is not a name of a group: use up to {MAX_GROUP_BYTES} lower-case letters, digits and hyphens, with \
             a letter or digit at both ends",
            quote(group)
        );
        mistakes.add("talk", message);
    }
    if !listed.is_empty() && !network.traits().routed {
        // A request may give up its template's network, and with it the groups.
        if base.network.as_ref() == Some(network) || base.network.is_none() {
            let message = format!("needs the network `routed`, and this is `{network}`");
            mistakes.add("talk", message);
        }
        return Vec::new();
    }
    if !listed.is_empty() && port == Some(EGRESS_DNS_PORT) {
        let message = format!("is {EGRESS_DNS_PORT}, where a session with `talk` has its resolver");
        mistakes.add("port", message);
    }
    listed.into_iter().collect()
}

pub(crate) fn is_group(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = name.as_bytes();
    bytes.len() <= MAX_GROUP_BYTES
        && bytes.first().is_some_and(|first| plain(*first))
        && bytes.last().is_some_and(|last| plain(*last))
        && bytes.iter().all(|byte| plain(*byte) || *byte == b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn talks(
        template: &[&str],
        request: Option<&[&str]>,
        network: &Network,
    ) -> Result<Vec<String>, String> {
        let given = |groups: &[&str]| groups.iter().map(|&group| group.to_owned()).collect();
        let base = SessionRequest {
            talk: Some(given(template)),
            network: Some(Network::Routed),
            ..SessionRequest::default()
        };
        let request = SessionRequest {
            talk: request.map(given),
            ..SessionRequest::default()
        };
        let mut mistakes = Mistakes::default();
        let groups = talk(&base, &request, (network, None), &mut mistakes);
        let result = mistakes.into_result(groups);
        result.map_err(|mistakes| mistakes.into_iter().map(|one| one.message).collect())
    }

    #[test]
    fn only_a_template_gives_groups_and_a_request_may_give_up_its_network_with_them() {
        let sorted = talks(&["b", "a", "b"], None, &Network::Routed);
        assert_eq!(sorted, Ok(vec!["a".to_owned(), "b".to_owned()]));
        assert_eq!(
            talks(&["a"], Some(&["a"]), &Network::Routed),
            Ok(vec!["a".to_owned()])
        );
        for other in [&["b"][..], &[], &["a", "b"]] {
            let refused = talks(&["a"], Some(other), &Network::Routed).expect_err("refused");
            assert!(refused.contains("only a template"), "{refused}");
        }
        assert_eq!(talks(&["a"], None, &Network::Loopback), Ok(Vec::new()));
        let names = ["", "A", "-a", "a_b", &"a".repeat(64)];
        for name in names {
            talks(&[name], None, &Network::Routed).expect_err("no name of a group");
        }
        let many: Vec<String> = (0..=MAX_GROUPS).map(|number| number.to_string()).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        talks(&many, None, &Network::Routed).expect_err("too many");
    }
}
