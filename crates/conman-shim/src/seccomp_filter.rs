//! The system call filter as a program for the kernel, made from [`crate::seccomp_profile`].
//!
//! A system call of another architecture (32-bit entry) kills the process; x32 calls are in no list.
//!
//! The program is a binary search over ranges of numbers, some hundred instructions. A chain of more than
//! a thousand comparisons, as filter compilers generate it from the same lists, costs each start 1.7 ms,
//! since the kernel evaluates it for every system call when it is installed.

use std::io;

use conman_linux::{FilterInstruction, install_filter};
use conman_shim_protocol::Hardening;
use conman_shim_protocol::system_calls::{ArgumentRule, Condition, IOCTL_TYPE, REFUSED};
use seccompiler::sock_filter as Instruction;

use crate::seccomp_profile::{ALLOWED, IPC, Variant, Verdict, verdict};

/// `AUDIT_ARCH_*` of linux/audit.h.
#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 0xC000_003E;
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: u32 = 0xC000_00B7;

/// Offsets in `struct seccomp_data`, on machines that store the low half of an argument first.
const NUMBER_AT: u32 = 0;
const ARCHITECTURE_AT: u32 = 4;
const fn argument_at(index: u32) -> u32 {
    16 + 8 * index
}
const fn high_half_at(index: u32) -> u32 {
    argument_at(index) + 4
}

/// Instructions of linux/filter.h.
const LOAD: u16 = 0x20;
const JUMP: u16 = 0x05;
const JUMP_EQUAL: u16 = 0x15;
const JUMP_AT_LEAST: u16 = 0x35;
const JUMP_ANY_BIT: u16 = 0x45;
const MASK: u16 = 0x54;
const RETURN: u16 = 0x06;

/// Answers of linux/seccomp.h.
const ALLOW: u32 = 0x7FFF_0000;
const KILL_PROCESS: u32 = 0x8000_0000;
const ERRNO: u32 = 0x0005_0000;
const EPERM: u32 = 1;
const ENOSYS: u32 = 38;

/// A compiled filter.
#[derive(Debug, Clone)]
pub(crate) struct Filter {
    program: Vec<Instruction>,
}

/// The filters of all variants.
#[derive(Debug)]
pub(crate) struct Filters {
    all: Vec<(Variant, Filter)>,
    default: Filter,
}

impl Filters {
    pub(crate) fn compile() -> Self {
        let variants = [(true, false), (false, true), (true, true)];
        let variants = variants.map(|(own_filters, without_ipc)| Variant {
            own_filters,
            without_ipc,
        });
        Self {
            all: variants.map(|one| (one, Filter::compile(one))).into(),
            default: Filter::compile(Variant::default()),
        }
    }

    pub(crate) fn of(&self, hardening: &Hardening) -> &Filter {
        let variant = Variant {
            own_filters: hardening.own_filters,
            without_ipc: hardening.without_ipc,
        };
        let found = self.all.iter().find(|(one, _)| *one == variant);
        found.map_or(&self.default, |(_, filter)| filter)
    }
}

impl Filter {
    fn compile(variant: Variant) -> Self {
        let mut program = vec![
            instruction(LOAD, 0, 0, ARCHITECTURE_AT),
            instruction(JUMP_EQUAL, 1, 0, ARCHITECTURE),
            answer(KILL_PROCESS),
            instruction(LOAD, 0, 0, NUMBER_AT),
        ];
        program.extend(search(&ranges(variant)));
        Self { program }
    }

    /// Installs it for the calling thread and all its descendants, permanently
    /// ([`conman_linux::install_filter`]).
    pub(crate) fn install(&self) -> io::Result<()> {
        let program = self.program.iter().map(|one| FilterInstruction {
            code: one.code,
            jump_true: one.jt,
            jump_false: one.jf,
            value: one.k,
        });
        install_filter(&program.collect::<Vec<_>>())
    }
}

/// The first number of each range with one verdict, in their order. The last is open.
fn ranges(variant: Variant) -> Vec<(u32, Verdict)> {
    let listed = ALLOWED.iter().chain(IPC).copied();
    let refused = REFUSED.iter().map(|call| call.number);
    let highest = listed.chain(refused).max().unwrap_or(0);
    let mut ranges: Vec<(u32, Verdict)> = Vec::new();
    let verdicts = (0..=highest + 1).map(|number| verdict(number, variant));
    for (number, verdict) in (0..).zip(verdicts) {
        if ranges.last().is_none_or(|(_, last)| *last != verdict) {
            ranges.push((number, verdict));
        }
    }
    ranges
}

/// Finds the range of the loaded number.
fn search(ranges: &[(u32, Verdict)]) -> Vec<Instruction> {
    let middle = ranges.len() / 2;
    let (Some((_, verdict)), Some((border, _))) = (ranges.first(), ranges.get(middle)) else {
        return vec![answer(ERRNO | ENOSYS)];
    };
    if middle == 0 {
        return decide(*verdict);
    }
    let low = search(&ranges[..middle]);
    let high = search(&ranges[middle..]);
    let mut program = match u8::try_from(low.len()) {
        Ok(over) => vec![instruction(JUMP_AT_LEAST, over, 0, *border)],
        // Conditional jumps reach 255 instructions.
        Err(_) => vec![
            instruction(JUMP_AT_LEAST, 0, 1, *border),
            instruction(JUMP, 0, 0, u32::try_from(low.len()).unwrap_or(u32::MAX)),
        ],
    };
    program.extend(low);
    program.extend(high);
    program
}

fn decide(verdict: Verdict) -> Vec<Instruction> {
    match verdict {
        Verdict::Allow => vec![answer(ALLOW)],
        Verdict::Refuse => vec![answer(ERRNO | EPERM)],
        Verdict::Unknown => vec![answer(ERRNO | ENOSYS)],
        Verdict::ByArguments(rule) => decide_by_arguments(rule),
    }
}

fn decide_by_arguments(rule: ArgumentRule) -> Vec<Instruction> {
    let refuse = ERRNO | EPERM;
    match rule {
        ArgumentRule::OneOf(index, values) => compare(index, values, ALLOW, refuse),
        ArgumentRule::Ioctl(refused, kind, allowed) => {
            let others = vec![
                instruction(MASK, 0, 0, IOCTL_TYPE),
                instruction(JUMP_EQUAL, 0, 1, kind),
                answer(refuse),
                answer(ALLOW),
            ];
            let mut program = vec![instruction(LOAD, 0, 0, argument_at(1))];
            for (values, verdict) in [(refused, refuse), (allowed, ALLOW)] {
                for value in values {
                    program.push(instruction(JUMP_EQUAL, 0, 1, *value));
                    program.push(answer(verdict));
                }
            }
            program.extend(others);
            program
        }
        ArgumentRule::NoBits(index, bits, error) => vec![
            instruction(LOAD, 0, 0, argument_at(index)),
            instruction(JUMP_ANY_BIT, 1, 0, bits),
            answer(ALLOW),
            answer(ERRNO | error),
        ],
        ArgumentRule::Except(conditions, error) => {
            let mut program = conditions
                .iter()
                .rev()
                .fold(vec![answer(ERRNO | error)], |rest, condition| {
                    when(*condition, rest)
                });
            program.push(answer(ALLOW));
            program
        }
        ArgumentRule::ByFirst(cases, error) => {
            let mut program = vec![instruction(LOAD, 0, 0, argument_at(0))];
            for (value, third) in cases {
                let decided = third.map_or_else(
                    || vec![answer(ALLOW)],
                    |values| compare(2, values, ALLOW, ERRNO | error),
                );
                program.push(instruction(JUMP_EQUAL, 0, over(&decided), *value));
                program.extend(decided);
            }
            program.push(answer(refuse));
            program
        }
    }
}

/// Answers by whether an argument is one of these values.
fn compare(index: u32, values: &[u32], found: u32, otherwise: u32) -> Vec<Instruction> {
    let mut program = vec![instruction(LOAD, 0, 0, argument_at(index))];
    for (left, value) in (1..=values.len()).rev().zip(values) {
        let over = u8::try_from(left).unwrap_or(u8::MAX);
        program.push(instruction(JUMP_EQUAL, over, 0, *value));
    }
    program.extend([answer(otherwise), answer(found)]);
    program
}

/// Executes `rest` if the condition holds, and otherwise what follows it.
fn when(condition: Condition, rest: Vec<Instruction>) -> Vec<Instruction> {
    let over = over(&rest);
    let mut program = match condition {
        Condition::Equal(index, value) => vec![
            instruction(LOAD, 0, 0, argument_at(index)),
            instruction(JUMP_EQUAL, 0, over, value),
        ],
        Condition::Matching(index, values) => {
            let mut program = vec![instruction(LOAD, 0, 0, argument_at(index))];
            for (left, value) in (1..=values.len()).rev().zip(values) {
                let found = u8::try_from(left).unwrap_or(u8::MAX);
                program.push(instruction(JUMP_EQUAL, found, 0, *value));
            }
            program.push(instruction(JUMP, 0, 0, u32::from(over)));
            program
        }
        Condition::NewValue(index) => vec![
            instruction(LOAD, 0, 0, high_half_at(index)),
            instruction(JUMP_EQUAL, 0, 2, 0),
            instruction(LOAD, 0, 0, argument_at(index)),
            instruction(JUMP_EQUAL, over, 0, 0),
        ],
    };
    program.extend(rest);
    program
}

/// The jump over a short program.
fn over(program: &[Instruction]) -> u8 {
    u8::try_from(program.len()).unwrap_or(u8::MAX)
}

fn instruction(code: u16, jt: u8, jf: u8, k: u32) -> Instruction {
    Instruction { code, jt, jf, k }
}

fn answer(value: u32) -> Instruction {
    instruction(RETURN, 0, 0, value)
}

#[cfg(test)]
mod tests {
    use conman_shim_protocol::system_calls::{
        ATTACHING_OPTIONS, CLONING_IOCTLS, IPV4_PROTOCOLS, IPV6_PROTOCOLS, NETLINK_PROTOCOLS,
        REFUSED_IOCTLS,
    };
    use proptest::prelude::*;

    use super::*;

    const EINVAL: u32 = 22;
    const EPROTONOSUPPORT: u32 = 93;

    /// What the kernel's interpreter would answer.
    fn run(program: &[Instruction], architecture: u32, number: u32, arguments: [u64; 6]) -> u32 {
        let mut at = 0;
        let mut accumulator = 0;
        loop {
            let step = &program[at];
            at += 1;
            let jump = |taken: bool| usize::from(if taken { step.jt } else { step.jf });
            match step.code {
                LOAD => {
                    accumulator = match step.k {
                        NUMBER_AT => number,
                        ARCHITECTURE_AT => architecture,
                        offset => {
                            let argument = arguments[(offset as usize - 16) / 8];
                            let half = argument >> (if offset % 8 == 0 { 0 } else { 32 });
                            u32::try_from(half & u64::from(u32::MAX)).expect("a half")
                        }
                    };
                }
                MASK => accumulator &= step.k,
                JUMP => at += step.k as usize,
                JUMP_EQUAL => at += jump(accumulator == step.k),
                JUMP_AT_LEAST => at += jump(accumulator >= step.k),
                JUMP_ANY_BIT => at += jump(accumulator & step.k != 0),
                RETURN => return step.k,
                other => panic!("{other:#x}"),
            }
        }
    }

    fn call(number: i64, arguments: [u64; 6]) -> u32 {
        call_of(Variant::default(), number, arguments)
    }

    fn call_of(variant: Variant, number: i64, arguments: [u64; 6]) -> u32 {
        let number = u32::try_from(number).expect("a number");
        let program = Filter::compile(variant).program;
        run(&program, ARCHITECTURE, number, arguments)
    }

    #[test]
    fn every_listed_call_has_its_answer_and_nothing_is_both_allowed_and_refused() {
        for number in ALLOWED.iter().chain(IPC) {
            assert!(REFUSED.iter().all(|call| call.number != *number));
            assert_eq!(call(*number, [0; 6]), ALLOW, "{number}");
        }
        for refused in REFUSED {
            assert_eq!(call(refused.number, [0; 6]), ERRNO | EPERM, "{refused:?}");
        }
        for unknown in [libc::SYS_clone3, libc::SYS_io_setup, libc::SYS_io_submit] {
            assert_eq!(call(unknown, [0; 6]), ERRNO | ENOSYS);
        }
    }

    #[test]
    fn arguments_decide_where_they_should() {
        let first = |value: u64| [value, 0, 0, 0, 0, 0];
        assert_eq!(call(libc::SYS_socket, first(1)), ALLOW);
        for family in [0, 3, 17, 38, 40] {
            assert_eq!(call(libc::SYS_socket, first(family)), ERRNO | EPERM);
        }
        let listed: [(u64, &[u32], &[u32]); 3] = [
            (16, &NETLINK_PROTOCOLS, &[6, 9, 12, 16, 21]),
            (2, &IPV4_PROTOCOLS, &[2, 33, 132, 136, 255, 262]),
            (10, &IPV6_PROTOCOLS, &[1, 132, 136, 255, 262]),
        ];
        for (family, allowed, others) in listed {
            let socket =
                |protocol: u32| call(libc::SYS_socket, [family, 1, protocol.into(), 0, 0, 0]);
            for protocol in allowed {
                assert_eq!(socket(*protocol), ALLOW, "{family} {protocol}");
            }
            for protocol in others {
                assert_eq!(
                    socket(*protocol),
                    ERRNO | EPROTONOSUPPORT,
                    "{family} {protocol}"
                );
            }
        }
        assert_eq!(call(libc::SYS_socketpair, first(1)), ALLOW);
        for family in [2, 30, 38] {
            assert_eq!(call(libc::SYS_socketpair, first(family)), ERRNO | EPERM);
        }
        let thread = 0x003D_0F00;
        assert_eq!(call(libc::SYS_clone, first(thread)), ALLOW);
        for bit in [17, 25, 26, 27, 28, 29, 30] {
            assert_eq!(
                call(libc::SYS_clone, first(thread | 1 << bit)),
                ERRNO | EPERM
            );
        }
        let ioctl = |request: u32| call(libc::SYS_ioctl, [0, request.into(), 0, 0, 0, 0]);
        assert_eq!(ioctl(0x5401), ALLOW);
        for allowed in CLONING_IOCTLS {
            assert_eq!(ioctl(allowed), ALLOW, "{allowed:#x}");
        }
        // BTRFS: a subvolume and a snapshot by both calls, the removal, a commit.
        let of_btrfs = [
            0x5000_940E,
            0x5000_9418,
            0x5000_9401,
            0x5000_9417,
            0x5000_943F,
            0x9408,
        ];
        for refused in REFUSED_IOCTLS.into_iter().chain(of_btrfs) {
            assert_eq!(ioctl(refused), ERRNO | EPERM, "{refused:#x}");
        }
        assert_eq!(call(libc::SYS_personality, first(0xFFFF_FFFF)), ALLOW);
        assert_eq!(call(libc::SYS_personality, first(0x40_0000)), ERRNO | EPERM);
    }

    #[test]
    fn no_program_is_attached_to_a_socket() {
        let option = |level, option| call(libc::SYS_setsockopt, [3, level, option, 1, 1, 0]);
        for attaching in ATTACHING_OPTIONS {
            assert_eq!(option(1, attaching.into()), ERRNO | EINVAL, "{attaching}");
            // The same number at another level, TCP.
            assert_eq!(option(6, attaching.into()), ALLOW, "{attaching}");
            // The kernel looks at the low half only.
            assert_eq!(option(1 << 32 | 1, attaching.into()), ERRNO | EINVAL);
        }
        // SO_REUSEADDR, SO_DETACH_FILTER, SO_REUSEPORT.
        for other in [2, 27, 15] {
            assert_eq!(option(1, other), ALLOW, "{other}");
        }
    }

    #[test]
    fn programs_install_filters_only_where_that_is_allowed() {
        let variant = Variant {
            own_filters: true,
            ..Variant::default()
        };
        let by_seccomp = (libc::SYS_seccomp, [1, 0, 8, 0, 0, 0]);
        let by_prctl = (libc::SYS_prctl, [22, 2, 8, 0, 0, 0]);
        for (number, arguments) in [by_seccomp, by_prctl] {
            assert_eq!(call(number, arguments), ERRNO | EINVAL);
            assert_eq!(call_of(variant, number, arguments), ALLOW);
        }
        // Strict mode, the query of an action; PR_SET_NAME, and strict mode.
        for arguments in [[0; 6], [2, 0, 8, 0, 0, 0]] {
            assert_eq!(call(libc::SYS_seccomp, arguments), ALLOW);
        }
        for arguments in [[15, 2, 0, 0, 0, 0], [22, 1, 0, 0, 0, 0]] {
            assert_eq!(call(libc::SYS_prctl, arguments), ALLOW);
        }
    }

    #[test]
    fn a_container_without_an_ipc_namespace_has_no_calls_for_it() {
        let variant = Variant {
            without_ipc: true,
            ..Variant::default()
        };
        for number in IPC.iter().chain([&libc::SYS_shmget]) {
            assert_eq!(call_of(variant, *number, [0; 6]), ERRNO | ENOSYS);
        }
        assert_eq!(call_of(variant, libc::SYS_getpid, [0; 6]), ALLOW);
        // Each container gets the variant of its hardening.
        let filters = Filters::compile();
        for (own_filters, without_ipc) in
            [(false, false), (true, false), (false, true), (true, true)]
        {
            let hardening = Hardening {
                own_filters,
                without_ipc,
                ..Hardening::default()
            };
            let program = &filters.of(&hardening).program;
            let first = [1, 0, 8, 0, 0, 0];
            let answers = [(libc::SYS_seccomp, first), (libc::SYS_semget, [0; 6])];
            let answers = answers.map(|(number, arguments)| {
                let number = u32::try_from(number).expect("a number");
                run(program, ARCHITECTURE, number, arguments) == ALLOW
            });
            assert_eq!(answers, [own_filters, !without_ipc]);
        }
    }

    #[test]
    fn the_limit_of_core_dumps_is_read_and_never_changed() {
        let success = ERRNO;
        assert_eq!(call(libc::SYS_setrlimit, [4, 8, 0, 0, 0, 0]), success);
        assert_eq!(call(libc::SYS_setrlimit, [7, 8, 0, 0, 0, 0]), ALLOW);
        let prlimit = |resource, new| call(libc::SYS_prlimit64, [0, resource, new, 8, 0, 0]);
        for new in [8, 1 << 32, u64::MAX] {
            assert_eq!(prlimit(4, new), success, "{new}");
            assert_eq!(prlimit(7, new), ALLOW, "{new}");
        }
        assert_eq!(prlimit(4, 0), ALLOW);
    }

    #[test]
    fn huge_pages_are_not_there() {
        let refused = ERRNO | EINVAL;
        let map = |flags| call(libc::SYS_mmap, [0, 4_096, 3, flags, u64::MAX, 0]);
        assert_eq!((map(0x22), map(0x4_0022)), (ALLOW, refused));
        let file = |flags| call(libc::SYS_memfd_create, [8, flags, 0, 0, 0, 0]);
        assert_eq!((file(3), file(4)), (ALLOW, refused));
        let segment = |flags| call(libc::SYS_shmget, [0, 4_096, flags, 0, 0, 0]);
        assert_eq!((segment(0o1600), segment(0o5600)), (ALLOW, refused));
    }

    #[test]
    fn the_program_is_small() {
        let length = Filter::compile(Variant::default()).program.len();
        assert!(length < 400, "{length}");
    }

    proptest! {
        #[test]
        fn another_architecture_is_killed_and_an_unknown_number_is_not_allowed(
            architecture in any::<u32>(),
            number in 1_000..=u32::MAX,
        ) {
            let program = Filter::compile(Variant::default()).program;
            let expected = if architecture == ARCHITECTURE { ERRNO | ENOSYS } else { KILL_PROCESS };
            prop_assert_eq!(run(&program, architecture, number, [0; 6]), expected);
            prop_assert_eq!(run(&program, ARCHITECTURE, number, [0; 6]), ERRNO | ENOSYS);
        }
    }
}
