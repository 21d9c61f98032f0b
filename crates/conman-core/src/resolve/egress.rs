//! The egress list of a spec.

use std::collections::BTreeSet;

use conman_proto::{Network, RuntimeKind, SessionRequest};

use super::mistakes::{Mistakes, quote};
use crate::egress::{EGRESS_DNS_PORT, EGRESS_PROXY_PORT, EgressPattern, MAX_EGRESS_PATTERNS};
use crate::runtime_traits::runtime_traits;

/// Returns the patterns as text, in order. Those of a request must be covered by its template's.
pub(super) fn egress(
    base: &SessionRequest,
    request: &SessionRequest,
    (runtime, network, port): (RuntimeKind, &Network, Option<u16>),
    mistakes: &mut Mistakes,
) -> Vec<String> {
    let listed = patterns(base.egress.as_ref(), mistakes);
    let asked = match &request.egress {
        Some(asked) => patterns(Some(asked), mistakes),
        None => listed.clone(),
    };
    for pattern in &asked {
        if !listed.iter().any(|listed| listed.covers(pattern)) {
            let message = match &request.template {
                Some(name) => format!(
                    "`{pattern}` is not within the egress list of template `{}`; a request can only \
                     narrow that list: add the pattern there",
                    quote(name)
                ),
                None => format!(
                    "`{pattern}` needs a template that lists it: only a template can allow egress"
                ),
            };
            mistakes.add("egress", message);
        }
    }
    if network.traits().routed {
        routed(&listed, &asked, mistakes);
        return asked.iter().map(EgressPattern::to_string).collect();
    }
    if asked.is_empty() {
        return Vec::new();
    }
    if !runtime_traits(runtime).has_egress_proxy || network.traits().leads_out {
        let message = format!(
            "is served in the `loopback` network of the native and docker runtimes, not in `{network}` \
             of {runtime}; leave it out"
        );
        mistakes.add("egress", message);
    }
    if let Some(port) = port.filter(|port| [EGRESS_PROXY_PORT, EGRESS_DNS_PORT].contains(port)) {
        let message = format!("is {port}, where a session with `egress` has its proxy or resolver");
        mistakes.add("port", message);
    }
    asked.iter().map(EgressPattern::to_string).collect()
}

/// The host's rules know networks and templates, and nothing of names or single sessions.
fn routed(
    listed: &BTreeSet<EgressPattern>,
    asked: &BTreeSet<EgressPattern>,
    mistakes: &mut Mistakes,
) {
    let is_name = |pattern: &&EgressPattern| matches!(pattern, EgressPattern::Name { .. });
    if let Some(name) = asked.iter().find(is_name) {
        let message = format!(
            "has the name `{name}`; in the network `routed` it may have networks and `internet`"
        );
        mistakes.add("egress", message);
    }
    if listed != asked {
        let message =
            "cannot be narrowed by a request in the network `routed`: make a template for it";
        mistakes.add("egress", message);
    }
}

fn patterns(texts: Option<&Vec<String>>, mistakes: &mut Mistakes) -> BTreeSet<EgressPattern> {
    let texts = texts.map(Vec::as_slice).unwrap_or_default();
    if texts.len() > MAX_EGRESS_PATTERNS {
        let message = format!(
            "has {} entries; {MAX_EGRESS_PATTERNS} are allowed",
            texts.len()
        );
        mistakes.add("egress", message);
        return BTreeSet::new();
    }
    let mut patterns = BTreeSet::new();
    for (index, text) in texts.iter().enumerate() {
        match text.parse() {
            Ok(pattern) => {
                patterns.insert(pattern);
            }
            Err(error) => mistakes.add(
                format!("egress[{index}]"),
                format!("`{}` {error}", quote(text)),
            ),
        }
    }
    patterns
}
