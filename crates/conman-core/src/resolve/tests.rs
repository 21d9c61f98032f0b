//! Tests of how a request becomes a spec.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use conman_proto::{Network, OnNodeLoss};
use proptest::prelude::*;

use super::mistakes::{MAX_MISTAKES, has_control};
use super::*;
use crate::spec_policy::HIGHEST_MAX_CPUS;

fn id() -> SessionId {
    "alice".parse().expect("a session id")
}

fn policy() -> SpecPolicy {
    let python = SessionRequest {
        image: Some("python:demo".to_owned()),
        command: Some(vec!["python3".to_owned()]),
        env: Some(BTreeMap::from([
            ("A".to_owned(), "template".to_owned()),
            ("B".to_owned(), "template".to_owned()),
        ])),
        port: Some(Some(8_080)),
        ready_path: Some("/health".to_owned()),
        binds: Some(vec!["/srv/work/{id}:/work".to_owned()]),
        preempt_signal: Some("term".to_owned()),
        preempt_grace_ms: Some(500),
        ..SessionRequest::default()
    };
    SpecPolicy {
        templates: BTreeMap::from([
            (
                "python".to_owned(),
                Template {
                    request: python,
                    ..Template::default()
                },
            ),
            (
                "bare".to_owned(),
                Template {
                    runtime: Some(RuntimeKind::Process),
                    ..Template::default()
                },
            ),
        ]),
        bind_roots: vec![PathBuf::from("/srv/work")],
        max_memory_bytes: Some(1 << 30),
        default_memory_bytes: Some(256 << 20),
        max_cpus: Some(2.0),
        max_pids: 1_000,
        ..SpecPolicy::default()
    }
}

fn with_egress(
    template: &[&str],
    request: Option<&[&str]>,
) -> Result<Vec<String>, Vec<FieldError>> {
    let words = |list: &[&str]| Some(list.iter().map(|&text| text.to_owned()).collect());
    let mut policy = policy();
    let python = policy.templates.get_mut("python").expect("a template");
    python.request.egress = words(template);
    let request = SessionRequest {
        egress: request.and_then(words),
        ..named("python")
    };
    resolve(&policy, &id(), &request).map(|spec| spec.egress)
}

#[test]
fn a_request_can_only_narrow_the_egress_of_its_template() {
    let listed = ["b.example.org:80", "*.example.org:443", "10.0.0.0/8:1"];
    let inherited = with_egress(&listed, None).expect("the template's");
    assert_eq!(
        inherited,
        ["b.example.org:80", "*.example.org:443", "10.0.0.0/8:1"]
    );
    let narrowed = with_egress(&listed, Some(&["a.example.org:443", "10.0.0.0/8:1"]));
    assert_eq!(
        narrowed.expect("narrower"),
        ["a.example.org:443", "10.0.0.0/8:1"]
    );
    assert_eq!(with_egress(&listed, Some(&[])), Ok(Vec::new()));
    for wider in [
        "internet",
        "example.org:443",
        "b.example.org:81",
        "10.0.0.0/9:1",
    ] {
        let mistakes = with_egress(&listed, Some(&[wider])).expect_err(wider);
        assert_eq!(fields(&mistakes), ["egress"], "{wider}");
        assert!(mistakes[0].message.contains("`python`"), "{mistakes:?}");
    }
    let mistakes = with_egress(&["https://example.org"], None).expect_err("a URL");
    assert_eq!(fields(&mistakes), ["egress[0]"]);
    let alone = SessionRequest {
        egress: Some(vec!["internet".to_owned()]),
        image: Some("a:b".to_owned()),
        ..SessionRequest::default()
    };
    let mistakes = resolve(&policy(), &id(), &alone).expect_err("no template");
    assert_eq!(fields(&mistakes), ["egress"]);
}

#[test]
fn only_a_template_can_put_a_session_on_dockers_bridge() {
    let mut policy = policy();
    let bridge = SessionRequest {
        network: Some(Network::Bridge),
        ..named("python")
    };
    let mistakes = resolve(&policy, &id(), &bridge).expect_err("by the request alone");
    assert_eq!(fields(&mistakes), ["network"]);
    let python = policy.templates.get_mut("python").expect("a template");
    python.request.network = Some(Network::Bridge);
    for (given, network) in [
        (bridge.network, Network::Bridge),
        (None, Network::Bridge),
        (Some(Network::Loopback), Network::Loopback),
    ] {
        let request = SessionRequest {
            network: given,
            ..named("python")
        };
        let spec = resolve(&policy, &id(), &request).expect("the template has it");
        assert_eq!(spec.network, network);
    }
}

#[test]
fn only_a_template_gives_the_nodes_network_and_its_interfaces_and_the_nodes_ports() {
    let mut policy = policy();
    let python = policy.templates.get_mut("python").expect("a template");
    python.runtime = Some(RuntimeKind::Native);
    for text in ["host", "macvlan:eth1", "ipoib:ib0"] {
        let network: Network = text.parse().expect("a network");
        let python = policy.templates.get_mut("python").expect("a template");
        python.request.network = Some(Network::Loopback);
        let request = SessionRequest {
            network: Some(network.clone()),
            ..named("python")
        };
        let mistakes = resolve(&policy, &id(), &request).expect_err("by the request alone");
        assert_eq!(fields(&mistakes), ["network"]);
        let python = policy.templates.get_mut("python").expect("a template");
        python.request.network = Some(network.clone());
        let spec = resolve(&policy, &id(), &named("python")).expect("the template's");
        assert_eq!(spec.network, network);
        let other_interface = SessionRequest {
            network: Some("macvlan:eth2".parse().expect("a network")),
            ..named("python")
        };
        let mistakes = resolve(&policy, &id(), &other_interface).expect_err("not the template's");
        assert_eq!(fields(&mistakes), ["network"]);
        let other_port = SessionRequest {
            port: Some(Some(2_379)),
            ..named("python")
        };
        let resolved = resolve(&policy, &id(), &other_port);
        assert_eq!(
            resolved.is_err(),
            network == Network::Host,
            "{text}: {resolved:?}"
        );
    }
}

#[test]
fn egress_is_refused_where_it_is_not_served() {
    let egress = Some(vec!["internet".to_owned()]);
    let mut policy = policy();
    for template in policy.templates.values_mut() {
        template.request.egress.clone_from(&egress);
    }
    let mistakes = resolve(&policy, &id(), &named("bare")).expect_err("the process runtime");
    assert!(fields(&mistakes).contains(&"egress"), "{mistakes:?}");
    let proxys_own = SessionRequest {
        port: Some(Some(crate::egress::EGRESS_PROXY_PORT)),
        ..named("python")
    };
    let mistakes = resolve(&policy, &id(), &proxys_own).expect_err("the proxy's port");
    assert_eq!(fields(&mistakes), ["port"]);
}

#[test]
fn only_a_template_gives_the_network_routed_and_no_request_changes_its_egress() {
    let egress = |texts: &[&str]| Some(texts.iter().map(|&text| text.to_owned()).collect());
    let mut policy = policy();
    let python = policy.templates.get_mut("python").expect("a template");
    python.runtime = Some(RuntimeKind::Native);
    let routed = SessionRequest {
        network: Some(Network::Routed),
        ..named("python")
    };
    let mistakes = resolve(&policy, &id(), &routed).expect_err("the template has loopback");
    assert_eq!(fields(&mistakes), ["network"]);
    let python = policy.templates.get_mut("python").expect("a template");
    python.request.network = Some(Network::Routed);
    python.request.egress = egress(&["internet", "10.1.0.0/16:53"]);
    let spec = resolve(&policy, &id(), &named("python")).expect("the template's");
    assert_eq!((&spec.network, spec.egress.len()), (&Network::Routed, 2));
    assert!(!spec.has_egress_proxy());
    for narrower in [&["internet"][..], &[]] {
        let request = SessionRequest {
            egress: egress(narrower),
            ..named("python")
        };
        let mistakes = resolve(&policy, &id(), &request).expect_err("the rules are the template's");
        assert_eq!(fields(&mistakes), ["egress"]);
    }
    let loopback = SessionRequest {
        network: Some(Network::Loopback),
        ..named("python")
    };
    assert!(resolve(&policy, &id(), &loopback).is_ok_and(|spec| spec.has_egress_proxy()));
    let python = policy.templates.get_mut("python").expect("a template");
    python.request.egress = egress(&["example.org:443"]);
    let mistakes = resolve(&policy, &id(), &named("python")).expect_err("a name");
    assert_eq!(fields(&mistakes), ["egress"]);
}

#[test]
fn a_request_can_only_lower_its_templates_bandwidth() {
    let rate = |text: &str| text.parse().ok();
    let bandwidth = |inward: &str, outward: &str| conman_proto::Bandwidth {
        inward: rate(inward),
        outward: rate(outward),
    };
    let request = |bandwidth| SessionRequest {
        bandwidth: Some(bandwidth),
        ..named("python")
    };
    let mut policy = policy();
    let python = policy.templates.get_mut("python").expect("a template");
    python.request.bandwidth = Some(bandwidth("100mbit", ""));
    let lower = request(bandwidth("10mbit", "20mbit"));
    let spec = resolve(&policy, &id(), &lower).expect("the template has no limit of `out`");
    assert_eq!(spec.bandwidth, bandwidth("10mbit", "20mbit"));
    let spec = resolve(&policy, &id(), &request(bandwidth("", "1mbit"))).expect("valid");
    assert_eq!(spec.bandwidth, bandwidth("100mbit", "1mbit"));
    let higher = request(bandwidth("101mbit", ""));
    let mistakes = resolve(&policy, &id(), &higher).expect_err("more than the template allows");
    assert_eq!(fields(&mistakes), ["bandwidth.in"]);
    let python = policy.templates.get_mut("python").expect("a template");
    python.runtime = Some(RuntimeKind::Docker);
    python.request.network = Some(Network::Bridge);
    let mistakes = resolve(&policy, &id(), &named("python")).expect_err("Docker's link");
    assert_eq!(fields(&mistakes), ["bandwidth"]);
}

fn named(template: &str) -> SessionRequest {
    SessionRequest {
        template: Some(template.to_owned()),
        ..SessionRequest::default()
    }
}

fn fields(mistakes: &[FieldError]) -> Vec<&str> {
    mistakes
        .iter()
        .map(|mistake| mistake.field.as_str())
        .collect()
}

#[test]
fn an_empty_request_for_a_template_is_the_template_with_every_default() {
    let spec = resolve(&policy(), &id(), &named("python")).expect("a spec");
    assert_eq!(spec.image, "python:demo");
    assert_eq!(spec.port, Some(8_080));
    assert_eq!(spec.ready_path.as_deref(), Some("/health"));
    assert_eq!((spec.ready_timeout_s, spec.pids), (60, 256));
    assert_eq!((spec.memory_bytes, spec.cpus), (Some(256 << 20), Some(2.0)));
    assert_eq!(spec.network, Network::Loopback);
    assert_eq!(spec.binds, ["/srv/work/alice:/work"]);
    assert_eq!(
        (spec.preempt_signal.as_deref(), spec.preempt_grace_ms),
        (Some("SIGTERM"), 500)
    );
    assert_eq!(spec.runtime, RuntimeKind::Docker);
}

#[test]
fn a_request_merges_maps_and_replaces_everything_else() {
    let request = SessionRequest {
        env: Some(BTreeMap::from([("B".to_owned(), "own".to_owned())])),
        command: Some(Vec::new()),
        args: Some(vec!["x".to_owned()]),
        port: Some(None),
        binds: Some(Vec::new()),
        ..named("python")
    };
    let spec = resolve(&policy(), &id(), &request).expect("a spec");
    let env: Vec<_> = spec
        .env
        .iter()
        .map(|(k, v)| (k.as_str(), v.as_str()))
        .collect();
    assert_eq!(env, [("A", "template"), ("B", "own")]);
    assert!(spec.command.is_empty() && spec.binds.is_empty());
    // Without a port the template's path cannot be requested.
    assert_eq!((spec.port, spec.ready_path), (None, None));
}

#[test]
fn a_terminal_is_the_requests_or_the_templates_where_the_runtime_has_any() {
    let tty = |template: &str, tty| {
        let request = SessionRequest {
            image: Some("a:b".to_owned()),
            tty,
            ..named(template)
        };
        resolve(&policy(), &id(), &request).map(|spec| spec.tty)
    };
    assert_eq!(tty("python", None), Ok(false));
    assert_eq!(tty("python", Some(true)), Ok(true));
    assert_eq!(tty("bare", Some(false)), Ok(false));
    let mistakes = tty("bare", Some(true)).expect_err("processes have none");
    assert_eq!(fields(&mistakes), ["tty"]);
}

#[test]
fn every_mistake_is_told_at_once_by_its_field() {
    let request = SessionRequest {
        template: Some("pyton".to_owned()),
        image: Some("Not An Image".to_owned()),
        command: Some(vec![String::new(), "a\0b".to_owned()]),
        env: Some(BTreeMap::from([
            ("CONMAN_ID".to_owned(), String::new()),
            ("A=B".to_owned(), String::new()),
            ("C".to_owned(), "\0".to_owned()),
        ])),
        port: Some(Some(0)),
        ready_path: Some("health".to_owned()),
        ready_timeout_s: Some(0),
        memory_bytes: Some(1),
        cpus: Some(f64::NAN),
        pids: Some(1_001),
        labels: Some(BTreeMap::from([("Team".to_owned(), "x".to_owned())])),
        binds: Some(vec!["/etc:/etc".to_owned()]),
        preempt_signal: Some("SIGNOPE".to_owned()),
        preempt_grace_ms: Some(60_001),
        ..SessionRequest::default()
    };
    let mistakes = resolve(&policy(), &id(), &request).expect_err("many mistakes");
    let mut found = fields(&mistakes);
    found.sort_unstable();
    assert_eq!(
        found,
        [
            "binds[0]",
            "command[0]",
            "command[1]",
            "cpus",
            "env.A=B",
            "env.C",
            "env.CONMAN_ID",
            "image",
            "labels.Team",
            "memory_bytes",
            "pids",
            "port",
            "preempt_grace_ms",
            "preempt_signal",
            "ready_path",
            "ready_timeout_s",
            "template",
        ]
    );
    let told = |field: &str| {
        let found = mistakes.iter().find(|mistake| mistake.field == field);
        found
            .map(|mistake| mistake.message.as_str())
            .unwrap_or_default()
    };
    assert_eq!(
        told("template"),
        "there is no template `pyton`; did you mean `python`? This node's templates are: bare, \
         python"
    );
    assert_eq!(told("pids"), "is 1001; must be 1 to 1000");
    assert_eq!(
        told("memory_bytes"),
        "is 1; must be 6291456 (6 MiB) to 1073741824 (1 GiB)"
    );
    assert_eq!(told("cpus"), "is NaN; must be 0.01 to 2");
    assert!(
        told("binds[0]").contains("must be /srv/work or lie below"),
        "{}",
        told("binds[0]")
    );
    assert!(
        told("preempt_signal").contains("SIGTERM"),
        "{}",
        told("preempt_signal")
    );
}

#[test]
fn an_unknown_template_like_none_of_the_known_lists_them() {
    let mistakes = resolve(&policy(), &id(), &named("zzz")).expect_err("no such template");
    assert_eq!(
        mistakes[0].message,
        "there is no template `zzz`. This node's templates are: bare, python"
    );
}

#[test]
fn what_the_missing_part_would_have_supplied_is_not_reported_as_missing() {
    let half = SessionRequest {
        ready_path: Some("/".to_owned()),
        preempt_grace_ms: Some(1),
        ..SessionRequest::default()
    };
    let unknown = SessionRequest {
        template: Some("zzz".to_owned()),
        ..half.clone()
    };
    let mistakes = resolve(&policy(), &id(), &unknown).expect_err("no such template");
    assert_eq!(fields(&mistakes), ["template"]);

    let mut policy = policy();
    let template = Template {
        request: half,
        ..Template::default()
    };
    policy.templates.insert("half".to_owned(), template);
    assert_eq!(policy.mistakes(), []);
}

#[test]
fn a_session_without_an_image_is_refused_unless_its_runtime_needs_none() {
    let mistakes = resolve(&policy(), &id(), &SessionRequest::default()).expect_err("no image");
    assert_eq!(fields(&mistakes), ["image"]);
    let spec = resolve(&policy(), &id(), &named("bare")).expect("a spec");
    assert_eq!(spec.runtime, RuntimeKind::Process);
}

#[test]
fn contradictions_are_refused() {
    let image = || SessionRequest {
        image: Some("a".to_owned()),
        ..SessionRequest::default()
    };
    let path = SessionRequest {
        ready_path: Some("/".to_owned()),
        ..image()
    };
    assert_eq!(
        fields(&resolve(&policy(), &id(), &path).expect_err("no port")),
        ["ready_path"]
    );
    let grace = SessionRequest {
        preempt_grace_ms: Some(1),
        ..image()
    };
    assert_eq!(
        fields(&resolve(&policy(), &id(), &grace).expect_err("no signal")),
        ["preempt_grace_ms"]
    );
    let bridge = SessionRequest {
        network: Some(Network::Bridge),
        ..named("bare")
    };
    assert_eq!(
        fields(&resolve(&policy(), &id(), &bridge).expect_err("no bridge")),
        ["network"]
    );
    let twice = SessionRequest {
        binds: Some(vec![
            "/srv/work/a:/w".to_owned(),
            "/srv/work/b:/w:ro".to_owned(),
        ]),
        ..image()
    };
    assert_eq!(
        fields(&resolve(&policy(), &id(), &twice).expect_err("same target")),
        ["binds[1]"]
    );
}

#[test]
fn without_a_limit_of_the_node_a_session_may_go_without_one() {
    let policy = SpecPolicy::default();
    let request = SessionRequest {
        image: Some("a".to_owned()),
        ..SessionRequest::default()
    };
    let spec = resolve(&policy, &id(), &request).expect("a spec");
    assert_eq!((spec.memory_bytes, spec.cpus), (None, None));
}

#[test]
fn a_flood_of_mistakes_is_counted_instead_of_told() {
    let labels = (0..300)
        .map(|n| (format!("UPPER{n}"), "x".to_owned()))
        .collect();
    let request = SessionRequest {
        labels: Some(labels),
        ..named("python")
    };
    let mistakes = resolve(&policy(), &id(), &request).expect_err("300 mistakes");
    assert_eq!(mistakes.len(), MAX_MISTAKES + 1);
    assert_eq!(
        mistakes[MAX_MISTAKES].message,
        "251 more mistakes are not listed"
    );
}

#[test]
fn the_same_outcome_matches_whatever_template_it_came_from() {
    let spec = resolve(&policy(), &id(), &named("python")).expect("a spec");
    let other = ResolvedSpec {
        template: None,
        ..spec.clone()
    };
    assert!(matches(&spec, &other));
    assert!(!matches(
        &spec,
        &ResolvedSpec {
            port: None,
            ..other
        }
    ));
}

#[test]
fn a_good_policy_has_no_mistakes_and_a_bad_one_names_them_all() {
    assert_eq!(policy().mistakes(), []);
    let mut bad = policy();
    bad.default_ready_timeout_s = 601;
    bad.default_memory_bytes = Some(2 << 30);
    let broken = SessionRequest {
        template: Some("python".to_owned()),
        image: Some("?".to_owned()),
        cpus: Some(3.0),
        pids: Some(1),
        memory_bytes: Some(6 << 20),
        ..SessionRequest::default()
    };
    bad.templates.insert(
        "bad".to_owned(),
        Template {
            request: broken,
            ..Template::default()
        },
    );
    bad.templates.remove("bare");
    bad.templates.remove("python");
    assert_eq!(
        fields(&bad.mistakes()),
        [
            "default_ready_timeout_s",
            "default_memory_bytes",
            "templates.bad.template",
            "templates.bad.image",
            "templates.bad.cpus",
        ]
    );

    let wrong_bounds = SpecPolicy {
        bind_roots: vec![
            PathBuf::from("/"),
            PathBuf::from("a"),
            PathBuf::from("/a/../b"),
        ],
        max_cpus: Some(f64::INFINITY),
        max_pids: 0,
        max_memory_bytes: Some(1),
        ..SpecPolicy::default()
    };
    assert_eq!(
        fields(&wrong_bounds.mistakes()),
        [
            "bind_roots[0]",
            "bind_roots[1]",
            "bind_roots[2]",
            "max_memory_bytes",
            "max_cpus",
            "max_pids"
        ]
    );
}

#[test]
fn only_a_template_of_native_sessions_allows_own_filters() {
    let mut policy = SpecPolicy {
        default_runtime: RuntimeKind::Native,
        ..policy()
    };
    let own = |policy: &SpecPolicy| {
        let request = SessionRequest {
            template: Some("python".to_owned()),
            ..SessionRequest::default()
        };
        let spec = resolve(policy, &id(), &request);
        spec.map(|spec| spec.own_filters)
    };
    assert_eq!(own(&policy), Ok(false));
    let template = policy.templates.get_mut("python").expect("there");
    template.own_filters = true;
    assert_eq!(own(&policy), Ok(true));
    let template = policy.templates.get_mut("python").expect("there");
    template.runtime = Some(RuntimeKind::Docker);
    let mistakes = own(&policy).expect_err("refused");
    assert_eq!(fields(&mistakes), ["own_filters"]);
}

#[test]
fn only_a_template_of_native_sessions_chooses_its_view_its_durability_and_its_privileges() {
    let mut policy = SpecPolicy {
        default_runtime: RuntimeKind::Native,
        ..policy()
    };
    let resolved = |policy: &SpecPolicy| {
        let request = SessionRequest {
            template: Some("python".to_owned()),
            ..SessionRequest::default()
        };
        let spec = resolve(policy, &id(), &request);
        spec.map(|spec| {
            assert_eq!(spec.pool, policy.templates["python"].pool.unwrap_or(0));
            (spec.sys, spec.durable, spec.new_privs, spec.without_ipc)
        })
    };
    assert_eq!(resolved(&policy), Ok((true, false, false, false)));
    let template = policy.templates.get_mut("python").expect("there");
    template.sys = Some(false);
    template.durable = Some(true);
    template.no_new_privs = Some(false);
    template.ipc = Some(false);
    template.pool = Some(64);
    assert_eq!(resolved(&policy), Ok((false, true, true, true)));
    policy.templates.get_mut("python").expect("there").pool = Some(65);
    let mistakes = resolved(&policy).expect_err("refused");
    assert_eq!(fields(&mistakes), ["pool"]);
    let template = policy.templates.get_mut("python").expect("there");
    template.runtime = Some(RuntimeKind::Docker);
    let mistakes = resolved(&policy).expect_err("refused");
    let refused = ["pool", "sys", "durable", "no_new_privs", "ipc"];
    assert_eq!(fields(&mistakes), refused);
}

/// A number near the bounds or anywhere.
fn numbers() -> impl Strategy<Value = Option<u32>> {
    proptest::option::weighted(0.6, prop_oneof![0_u32..1_200, any::<u32>()])
}

fn texts() -> impl Strategy<Value = String> {
    prop_oneof!["[a-z0-9./:_-]{0,12}", "\\PC{0,8}", "[\\x00-\\x20=]{0,4}"]
}

fn maps() -> impl Strategy<Value = Option<BTreeMap<String, String>>> {
    proptest::option::of(prop_oneof![
        4 => proptest::collection::btree_map("[a-z/._-]{1,6}", "[a-z]{0,6}", 0..4),
        1 => proptest::collection::btree_map(texts(), texts(), 0..4),
    ])
}

prop_compose! {
    fn programs()(
        template in proptest::option::of(prop_oneof![
            Just("python".to_owned()), Just("bare".to_owned()), texts()
        ]),
        image in proptest::option::of(prop_oneof![Just("a:b".to_owned()), texts()]),
        command in proptest::option::of(proptest::collection::vec(texts(), 0..4)),
        args in proptest::option::of(proptest::collection::vec(texts(), 0..4)),
        env in maps(),
        labels in maps(),
        port in proptest::option::of(proptest::option::of(prop_oneof![0_u16..3, any::<u16>()])),
        ready_path in proptest::option::weighted(0.2, prop_oneof![Just("/x".to_owned()), texts()]),
        binds in proptest::option::weighted(0.3, proptest::collection::vec(
            "(/srv/work|/etc)?(/(\\{id\\}|\\.\\.|a)){0,2}:/[a-z]{0,4}(:ro)?", 0..3
        )),
        signal in proptest::option::weighted(0.3, prop_oneof![Just("15".to_owned()), texts()]),
    ) -> SessionRequest {
        SessionRequest {
            template, image, command, args, env, labels, port, ready_path, binds,
            preempt_signal: signal,
            ..SessionRequest::default()
        }
    }
}

prop_compose! {
    fn requests()(
        program in programs(),
        ready_timeout_s in numbers(),
        pids in numbers(),
        idle_timeout_s in numbers(),
        max_lifetime_s in numbers(),
        preempt_grace_ms in proptest::option::weighted(0.2, 0_u32..70_000),
        memory_bytes in proptest::option::weighted(
            0.4, prop_oneof![(5_u64 << 20)..(2 << 30), any::<u64>()]
        ),
        cpus in proptest::option::weighted(0.4, prop_oneof![0.0_f64..3.0, any::<f64>()]),
        bridge in proptest::option::of(any::<bool>()),
    ) -> SessionRequest {
        SessionRequest {
            ready_timeout_s, pids, idle_timeout_s, max_lifetime_s, preempt_grace_ms,
            memory_bytes, cpus,
            network: bridge.map(|yes| if yes { Network::Bridge } else { Network::Loopback }),
            ..program
        }
    }
}

/// All limits, written a second time.
fn assert_within_bounds(spec: &ResolvedSpec) {
    assert_eq!(image_reference::fault(&spec.image), None, "{}", spec.image);
    assert!(spec.port != Some(0));
    assert!(
        spec.ready_path
            .as_ref()
            .is_none_or(|path| path.starts_with('/'))
    );
    assert!(spec.ready_path.is_none() || spec.port.is_some());
    assert!((1..=600).contains(&spec.ready_timeout_s));
    assert!((1..=1_000).contains(&spec.pids));
    assert!(
        spec.memory_bytes
            .is_some_and(|bytes| (6 << 20..=1 << 30).contains(&bytes))
    );
    assert!(spec.cpus.is_some_and(|cpus| (0.01..=2.0).contains(&cpus)));
    assert!(
        spec.command
            .iter()
            .chain(&spec.args)
            .all(|item| !item.contains('\0'))
    );
    for (name, value) in &spec.env {
        assert!(!name.is_empty() && !name.contains(['=', '\0']), "{name:?}");
        assert!(
            !name.starts_with("CONMAN_") && !value.contains('\0'),
            "{name:?}"
        );
    }
    for (key, value) in &spec.labels {
        assert!(
            (1..=63).contains(&key.len()) && value.len() <= 253,
            "{key:?}"
        );
        assert!(!has_control(value), "{value:?}");
    }
    for text in &spec.binds {
        let bind = Bind::parse(text).expect("a resolved bind reads back");
        let root = Path::new("/srv/work");
        assert!(bind.source.starts_with(root), "{text}");
        assert!(!text.contains("..") && !text.contains('{'), "{text}");
    }
    assert!(
        spec.preempt_signal
            .as_ref()
            .is_none_or(|name| name.starts_with("SIG"))
    );
    assert!(spec.preempt_grace_ms <= 60_000);
    assert!(spec.preempt_grace_ms == 0 || spec.preempt_signal.is_some());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn whatever_is_asked_nothing_panics_and_what_is_accepted_keeps_all_bounds(
        request in requests(),
    ) {
        match resolve(&policy(), &id(), &request) {
            Ok(spec) => {
                assert_within_bounds(&spec);
                prop_assert!(matches(&spec, &spec));
            }
            Err(mistakes) => {
                prop_assert!(!mistakes.is_empty());
                for mistake in mistakes {
                    prop_assert!(!mistake.message.is_empty());
                    prop_assert!(!has_control(&mistake.field) && !has_control(&mistake.message));
                }
            }
        }
    }

    #[test]
    fn sizes_at_the_bounds_are_accepted_and_beyond_them_refused(over: bool) {
        let extra = usize::from(over);
        let checks: [SessionRequest; 5] = [
            SessionRequest { args: Some(vec![String::new(); 255 + extra]), ..named("python") },
            SessionRequest {
                // The template's program takes 8 bytes, the NUL one.
                args: Some(vec!["a".repeat(MAX_ARGUMENT_BYTES - 9 + extra)]),
                ..named("python")
            },
            SessionRequest {
                // The template's two variables take 22 bytes.
                env: Some(BTreeMap::from([(
                    "X".to_owned(),
                    "v".repeat(MAX_ENV_BYTES - 22 - 3 + extra),
                )])),
                ..named("python")
            },
            SessionRequest {
                env: Some((0..254 + extra).map(|n| (format!("N{n}"), String::new())).collect()),
                ..named("python")
            },
            SessionRequest {
                labels: Some((0..64 + extra).map(|n| (format!("n{n}"), String::new())).collect()),
                ..named("python")
            },
        ];
        for request in checks {
            prop_assert_eq!(resolve(&policy(), &id(), &request).is_err(), over);
        }
        prop_assert!(HIGHEST_MAX_CPUS > 1.0);
    }
}

#[test]
fn what_becomes_of_a_session_without_its_node_is_the_requests_or_the_templates_to_say() {
    let asked = |template: &str, on_node_loss| {
        let request = SessionRequest {
            on_node_loss,
            ..named(template)
        };
        resolve(&policy(), &id(), &request)
            .expect("valid")
            .on_node_loss
    };
    assert_eq!(asked("python", None), OnNodeLoss::Wait);
    let restart = Some(OnNodeLoss::Restart);
    assert_eq!(asked("python", restart), OnNodeLoss::Restart);
    let mut policy = policy();
    let python = policy.templates.get_mut("python").expect("it is there");
    python.request.on_node_loss = restart;
    let resolved = |request| resolve(&policy, &id(), &request).expect("valid");
    assert_eq!(resolved(named("python")).on_node_loss, OnNodeLoss::Restart);
    let waits = SessionRequest {
        on_node_loss: Some(OnNodeLoss::Wait),
        ..named("python")
    };
    assert_eq!(resolved(waits).on_node_loss, OnNodeLoss::Wait);
}

#[test]
fn disk_limits_are_the_native_runtimes_and_hold_when_nobody_says_otherwise() {
    let native = SpecPolicy {
        default_runtime: RuntimeKind::Native,
        max_disk_bytes: Some(20 << 30),
        ..policy()
    };
    let id = "alice".parse().expect("a session id");
    let mut request = SessionRequest {
        template: Some("python".to_owned()),
        ..SessionRequest::default()
    };
    let spec = resolve(&native, &id, &request).expect("a spec");
    assert_eq!(
        (spec.disk_bytes, spec.disk_inodes),
        (Some(10 << 30), Some(655_360))
    );
    request.disk_bytes = Some(21 << 30);
    request.disk_inodes = Some(1);
    let mistakes = resolve(&native, &id, &request).expect_err("beyond the bounds");
    assert_eq!(fields(&mistakes), ["disk_bytes", "disk_inodes"]);
    // Sessions of Docker and bare processes have none.
    let mistakes = resolve(&policy(), &id, &request).expect_err("no such limits");
    assert_eq!(fields(&mistakes), ["disk_bytes", "disk_inodes"]);
}

#[test]
fn terminals_are_limited_by_the_native_runtime_alone() {
    let native = SpecPolicy {
        default_runtime: RuntimeKind::Native,
        ..policy()
    };
    let asked = |policy: &SpecPolicy, ptys| {
        let request = SessionRequest {
            ptys,
            ..named("python")
        };
        let spec = resolve(policy, &id(), &request);
        spec.map(|spec| (spec.ptys, spec.ptys_when_asked))
    };
    assert_eq!(asked(&native, None), Ok((4, true)));
    assert_eq!(asked(&native, Some(4)), Ok((4, false)));
    assert_eq!(asked(&native, Some(0)), Ok((0, false)));
    assert_eq!(asked(&policy(), None), Ok((0, false)));
    // Its programs expect the terminal's name.
    let request = SessionRequest {
        tty: Some(true),
        ..named("python")
    };
    let spec = resolve(&native, &id(), &request).expect("allowed");
    assert_eq!((spec.ptys, spec.ptys_when_asked), (4, false));
    for (policy, ptys) in [(&native, 4_097), (&policy(), 16)] {
        let mistakes = asked(policy, Some(ptys)).expect_err("not allowed");
        assert_eq!(fields(&mistakes), ["ptys"]);
    }
}
