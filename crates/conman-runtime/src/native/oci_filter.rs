//! The system call filter of sessions whose OCI runtime uses the host's kernel, as the specification has it.
//!
//! It refuses what [`conman_shim_protocol::system_calls`] refuses, with the same errors, and allows everything else. A
//! filter of the specification has one answer for all that it does not list, and a rule compares an argument once: where
//! native containers have a list of allowed values, this refuses all other values.

use conman_shim_protocol::system_calls::{
    ArgumentRule, BY_ARGUMENTS, Condition, IOCTL_TYPE, REFUSED, SystemCall,
};
use serde_json::{Value, json};

/// Calls that get ENOSYS, so that programs do without them. The filter of native containers does not know them.
const UNKNOWN: [&str; 2] = ["clone3", "io_setup"];

const EPERM: u32 = 1;
const ENOSYS: u32 = 38;

/// Bits in which families and protocols of sockets differ. The kernel refuses greater numbers.
const SOCKET_BITS: u32 = 0x3FF;

/// Bits in which ioctls of one type differ: their size belongs to their number.
const IOCTL_BITS: u32 = 0xFF;

/// What calls get an error for: all of these conditions, and the error.
type Refusal = (Vec<Value>, u32);

/// The filter.
pub(super) fn filter() -> Value {
    let names: Vec<_> = REFUSED.iter().map(SystemCall::name).collect();
    let mut rules = vec![
        rule(&names, (Vec::new(), EPERM)),
        rule(&UNKNOWN, (Vec::new(), ENOSYS)),
    ];
    for (call, by_arguments) in BY_ARGUMENTS {
        let refusals = refusals(*by_arguments).into_iter();
        rules.extend(refusals.map(|refusal| rule(&[call.name()], refusal)));
    }
    json!({ "defaultAction": "SCMP_ACT_ALLOW", "syscalls": rules })
}

fn rule(names: &[&str], (conditions, error): Refusal) -> Value {
    let mut rule = json!({ "names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": error });
    if !conditions.is_empty() {
        rule["args"] = conditions.into();
    }
    rule
}

/// What a call with this rule is refused for.
fn refusals(rule: ArgumentRule) -> Vec<Refusal> {
    match rule {
        ArgumentRule::OneOf(index, allowed) => refused_at(index, others(u32::MAX, (0, 0), allowed)),
        ArgumentRule::Ioctl(refused, kind, allowed) => {
            let mut all: Vec<_> = refused.iter().map(|one| (u32::MAX, *one)).collect();
            all.extend(others(IOCTL_BITS, (IOCTL_TYPE, kind), allowed));
            refused_at(1, all)
        }
        ArgumentRule::NoBits(index, bits, error) => {
            let bits = (0..u32::BITS)
                .map(|n| 1_u32 << n)
                .filter(|bit| bits & bit != 0);
            bits.map(|bit| (vec![masked(index, (bit, bit))], error))
                .collect()
        }
        ArgumentRule::Except(conditions, error) => {
            let mut all = vec![Vec::new()];
            for condition in conditions {
                let ways = ways(*condition);
                let with = |one: &Vec<Value>| -> Vec<Vec<Value>> {
                    let with = |way: &Value| [&one[..], std::slice::from_ref(way)].concat();
                    ways.iter().map(with).collect()
                };
                all = all.iter().flat_map(with).collect();
            }
            all.into_iter()
                .map(|conditions| (conditions, error))
                .collect()
        }
        ArgumentRule::ByFirst(cases, error) => {
            let listed: Vec<_> = cases.iter().map(|(value, _)| *value).collect();
            let mut all = refused_at(0, others(SOCKET_BITS, (0, 0), &listed));
            for (value, third) in cases {
                let Some(third) = third else {
                    continue;
                };
                let first = masked(0, (u32::MAX, *value));
                let thirds = others(SOCKET_BITS, (0, 0), third).into_iter();
                all.extend(thirds.map(|third| (vec![first.clone(), masked(2, third)], error)));
            }
            all
        }
    }
}

/// Each of which suffices for the condition.
fn ways(condition: Condition) -> Vec<Value> {
    match condition {
        Condition::Equal(index, value) => vec![masked(index, (u32::MAX, value))],
        Condition::Matching(index, values) => values
            .iter()
            .map(|value| masked(index, (u32::MAX, *value)))
            .collect(),
        Condition::NewValue(index) => {
            vec![json!({ "index": index, "op": "SCMP_CMP_NE", "value": 0 })]
        }
    }
}

fn refused_at(index: u32, values: Vec<(u32, u32)>) -> Vec<Refusal> {
    let values = values.into_iter();
    values
        .map(|one| (vec![masked(index, one)], EPERM))
        .collect()
}

/// A comparison of the argument's bits of `mask`. Never of all 64: the kernel ignores the high half of these arguments,
/// so a session could set it to pass a filter that compares it.
fn masked(index: u32, (mask, value): (u32, u32)) -> Value {
    json!({ "index": index, "op": "SCMP_CMP_MASKED_EQ", "value": mask, "valueTwo": value })
}

/// The numbers that have `value` in the bits of `mask`, except `allowed`: masks and values, of which no number matches
/// two. `bits` are those of the rest in which the numbers differ.
fn others(bits: u32, (mask, value): (u32, u32), allowed: &[u32]) -> Vec<(u32, u32)> {
    if !allowed.iter().any(|one| one & mask == value) {
        return vec![(mask, value)];
    }
    let Some(highest) = bits.checked_ilog2() else {
        return Vec::new();
    };
    let bit = 1_u32 << highest;
    let half = |value| others(bits & !bit, (mask | bit, value), allowed);
    [half(value), half(value | bit)].concat()
}

#[cfg(test)]
mod tests {
    use conman_shim_protocol::system_calls::{
        ATTACHING_OPTIONS, CLONING_IOCTLS, IPV4_PROTOCOLS, IPV6_PROTOCOLS, NETLINK_PROTOCOLS,
        REFUSED_IOCTLS,
    };

    use super::*;

    const EINVAL: u64 = 22;
    const EPROTONOSUPPORT: u64 = 93;
    const REFUSED_WITH_EPERM: Option<u64> = Some(1);

    /// Bits that the kernel ignores in each argument that has 32.
    const HIGH: u64 = 1 << 32;

    /// The error that the filter answers; `None` if it allows the call.
    fn answer(filter: &Value, call: &str, arguments: [u64; 6]) -> Option<u64> {
        let number = |condition: &Value, field: &str| condition[field].as_u64().expect("a number");
        let holds = |condition: &Value| {
            let index = usize::try_from(number(condition, "index")).expect("an index");
            let (argument, value) = (arguments[index], number(condition, "value"));
            match condition["op"].as_str() {
                Some("SCMP_CMP_MASKED_EQ") => argument & value == number(condition, "valueTwo"),
                Some("SCMP_CMP_NE") => argument != value,
                other => panic!("{other:?}"),
            }
        };
        let rules = filter["syscalls"].as_array().expect("rules").iter();
        let mut matching = rules.filter(|rule| {
            let names = rule["names"].as_array().expect("names");
            let conditions = rule
                .get("args")
                .map(|args| args.as_array().expect("a list"));
            names.iter().any(|name| name == call)
                && conditions.is_none_or(|conditions| conditions.iter().all(holds))
        });
        let found = matching.next().map(|rule| number(rule, "errnoRet"));
        assert!(
            matching.next().is_none(),
            "{call} {arguments:?} has two answers"
        );
        found
    }

    /// The answer with this first argument, whatever is in its high half.
    fn first(filter: &Value, call: &str, value: u64) -> Option<u64> {
        let of = |value| answer(filter, call, [value, 0, 0, 0, 0, 0]);
        assert_eq!(of(value), of(HIGH | value), "{call} {value:#x}");
        of(value)
    }

    #[test]
    fn what_native_containers_refuse_is_refused() {
        let filter = filter();
        for call in REFUSED {
            assert_eq!(
                answer(&filter, call.name(), [0; 6]),
                REFUSED_WITH_EPERM,
                "{call:?}"
            );
        }
        for call in ["clone3", "io_setup"] {
            assert_eq!(answer(&filter, call, [0; 6]), Some(38), "{call}");
        }
        assert_eq!(answer(&filter, "getpid", [0; 6]), None);
        for (call, _) in BY_ARGUMENTS {
            let rules = filter["syscalls"].as_array().expect("rules");
            let has_rule = rules
                .iter()
                .any(|rule| rule["names"] == json!([call.name()]));
            assert!(has_rule, "{call:?}");
        }
    }

    #[test]
    fn sockets_have_the_families_and_protocols_of_native_containers() {
        let filter = filter();
        for family in 0..64 {
            let expected = (![1, 2, 10, 16].contains(&family)).then_some(1);
            assert_eq!(first(&filter, "socket", family), expected, "{family}");
            let expected = (family != 1).then_some(1);
            assert_eq!(first(&filter, "socketpair", family), expected, "{family}");
        }
        let allowed: [(u64, &[u32]); 3] = [
            (2, &IPV4_PROTOCOLS),
            (10, &IPV6_PROTOCOLS),
            (16, &NETLINK_PROTOCOLS),
        ];
        for (family, allowed) in allowed {
            for protocol in 0..300 {
                let expected = (!allowed.contains(&protocol)).then_some(EPROTONOSUPPORT);
                let protocol = u64::from(protocol);
                for (family, protocol) in
                    [(family, protocol), (HIGH | family, HIGH << 7 | protocol)]
                {
                    let arguments = [family, 1, protocol, 0, 0, 0];
                    let found = answer(&filter, "socket", arguments);
                    assert_eq!(found, expected, "{family:#x} {protocol:#x}");
                }
            }
        }
    }

    #[test]
    fn ioctls_of_btrfs_are_refused_but_for_those_of_all_file_systems() {
        let filter = filter();
        let ioctl = |request: u64| {
            let of = |request| answer(&filter, "ioctl", [3, request, 0, 0, 0, 0]);
            assert_eq!(of(request), of(HIGH | request), "{request:#x}");
            of(request)
        };
        for refused in REFUSED_IOCTLS {
            assert_eq!(ioctl(refused.into()), REFUSED_WITH_EPERM, "{refused:#x}");
        }
        for number in 0..256 {
            let is_cloning = [0x09, 0x0D, 0x36].contains(&number);
            let expected = (!is_cloning).then_some(1);
            assert_eq!(ioctl(0x5000_9400 | number), expected, "{number:#x}");
        }
        for cloning in CLONING_IOCTLS {
            assert_eq!(ioctl(cloning.into()), None, "{cloning:#x}");
        }
        // TCGETS, FIONREAD.
        assert_eq!((ioctl(0x5401), ioctl(0x541B)), (None, None));
    }

    #[test]
    fn nothing_takes_memory_of_the_pool_of_compiled_filters() {
        let filter = filter();
        let option = |level, option| answer(&filter, "setsockopt", [3, level, option, 1, 1, 0]);
        for attaching in ATTACHING_OPTIONS.map(u64::from) {
            for (level, attaching) in [(1, attaching), (HIGH | 1, HIGH | attaching)] {
                assert_eq!(option(level, attaching), Some(EINVAL), "{attaching:#x}");
            }
            // The same number at another level, TCP.
            assert_eq!(option(6, attaching), None, "{attaching}");
        }
        // SO_REUSEADDR, SO_DETACH_FILTER.
        assert_eq!((option(1, 2), option(1, 27)), (None, None));
        assert_eq!(first(&filter, "seccomp", 1), Some(EINVAL));
        for allowed in [0, 2] {
            assert_eq!(first(&filter, "seccomp", allowed), None);
        }
        for (option, mode, expected) in [
            (22, 2, Some(EINVAL)),
            (HIGH | 22, HIGH | 2, Some(EINVAL)),
            (22, 1, None),
            (15, 2, None),
        ] {
            let arguments = [option, mode, 8, 0, 0, 0];
            assert_eq!(answer(&filter, "prctl", arguments), expected);
        }
    }

    #[test]
    fn namespaces_huge_pages_and_core_dumps_stay_those_of_the_host() {
        let filter = filter();
        let thread = 0x003D_0F00;
        assert_eq!(first(&filter, "clone", thread), None);
        for bit in [17, 25, 26, 27, 28, 29, 30] {
            let found = first(&filter, "clone", 1 << bit);
            assert_eq!(found, REFUSED_WITH_EPERM, "{bit}");
        }
        for (call, index, plain, bit) in [
            ("mmap", 3, 0x22, 0x4_0000),
            ("memfd_create", 1, 3, 4),
            ("shmget", 2, 0o1600, 0o4000),
        ] {
            for (flags, expected) in [
                (plain, None),
                (plain | bit, Some(EINVAL)),
                (HIGH | bit, Some(EINVAL)),
            ] {
                let mut arguments = [0; 6];
                arguments[index] = flags;
                assert_eq!(answer(&filter, call, arguments), expected, "{call}");
            }
        }
        let succeeds = Some(0);
        assert_eq!(first(&filter, "setrlimit", 4), succeeds);
        assert_eq!(first(&filter, "setrlimit", 7), None);
        let prlimit = |resource, new| answer(&filter, "prlimit64", [0, resource, new, 8, 0, 0]);
        for new in [8, HIGH, u64::MAX] {
            assert_eq!(prlimit(4, new), succeeds, "{new:#x}");
            assert_eq!(prlimit(HIGH | 4, new), succeeds, "{new:#x}");
            assert_eq!(prlimit(7, new), None, "{new:#x}");
        }
        assert_eq!(prlimit(4, 0), None);
        for allowed in [0x0, 0x8, 0x2_0000, 0x2_0008, 0xFFFF_FFFF] {
            assert_eq!(first(&filter, "personality", allowed), None, "{allowed:#x}");
        }
        for refused in [0x10, 0x40_0000, 0x6_0000, 0xFFFF_FFFE, 0x8000_0000] {
            let found = first(&filter, "personality", refused);
            assert_eq!(found, REFUSED_WITH_EPERM, "{refused:#x}");
        }
    }
}
