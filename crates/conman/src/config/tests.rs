//! Tests of the configuration.

use std::path::Path;

use conman_core::Template;
use conman_core::egress::{EgressRules, NamedBy};
use conman_proto::OnNodeLoss;

use super::load::{ConfigError, parse};
use super::{Config, OnSigterm};

fn mistakes(text: &str) -> String {
    match parse(text, Some(Path::new("conman.toml"))) {
        Ok(config) => panic!("accepted: {config:?}"),
        Err(error @ ConfigError::Wrong { .. }) => error.to_string(),
        Err(error) => panic!("{error}"),
    }
}

pub(crate) fn accepted(text: &str) -> Config {
    parse(text, None).unwrap_or_else(|error| panic!("{error}"))
}

const EXAMPLE: &str = include_str!(concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../deploy/conman.example.toml"
));

#[test]
fn the_example_holds_the_defaults() {
    assert_eq!(
        format!("{:?}", accepted(EXAMPLE)),
        format!("{:?}", accepted(""))
    );
}

#[test]
fn every_line_that_the_example_comments_out_is_accepted() {
    let uncommented: String = EXAMPLE
        .lines()
        .map(|line| match line.strip_prefix("# ") {
            // Sentences stay comments; keys and table heads do not.
            Some(rest) if rest.starts_with('[') || rest.split(' ').nth(1) == Some("=") => rest,
            _ => line,
        })
        .map(|line| format!("{line}\n"))
        .collect();
    let uncommented = uncommented.replace("allow = []", "allow = [\"/srv\"]");
    let config = accepted(&uncommented);
    assert_eq!(config.name, "worker-17");
    assert!(config.tokens_file.is_some() && config.listen.secure_urls);
    let template: &Template = &config.policy.templates["python"];
    assert!(template.start_on_connect);
    assert_eq!(template.request.port, Some(Some(8080)));
    assert_eq!(template.request.on_node_loss, Some(OnNodeLoss::Wait));
}

#[test]
fn sessions_are_limited_where_neither_spec_nor_configuration_limits_them() {
    let memory = |text: &str| accepted(text).policy.default_memory_bytes;
    assert_eq!(memory(""), Some(512 << 20));
    assert_eq!(
        memory("[limits]\nmax_memory_bytes = 8388608\n"),
        Some(8_388_608)
    );
    assert_eq!(
        memory("[limits]\ndefault_memory_bytes = 8388608\n"),
        Some(8_388_608)
    );
    let config = accepted("");
    assert_eq!(config.policy.default_pids, 256);
    let host = std::thread::available_parallelism().expect("known").get();
    let total = config.limits.total_cpus;
    assert!(total > 0.0 && total < host as f64, "{total} of {host}");
    assert!(mistakes("[limits]\ntotal_cpus = 0\n").contains("`limits.total_cpus` is 0"));
}

#[test]
fn ids_of_binds_are_no_sessions_ids() {
    let config = accepted("[binds]\nfirst_id = 0x7100_0000\n");
    assert_eq!(config.bind_first_id, 0x7100_0000);
    let text = mistakes("[binds]\nfirst_id = 2147549184\n");
    assert!(
        text.contains("overlap `node.id_range`, 2147483648-3221225471"),
        "{text}"
    );
    let text = mistakes("[binds]\nfirst_id = 1000\n[node]\nid_range = \"100000-165535\"\n");
    for part in [
        "`binds.first_id` is 1000",
        "`node.id_range` must begin at a multiple of 65536",
    ] {
        assert!(text.contains(part), "{text}");
    }
    let config = accepted("[node]\nid_range = \"1073741824-1074003967\"\n");
    assert_eq!(config.id_range.ranges(), 4);
}

#[test]
fn a_template_says_what_becomes_of_its_sessions_without_their_node() {
    let config = accepted("[templates.a]\nimage = \"a\"\non_node_loss = \"restart\"\n");
    let request = &config.policy.templates["a"].request;
    assert_eq!(request.on_node_loss, Some(OnNodeLoss::Restart));
    let text = mistakes("[templates.a]\nimage = \"a\"\non_node_loss = \"resume\"\n");
    assert!(
        text.contains("conman.toml:3: `templates.a.on_node_loss` is \"resume\", but must be \"wait\" or \"restart\""),
        "{text}"
    );
}

#[test]
fn every_mistake_is_told_at_once_with_its_line() {
    let text = mistakes(
        "[node]\nruntim = \"docker\"\nstate_dir = \"var/lib\"\n[limits]\nmax_sessions = 0\n\
         [templates.a]\nimage = \"a\"\nport = 70000\n[preempts]\n",
    );
    for part in [
        "5 mistakes",
        "conman.toml:2: `node.runtim` is not known; did you mean `runtime`?",
        "conman.toml:3: `node.state_dir` must be an absolute path",
        "conman.toml:5: `limits.max_sessions` is 0, but must be a whole number from 1 to",
        "conman.toml:8: `templates.a.port` is 70000",
        "conman.toml:9: `preempts` is not known; did you mean `preempt`?",
    ] {
        assert!(text.contains(part), "{part:?} is missing in:\n{text}");
    }
}

#[test]
fn a_value_of_the_wrong_type_is_named_with_what_it_must_be() {
    let text = mistakes(
        "listen = 1\n[node]\nname = 5\n[limits]\nmax_cpus = \"two\"\nmax_events = -1\n\
         max_pids = 0x1_0000_0000\n[docker]\nsocket = [\"/a\"]\n[fleet.labels]\na = \"1\"\n\
         b = true\n[images]\nregistries = [\n\"a\",\n1]\n[templates]\nx = \"y\"\n",
    );
    for part in [
        "9 mistakes",
        "1: `listen` is of type integer, but must be a table",
        "3: `node.name` is 5, but must be a string",
        "5: `limits.max_cpus` is \"two\", but must be a number",
        "6: `limits.max_events` is -1, but must be a whole number from 100 to 10000000",
        "7: `limits.max_pids` is 4294967296, but must be a whole number from 0 to 4294967295",
        "9: `docker.socket` is of type array, but must be a string",
        "12: `fleet.labels.b` is of type boolean, but must be a string",
        "14: `images.registries` is of type array, but must be a list that holds only strings",
        "18: `templates.x` is of type string, but must be a table",
    ] {
        assert!(text.contains(part), "{part:?} is missing in:\n{text}");
    }
    let policy = accepted("[limits]\nmax_cpus = 0x2\n").policy;
    assert_eq!(policy.max_cpus, Some(2.0));
}

#[test]
fn what_is_no_toml_is_told_with_its_line() {
    assert!(mistakes("[node]\nname = \n").contains("conman.toml:2:"));
}

#[test]
fn listening_beyond_loopback_needs_tokens() {
    let open = "[listen]\nsessions = \"0.0.0.0:7701\"\n";
    let text = mistakes(open);
    assert!(
        text.contains("conman.toml:2: `listen.sessions`") && text.contains("tokens"),
        "{text}"
    );
    accepted(&format!(
        "{open}[auth]\ntokens_file = \"/etc/conman/tokens.toml\"\n"
    ));
}

#[test]
fn the_api_is_open_only_on_loopback_and_only_without_a_token_file() {
    assert!(!accepted("").open_loopback);
    let open = "[auth]\nloopback = \"open\"\n";
    assert!(accepted(open).open_loopback);
    assert!(mistakes("[auth]\nloopback = \"yes\"\n").contains("`auth.loopback` must be"));
    let both = mistakes(&format!(
        "{open}tokens_file = \"/etc/conman/tokens.toml\"\n"
    ));
    assert!(
        both.contains("conman.toml:2: `auth.loopback` is \"open\" although"),
        "{both}"
    );
    assert!(mistakes(&format!("[listen]\napi = \"0.0.0.0:1\"\n{open}")).contains("listen.api"));
}

#[test]
fn sessions_and_the_api_never_share_an_origin() {
    let text = mistakes("[listen]\napi = \"127.0.0.1:80\"\nsessions = \"127.0.0.1:80\"\n");
    assert!(text.contains("another origin"), "{text}");
}

#[test]
fn a_template_that_no_session_could_run_is_refused_at_its_line() {
    let text = mistakes("[templates.a]\nimage = \"a\"\n\ncpus = -1\n");
    assert!(text.contains("conman.toml:4: `templates.a.cpus`"), "{text}");
}

#[test]
fn sigterm_leaves_the_sessions_unless_told_otherwise() {
    assert_eq!(accepted("").preempt.on_sigterm, OnSigterm::Leave);
    let config = accepted("[preempt]\non_sigterm = \"preempt\"\n");
    assert_eq!(config.preempt.on_sigterm, OnSigterm::Preempt);
    assert!(mistakes("[preempt]\non_sigterm = \"stop\"\n").contains("\"leave\""));
}

#[test]
fn a_url_pattern_names_the_session_by_host_or_by_path() {
    for good in ["https://{id}.example.org/", "http://[::1]:7701/s/{id}/"] {
        assert!(
            accepted(&format!("[listen]\nurl = \"{good}\"\n"))
                .listen
                .urls
                .is_some()
        );
    }
    for bad in [
        "ftp://{id}.example.org",
        "https://example.org/{id}",
        "https://{id}.{id}.x/",
    ] {
        assert!(
            mistakes(&format!("[listen]\nurl = \"{bad}\"\n")).contains("must be like"),
            "{bad}"
        );
    }
}

#[test]
fn a_fleet_needs_endpoints_and_both_halves_of_what_comes_in_pairs() {
    let text = mistakes(
        "[registry]\nkind = \"etcd\"\nuser = \"conman\"\nkey_file = \"/k\"\nprefix = \"x\"\n",
    );
    for part in [
        "4 mistakes",
        "`registry.endpoints` must name at least one endpoint of etcd",
        "3: `registry.user` needs `password_file` as well",
        "4: `registry.key_file` needs `cert_file` as well",
        "5: `registry.prefix` must begin and end with `/`",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn an_endpoint_without_a_scheme_is_a_mistake() {
    let text = mistakes(
        "[registry]\nkind = \"etcd\"\nendpoints = [\"https://10.0.0.1:2379\", \"10.0.0.2:2379\"]\n",
    );
    let expected = "3: `registry.endpoints` holds `10.0.0.2:2379`; write it as `http://HOST:PORT`";
    assert!(text.contains(expected), "{text}");
}

#[test]
fn time_outs_that_could_let_two_containers_run_are_refused_with_what_is_missing() {
    let unsafe_timing = "[registry]\nkind = \"etcd\"\nendpoints = [\"http://10.0.0.1:2379\"]\n\
                         [fleet]\ntakeover_ms = 6000\n";
    let text = mistakes(unsafe_timing);
    assert!(
        text.contains("5: `fleet.takeover_ms` is too short") && text.contains("2141 ms"),
        "{text}"
    );
    let text = mistakes("[fleet]\nrenew_ms = 2000\n");
    assert!(text.contains("at least three times `renew_ms`"), "{text}");
    let allowed = format!("{unsafe_timing}unsafe_timing = true\n");
    let shown = accepted(&allowed).to_string();
    assert!(shown.contains("NOT SAFE"), "{shown}");
}

#[test]
fn more_sessions_than_are_killed_in_time_are_refused_with_what_that_takes() {
    let fleet = "[registry]\nkind = \"etcd\"\nendpoints = [\"http://10.0.0.1:2379\"]\n";
    let limits = "[limits]\nmax_sessions = 4001\n";
    let text = mistakes(&format!("{fleet}{limits}[fleet]\nkill_ms = 2000\n"));
    for part in [
        "5: `limits.max_sessions` is 4001",
        "`fleet.kill_ms`, which is 2000, no more than 4000",
        "raise `fleet.kill_ms` to 2001",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    accepted(&format!("{fleet}{limits}[fleet]\nkill_ms = 2001\n"));
    let takeover_ms = |limits: &str| {
        let timing = accepted(&format!("{fleet}{limits}"))
            .shared
            .map(|shared| shared.timing);
        timing.expect("a fleet").takeover_ms
    };
    assert!(takeover_ms("") < 9_500);
    assert!(takeover_ms(limits) > 10_000 && takeover_ms(limits) < 11_000);
    let unsafe_timing = "[fleet]\nkill_ms = 2000\nunsafe_timing = true\n";
    accepted(&format!("{fleet}{limits}{unsafe_timing}"));
    accepted(limits);
}

#[test]
fn a_safe_fleet_tells_by_how_much() {
    let config = accepted(
        "[registry]\nkind = \"etcd\"\nendpoints = [\"http://10.0.0.1:2379\"]\n\
         [fleet]\nlabels = { pool = \"gpu\" }\n",
    );
    let shown = config.to_string();
    for part in [
        "8000 ms after the last renewal",
        "B (1 + ρ) < T (1 - ρ): (5000 + 1000 + 1000 + 1000) (1 + 0.01) = 8080 < 9475 (1 - 0.01) = 9380",
        "for 1300 ms",
    ] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    assert_eq!(config.fleet.labels["pool"], "gpu");
}

#[test]
fn the_runtime_of_the_tests_is_refused() {
    let text = mistakes("[node]\nruntime = \"process\"\n");
    assert!(
        text.contains("must be \"native\", \"gvisor\", \"docker\" or the name of a section"),
        "{text}"
    );
}

#[test]
fn an_oci_runtime_is_configured_by_the_name_that_templates_use() {
    let runtime = "[runtimes.crun]\nkind = \"oci\"\npath = \"/usr/bin/crun\"\nargs = [\"-x\"]\n";
    let template = "[templates.a]\nimage = \"a:b\"\nruntime = \"crun\"\n";
    let config = accepted(&format!("{runtime}{template}"));
    let kind = "crun".parse().expect("a name");
    assert!(config.runtimes().contains(&kind));
    let options = &config.oci[&kind];
    assert_eq!(options.program, std::path::Path::new("/usr/bin/crun"));
    assert_eq!(
        (options.is_gvisor, &*options.arguments),
        (false, &["-x".to_owned()][..])
    );
    assert!(config.oci[&conman_proto::RuntimeKind::Gvisor].is_gvisor);

    for (text, part) in [
        (template, "templates.a.runtime"),
        (template, "add `[runtimes.crun]`"),
        ("[node]\nruntime = \"youki\"\n", "add `[runtimes.youki]`"),
        ("[runtimes.native]\nkind = \"oci\"\n", "built in"),
        ("[runtimes.CRUN]\nkind = \"oci\"\n", "1 to 16 characters"),
        (
            "[runtimes.crun]\npath = \"/usr/bin/crun\"\n",
            "`runtimes.crun.kind` is missing",
        ),
        (
            "[runtimes.crun]\nkind = \"vm\"\npath = \"/a\"\n",
            "must be \"oci\"",
        ),
        (
            "[runtimes.crun]\nkind = \"oci\"\n",
            "`runtimes.crun.path` is missing",
        ),
        (
            "[runtimes.gvisor]\nkind = \"oci\"\nplatform = \"kvm\"\n",
            "platform",
        ),
    ] {
        let text = mistakes(text);
        assert!(text.contains(part), "{part}: {text}");
    }
    let text = mistakes("[runtimes.crun]\nkind = \"oci\"\npath = \"crun\"\n");
    assert!(text.contains("an absolute path"), "{text}");
    assert!(!text.contains("is missing"), "{text}");
}

#[test]
fn nodes_use_tls_by_a_secret_or_by_certificates() {
    let fleet = "[registry]\nkind = \"etcd\"\nendpoints = [\"http://10.0.0.1:2379\"]\n\
                 [listen]\npeers = \"203.0.113.1:7702\"\n[fleet]\n";
    let text = mistakes(fleet);
    for part in ["`fleet.secret_file` is missing", "urandom", "`fleet.tls`"] {
        assert!(text.contains(part), "{text}");
    }
    let secret = "secret_file = \"/etc/conman/fleet.key\"\n";
    let config = accepted(&format!("{fleet}{secret}"));
    let url = config.fleet.peer_url.expect("the listener's");
    assert_eq!(url, "https://203.0.113.1:7702");
    let text = mistakes(&format!(
        "{fleet}{secret}peer_url = \"http://10.0.0.1:7702\"\n"
    ));
    assert!(
        text.contains("`fleet.peer_url`") && text.contains("https://"),
        "{text}"
    );
    let text = mistakes(&format!(
        "{fleet}[fleet.tls]\nca = \"/etc/conman/ca.pem\"\n"
    ));
    assert!(text.contains("`fleet.tls.key` is missing"), "{text}");
}

#[test]
fn a_network_of_a_template_needs_what_the_node_must_have_for_it() {
    let template =
        |network: &str| format!("[templates.t]\nimage = \"a\"\nnetwork = \"{network}\"\n");
    assert!(mistakes(&template("host")).contains("`auth.tokens_file` must protect it"));
    let more_ports = format!("{}ports = [8080]\nport = 80\n", template("host"));
    assert!(mistakes(&more_ports).contains("only `port` is kept free"));
    assert!(
        mistakes(&template("macvlan:eth1")).contains("`net.interfaces.eth1.subnet` is missing")
    );
    assert!(mistakes(&template("vlan:eth1")).contains("macvlan:INTERFACE"));
    let wrong = "[net.interfaces.eth1]\nsubnet = \"192.168.7.0/24\"\nrange = \"192.168.8.0/26\"\n\
                 gateway = \"192.168.8.1\"\n[net.interfaces.\"a/b\"]\n";
    let wrong = mistakes(wrong);
    for text in [
        "eth1.range` must lie within",
        "eth1.gateway` must lie within",
        "a/b.subnet` is missing",
    ] {
        assert!(wrong.contains(text), "{text}: {wrong}");
    }
    let config = accepted(&format!(
        "[net.interfaces.eth1]\nsubnet = \"192.168.7.0/24\"\n{}",
        template("macvlan:eth1")
    ));
    assert_eq!(config.net.interfaces.len(), 1);
}

#[test]
fn a_wide_egress_list_does_not_open_other_sessions_and_the_nodes_etcd() {
    let config = accepted(
        "[net]\npool = [\"10.88.0.0/16\"]\nallow_addresses = [\"10.0.0.0/8\"]\n\
         [registry]\nkind = \"etcd\"\nendpoints = [\"http://10.0.0.11:2379\"]\n\
         [listen]\npeers = \"127.0.0.1:7702\"\n[fleet]\nsecret_file = \"/etc/conman/fleet.key\"\n",
    );
    let special = &config.net.egress.special;
    let rules = EgressRules::parse(&["10.0.0.0/8:5432".to_owned(), "internet".to_owned()]);
    let rules = rules.expect("patterns");
    let allows = |address: &str| {
        let address = address.parse().expect("an address");
        let allowed = rules.allow_address(address, 5432, NamedBy::Address, special, false);
        allowed.is_ok()
    };
    assert!(allows("10.1.2.3"));
    assert!(!allows("10.88.0.7"), "another session");
    assert!(!allows("10.0.0.11"), "etcd");
}

#[test]
fn sessions_that_talk_need_a_fabric_and_a_fabric_needs_a_fleet_and_a_pool_for_all() {
    let template = "[templates.a]\nimage = \"i\"\nnetwork = \"routed\"\ntalk = [\"team\"]\n";
    let own = "pool = [\"10.88.0.0/16\"]\n";
    let fleet = "[registry]\nkind = \"etcd\"\nendpoints = [\"http://10.0.0.11:2379\"]\n\
                 [listen]\npeers = \"127.0.0.1:7702\"\n[fleet]\nsecret_file = \"/etc/conman/fleet.key\"\n";
    let fabric = |fields: &str| format!("[net]\n{own}[net.fabric]\n{fields}\n{fleet}{template}");
    for (text, wrong) in [
        (format!("[net]\n{own}{template}"), "needs `net.fabric`"),
        (
            format!("[net]\n{own}[net.fabric]\nkind = \"vxlan\"\npool = [\"10.96.0.0/12\"]\n"),
            "needs `registry.kind = \"etcd\"`",
        ),
        (fabric("kind = \"host-gw\""), "the same on every node"),
        (
            fabric("kind = \"vxlan\"\npool = [\"10.80.0.0/12\"]"),
            "overlaps `net.pool`, 10.88.0.0/16",
        ),
        (
            fabric("kind = \"vxlan\"\npool = [\"10.96.0.0/24\"]"),
            "longer than the prefix of the pool",
        ),
        (
            fabric("kind = \"gre\""),
            "\"none\", \"host-gw\" or \"vxlan\"",
        ),
    ] {
        let found = mistakes(&text);
        assert!(found.contains(wrong), "{wrong}: {found}");
    }
    let config = accepted(&fabric("kind = \"vxlan\"\npool = [\"10.96.0.0/12\"]"));
    let special = &config.net.egress.special.more;
    let pool = "10.96.0.0/12".parse().expect("a network");
    assert!(special.contains(&pool), "out of reach of `egress`");
    assert!(config.net.fabric.is_some_and(|fabric| fabric.part == 24));
}

#[test]
fn a_templates_bandwidth_is_a_rate_for_each_direction() {
    let template =
        |bandwidth: &str| format!("[templates.a]\nimage = \"i\"\nbandwidth = {{ {bandwidth} }}\n");
    let config = accepted(&template("in = \"100mbit\", out = \"20mbit\""));
    let bandwidth = config.policy.templates["a"].request.bandwidth;
    let bandwidth = bandwidth.expect("read");
    assert_eq!(bandwidth.inward, "100mbit".parse().ok());
    assert_eq!(bandwidth.outward, "20mbit".parse().ok());
    for (wrong, found) in [
        (
            "in = \"100\"",
            "`templates.a.bandwidth.in` is \"100\", but must be a rate",
        ),
        ("up = \"1mbit\"", "`templates.a.bandwidth.up` is not known"),
    ] {
        let mistakes = mistakes(&template(wrong));
        assert!(mistakes.contains(found), "{found}: {mistakes}");
    }
}
