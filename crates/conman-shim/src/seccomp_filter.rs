//! The system call filter as a program for the kernel, made from [`crate::seccomp_profile`].
//!
//! A system call of another architecture (32-bit entry) kills the process; x32 calls are in no list.
//!
//! The program is a binary search over ranges of numbers, some hundred instructions. A chain of more than
//! a thousand comparisons, as filter compilers generate it from the same lists, costs each start 1.7 ms,
//! since the kernel evaluates it for every system call when it is installed.

use std::io;

use seccompiler::sock_filter as Instruction;

use crate::seccomp_profile::{
    ALLOWED, FAMILIES, NETLINK, NETLINK_PROTOCOLS, REFUSED, Verdict, verdict,
};

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

/// Instructions of linux/filter.h.
const LOAD: u16 = 0x20;
const JUMP: u16 = 0x05;
const JUMP_EQUAL: u16 = 0x15;
const JUMP_AT_LEAST: u16 = 0x35;
const JUMP_ANY_BIT: u16 = 0x45;
const RETURN: u16 = 0x06;

/// Answers of linux/seccomp.h.
const ALLOW: u32 = 0x7FFF_0000;
const KILL_PROCESS: u32 = 0x8000_0000;
const ERRNO: u32 = 0x0005_0000;
const EPERM: u32 = 1;
const ENOSYS: u32 = 38;
const EPROTONOSUPPORT: u32 = 93;

/// The compiled filter.
#[derive(Debug, Clone)]
pub(crate) struct Filter {
    program: Vec<Instruction>,
}

impl Filter {
    pub(crate) fn compile() -> Self {
        let mut program = vec![
            instruction(LOAD, 0, 0, ARCHITECTURE_AT),
            instruction(JUMP_EQUAL, 1, 0, ARCHITECTURE),
            answer(KILL_PROCESS),
            instruction(LOAD, 0, 0, NUMBER_AT),
        ];
        program.extend(search(&ranges()));
        Self { program }
    }

    /// Installs it for the calling thread and all its descendants, permanently; sets no_new_privs.
    pub(crate) fn install(&self) -> io::Result<()> {
        seccompiler::apply_filter(&self.program).map_err(|error| match error {
            seccompiler::Error::Prctl(source) | seccompiler::Error::Seccomp(source) => source,
            other => io::Error::other(other.to_string()),
        })
    }
}

/// The first number of each range with one verdict, in their order. The last is open.
fn ranges() -> Vec<(u32, Verdict)> {
    let highest = ALLOWED.iter().chain(REFUSED).max().copied().unwrap_or(0);
    let mut ranges: Vec<(u32, Verdict)> = Vec::new();
    for (number, verdict) in (0..).zip((0..=highest + 1).map(verdict)) {
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
    let refuse = ERRNO | EPERM;
    let compare = |index: u32, values: &[u32], found: u32, otherwise: u32| {
        let mut program = vec![instruction(LOAD, 0, 0, argument_at(index))];
        for (left, value) in (1..=values.len()).rev().zip(values) {
            let over = u8::try_from(left).unwrap_or(u8::MAX);
            program.push(instruction(JUMP_EQUAL, over, 0, *value));
        }
        program.extend([answer(otherwise), answer(found)]);
        program
    };
    match verdict {
        Verdict::Allow => vec![answer(ALLOW)],
        Verdict::Refuse => vec![answer(refuse)],
        Verdict::Unknown => vec![answer(ERRNO | ENOSYS)],
        Verdict::OneOf(index, values) => compare(index, values, ALLOW, refuse),
        Verdict::NoneOf(index, values) => compare(index, values, refuse, ALLOW),
        Verdict::NoBits(index, bits) => vec![
            instruction(LOAD, 0, 0, argument_at(index)),
            instruction(JUMP_ANY_BIT, 1, 0, bits),
            answer(ALLOW),
            answer(refuse),
        ],
        Verdict::Socket => {
            let unknown = ERRNO | EPROTONOSUPPORT;
            let netlink = compare(2, &NETLINK_PROTOCOLS, ALLOW, unknown);
            let over = u8::try_from(netlink.len()).unwrap_or(u8::MAX);
            let mut program = vec![
                instruction(LOAD, 0, 0, argument_at(0)),
                instruction(JUMP_EQUAL, 0, over, NETLINK),
            ];
            program.extend(netlink);
            program.extend(compare(0, &FAMILIES, ALLOW, refuse));
            program
        }
    }
}

fn instruction(code: u16, jt: u8, jf: u8, k: u32) -> Instruction {
    Instruction { code, jt, jf, k }
}

fn answer(value: u32) -> Instruction {
    instruction(RETURN, 0, 0, value)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::seccomp_profile::REFUSED_IOCTLS;

    /// What the kernel's interpreter would answer.
    fn run(program: &[Instruction], architecture: u32, number: u32, arguments: [u32; 6]) -> u32 {
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
                        offset => arguments[(offset as usize - 16) / 8],
                    };
                }
                JUMP => at += step.k as usize,
                JUMP_EQUAL => at += jump(accumulator == step.k),
                JUMP_AT_LEAST => at += jump(accumulator >= step.k),
                JUMP_ANY_BIT => at += jump(accumulator & step.k != 0),
                RETURN => return step.k,
                other => panic!("{other:#x}"),
            }
        }
    }

    fn call(number: i64, arguments: [u32; 6]) -> u32 {
        let number = u32::try_from(number).expect("a number");
        run(&Filter::compile().program, ARCHITECTURE, number, arguments)
    }

    #[test]
    fn every_listed_call_has_its_answer_and_nothing_is_both_allowed_and_refused() {
        for number in ALLOWED {
            assert!(!REFUSED.contains(number), "{number}");
            assert_eq!(call(*number, [0; 6]), ALLOW, "{number}");
        }
        for number in REFUSED {
            assert_eq!(call(*number, [0; 6]), ERRNO | EPERM, "{number}");
        }
        for unknown in [libc::SYS_clone3, libc::SYS_io_setup, libc::SYS_io_submit] {
            assert_eq!(call(unknown, [0; 6]), ERRNO | ENOSYS);
        }
    }

    #[test]
    fn arguments_decide_where_they_should() {
        let first = |value: u32| [value, 0, 0, 0, 0, 0];
        assert_eq!(call(libc::SYS_socket, first(1)), ALLOW);
        for family in [0, 3, 17, 38, 40] {
            assert_eq!(call(libc::SYS_socket, first(family)), ERRNO | EPERM);
        }
        let netlink = |protocol: u32| call(libc::SYS_socket, [16, 3, protocol, 0, 0, 0]);
        for protocol in NETLINK_PROTOCOLS {
            assert_eq!(netlink(protocol), ALLOW);
        }
        for protocol in [6, 9, 12, 16, 21] {
            assert_eq!(netlink(protocol), ERRNO | EPROTONOSUPPORT);
        }
        // The protocol of another family.
        assert_eq!(call(libc::SYS_socket, [2, 3, 9, 0, 0, 0]), ALLOW);
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
        assert_eq!(call(libc::SYS_ioctl, [0, 0x5401, 0, 0, 0, 0]), ALLOW);
        for refused in REFUSED_IOCTLS {
            let verdict = call(libc::SYS_ioctl, [0, refused, 0, 0, 0, 0]);
            assert_eq!(verdict, ERRNO | EPERM);
        }
        assert_eq!(call(libc::SYS_personality, first(0xFFFF_FFFF)), ALLOW);
        assert_eq!(call(libc::SYS_personality, first(0x40_0000)), ERRNO | EPERM);
    }

    #[test]
    fn the_program_is_small() {
        let length = Filter::compile().program.len();
        assert!(length < 400, "{length}");
    }

    proptest! {
        #[test]
        fn another_architecture_is_killed_and_an_unknown_number_is_not_allowed(
            architecture in any::<u32>(),
            number in 1_000..=u32::MAX,
        ) {
            let program = Filter::compile().program;
            let expected = if architecture == ARCHITECTURE { ERRNO | ENOSYS } else { KILL_PROCESS };
            prop_assert_eq!(run(&program, architecture, number, [0; 6]), expected);
            prop_assert_eq!(run(&program, ARCHITECTURE, number, [0; 6]), ERRNO | ENOSYS);
        }
    }
}
