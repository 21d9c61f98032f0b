//! Tests of the rules for what a session may connect to.

use proptest::prelude::*;

use super::*;

fn rules(patterns: &[&str]) -> EgressRules {
    let patterns: Vec<String> = patterns.iter().map(|&text| text.to_owned()).collect();
    EgressRules::parse(&patterns).expect("patterns")
}

fn pattern(text: &str) -> EgressPattern {
    text.parse().expect("a pattern")
}

/// Whether rules allow a literal address, which is not the host's.
fn literal(rules: &EgressRules, address: &str, port: u16) -> Result<(), EgressRefusal> {
    let special = SpecialAddresses::default();
    let address = address.parse().expect("an address");
    rules.allow_address(address, port, NamedBy::Address, &special, false)
}

#[test]
fn a_star_covers_names_below_and_not_the_name_itself() {
    let rules = rules(&["*.example.com:443", "packages.example.org:8080"]);
    for name in ["a.example.com", "a.b.example.com"] {
        assert_eq!(rules.allow_name(name, 443), Ok(()), "{name}");
    }
    for name in [
        "example.com",
        "badexample.com",
        ".example.com",
        "example.com.evil.org",
    ] {
        let refused = Err(EgressRefusal::NotListed);
        assert_eq!(rules.allow_name(name, 443), refused, "{name}");
        assert!(!rules.may_look_up(name), "{name}");
    }
    assert!(rules.allow_name("packages.example.org", 443).is_err());
    assert!(rules.allow_name("packages.example.org", 8080).is_ok());
    assert!(literal(&rules, "198.35.26.96", 443).is_err(), "only names");
}

#[test]
fn a_pattern_is_shown_as_it_is_parsed() {
    for text in [
        "internet",
        "packages.example.org:443",
        "*.example.com:80",
        "10.1.0.0/16:5432",
        "192.0.2.1/32:80",
        "[fd00:1::/32]:443",
    ] {
        assert_eq!(pattern(text).to_string(), text);
    }
    assert_eq!(pattern("Example.ORG.:443").to_string(), "example.org:443");
    assert_eq!(pattern("10.1.2.3:1").to_string(), "10.1.2.3/32:1");
    assert_eq!(pattern("[::1]:1").to_string(), "[::1/128]:1");
}

#[test]
fn a_pattern_that_cannot_be_parsed_is_refused_with_the_remedy() {
    for (text, remedy) in [
        ("", "HOST:PORT"),
        ("https://example.org", "without a scheme"),
        ("example.org", "append one"),
        ("example.org:", "append one"),
        ("example.org:0", "append one"),
        ("example.org:65536", "append one"),
        ("example.org:+1", "append one"),
        ("a.*.org:443", "first label"),
        ("*:443", "first label"),
        ("*.10.0.0.1:443", "first label"),
        ("2001:db8::1:443", "brackets"),
        ("10.1.2.3/16:443", "10.1.0.0/16"),
        ("10.1.2.3/33:443", "not a network"),
        ("[::ffff:10.0.0.0/104]:443", "not a network"),
        ("[example.org]:443", "not a network"),
        ("[::1:443", "not a network"),
        ("0x7f.1:443", "four decimal numbers"),
        ("exa mple.org:443", "without a scheme"),
        ("exämple.org:443", "host name"),
        ("example..org:443", "host name"),
    ] {
        let error = text.parse::<EgressPattern>().expect_err(text).to_string();
        assert!(error.contains(remedy), "{text}: {error}");
    }
}

#[test]
fn a_host_in_an_old_notation_of_ipv4_is_neither_a_name_nor_an_address() {
    for text in [
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "127.1",
        "0x7f.1",
        "1.2.3.4.5",
    ] {
        assert_eq!(
            TargetHost::parse(text),
            Err(HostError::NotAnAddress),
            "{text}"
        );
    }
    for text in [
        "",
        ".",
        "a b",
        "a%00b",
        "fe80::1%eth0",
        "[::1",
        "a\r\nb",
        "-\u{e4}",
    ] {
        assert_eq!(TargetHost::parse(text), Err(HostError::NotAName), "{text}");
    }
    let mapped = TargetHost::parse("[::ffff:169.254.169.254]");
    let metadata = "169.254.169.254".parse().expect("an address");
    assert_eq!(mapped, Ok(TargetHost::Address(metadata)));
}

#[test]
fn special_addresses_are_out_of_reach_of_names_and_internet() {
    let rules = rules(&["internet", "0.0.0.0/0:80", "[::/0]:80"]);
    for address in [
        "169.254.169.254",
        "fd00:ec2::254",
        "fd20:ce::254",
        "::ffff:169.254.169.254",
        "::169.254.169.254",
        "64:ff9b::a9fe:a9fe",
        "2002:a9fe:a9fe::1",
        "127.0.0.1",
        "127.255.0.1",
        "::1",
        "0.0.0.0",
        "::",
        "10.0.0.1",
        "100.100.100.200",
        "168.63.129.16",
        "172.31.0.1",
        "192.168.1.1",
        "224.0.0.1",
        "255.255.255.255",
        "fe80::1",
        "fc00::1",
        "ff02::1",
    ] {
        let refusal = literal(&rules, address, 80).expect_err(address);
        assert!(matches!(refusal, EgressRefusal::Special(_)), "{address}");
    }
    for address in ["198.35.26.96", "2620:0:863:ed1a::1", "168.63.129.17"] {
        assert_eq!(literal(&rules, address, 80), Ok(()), "{address}");
    }
}

#[test]
fn a_network_opens_a_special_range_only_if_it_is_within_that_range() {
    let listed = rules(&["10.0.0.0/8:80", "169.254.169.254:80", "[fc00::/7]:80"]);
    for address in ["10.1.2.3", "169.254.169.254", "fd12::1"] {
        assert_eq!(literal(&listed, address, 80), Ok(()), "{address}");
    }
    assert_eq!(
        literal(&listed, "10.1.2.3", 81),
        Err(EgressRefusal::NotListed)
    );
    let metadata = literal(&listed, "fd00:ec2::254", 80);
    assert_eq!(metadata, Err(EgressRefusal::NotListed), "fc00::/7 is wider");
    let special = SpecialAddresses {
        more: vec!["10.9.0.0/16".parse().expect("a network")],
        allowed: Vec::new(),
    };
    let reach = |address: &str, is_hosts| {
        let address = address.parse().expect("an address");
        listed.allow_address(address, 80, NamedBy::Name, &special, is_hosts)
    };
    assert!(reach("10.1.2.3", false).is_ok());
    assert!(reach("10.1.2.3", true).is_err(), "the host's own");
    assert!(reach("10.9.0.1", false).is_err(), "another session's");
    assert!(reach("169.254.169.254", true).is_ok(), "listed by itself");
}

#[test]
fn the_resolver_leaves_out_the_hosts_addresses_unless_they_are_listed() {
    let listed = rules(&["*.test:80", "192.0.2.7:443", "192.0.2.0/24:80"]);
    let learns = |address: &str, is_hosts| {
        let address = address.parse().expect("an address");
        listed.may_learn(address, &SpecialAddresses::default(), is_hosts)
    };
    assert!(learns("10.1.2.3", false));
    assert!(!learns("10.1.2.3", true));
    assert!(!learns("192.0.2.8", true), "only its network is listed");
    assert!(learns("192.0.2.7", true), "listed by itself");
}

#[test]
fn the_operator_may_allow_special_addresses_for_the_whole_node() {
    let special = SpecialAddresses {
        more: Vec::new(),
        allowed: vec!["10.0.0.0/8".parse().expect("a network")],
    };
    let private = "10.0.0.1".parse().expect("an address");
    let reach = |patterns: &[&str], is_hosts| {
        rules(patterns).allow_address(private, 80, NamedBy::Address, &special, is_hosts)
    };
    assert_eq!(reach(&["internet"], false), Ok(()));
    assert_eq!(
        reach(&["internet"], true),
        Err(EgressRefusal::Special(private))
    );
    assert_eq!(
        reach(&["example.org:80"], false),
        Err(EgressRefusal::NotListed)
    );
}

#[test]
fn a_pattern_covers_no_more_than_it_allows() {
    for (wide, narrow) in [
        ("internet", "*.example.org:1"),
        ("*.example.org:1", "a.example.org:1"),
        ("*.example.org:1", "*.a.example.org:1"),
        ("10.0.0.0/8:1", "10.0.0.0/8:1"),
    ] {
        assert!(pattern(wide).covers(&pattern(narrow)), "{wide} {narrow}");
        assert!(!pattern(narrow).covers(&pattern(wide)) || wide == narrow);
    }
    for (wide, narrow) in [
        ("internet", "10.0.0.0/8:1"),
        ("*.example.org:1", "example.org:1"),
        ("example.org:1", "*.example.org:1"),
        ("*.example.org:1", "a.example.org:2"),
        ("10.0.0.0/8:1", "10.0.0.1:1"),
    ] {
        assert!(!pattern(wide).covers(&pattern(narrow)), "{wide} {narrow}");
    }
}

fn names() -> impl Strategy<Value = String> {
    proptest::collection::vec("[ab]{1,2}", 1..4).prop_map(|labels| labels.join("."))
}

fn name_patterns() -> impl Strategy<Value = EgressPattern> {
    (any::<bool>(), names(), 1_u16..3).prop_map(|(below, name, port)| EgressPattern::Name {
        below,
        name,
        port,
    })
}

proptest! {
    #[test]
    fn what_a_covered_pattern_allows_its_cover_allows(
        wide in name_patterns(), narrow in name_patterns(), name in names(), port in 1_u16..3,
    ) {
        let allows = |pattern: &EgressPattern| {
            EgressRules { patterns: vec![pattern.clone()] }.allow_name(&name, port).is_ok()
        };
        if wide.covers(&narrow) && allows(&narrow) {
            prop_assert!(allows(&wide));
        }
    }

    #[test]
    fn every_pattern_that_is_parsed_is_parsed_again_from_what_it_shows(text in "[a-b0-9:/.*\\[\\]]{0,24}") {
        if let Ok(pattern) = text.parse::<EgressPattern>() {
            prop_assert_eq!(Ok(pattern.clone()), pattern.to_string().parse());
        }
    }

    #[test]
    fn no_wide_network_reaches_a_special_address(bits in any::<u32>(), port in 1_u16..3) {
        let address = std::net::Ipv4Addr::from(bits);
        let wide = rules(&["0.0.0.0/0:1", "0.0.0.0/0:2", "internet"]);
        let reached = wide.allow_address(
            address.into(), port, NamedBy::Name, &SpecialAddresses::default(), false,
        );
        let reserved = address.is_private() || address.is_loopback() || address.is_link_local()
            || address.is_multicast() || address.is_unspecified() || address.is_documentation();
        prop_assert!(reached.is_err() || !reserved);
    }
}
