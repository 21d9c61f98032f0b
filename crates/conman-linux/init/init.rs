//! The first process of a native session: it reaps orphans, forwards signals to the session's program, and ends with it.
//!
//! A program without libraries, memory of its own or input other than signals. Its parent has cloned the session's
//! program before it executed this, so the program is process 2 of the PID namespace. All signals are blocked, so
//! that the kernel queues them although this is process 1.
//!
//! It exits with the program's exit code; if a signal N has ended the program, with 128 + N and the name
//! `conman-init:N`, by which its parent tells that from an exit code.
#![no_std]
#![no_main]

use core::arch::{asm, naked_asm};

/// The session's program.
const PROGRAM: i64 = 2;

const SIGCHLD: i64 = 17;
const WNOHANG: i64 = 1;
const ECHILD: i64 = -10;
const SIG_SETMASK: i64 = 2;
const PR_SET_NAME: i64 = 15;

/// Bytes of the kernel's signal sets.
const SET_BYTES: i64 = 8;

/// The last descriptor for close_range(2).
const LAST: i64 = 0xffff_ffff;

const NAME: [u8; 12] = *b"conman-init\0";

#[cfg(target_arch = "x86_64")]
mod number {
    pub(crate) const RT_SIGPROCMASK: i64 = 14;
    pub(crate) const WAIT4: i64 = 61;
    pub(crate) const KILL: i64 = 62;
    pub(crate) const RT_SIGTIMEDWAIT: i64 = 128;
    pub(crate) const PRCTL: i64 = 157;
    pub(crate) const EXIT_GROUP: i64 = 231;
    pub(crate) const CLOSE_RANGE: i64 = 436;
}

#[cfg(target_arch = "aarch64")]
mod number {
    pub(crate) const EXIT_GROUP: i64 = 94;
    pub(crate) const KILL: i64 = 129;
    pub(crate) const RT_SIGPROCMASK: i64 = 135;
    pub(crate) const RT_SIGTIMEDWAIT: i64 = 137;
    pub(crate) const PRCTL: i64 = 167;
    pub(crate) const WAIT4: i64 = 260;
    pub(crate) const CLOSE_RANGE: i64 = 436;
}

/// The kernel gives the first instruction an aligned stack.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
extern "C" fn _start() -> ! {
    naked_asm!("xor ebp, ebp", "call {main}", "ud2", main = sym main)
}

#[cfg(target_arch = "aarch64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
extern "C" fn _start() -> ! {
    naked_asm!("bl {main}", "brk 0", main = sym main)
}

extern "C" fn main() -> ! {
    let all = u64::MAX;
    let set = &raw const all as i64;
    // SAFETY: the kernel reads `all`, and writes nothing.
    unsafe { call(number::RT_SIGPROCMASK, [SIG_SETMASK, set, 0, SET_BYTES]) };
    // SAFETY: this program uses no descriptor.
    unsafe { call(number::CLOSE_RANGE, [0, LAST, 0, 0]) };
    // It was executed by a descriptor, whose number would be its name.
    rename(&NAME);
    // A child may have ended before.
    reap();
    loop {
        // SAFETY: the kernel reads `all`, and writes nothing.
        let signal = unsafe { call(number::RT_SIGTIMEDWAIT, [set, 0, 0, SET_BYTES]) };
        match signal {
            SIGCHLD => reap(),
            1.. => {
                // SAFETY: no pointer is passed.
                unsafe { call(number::KILL, [PROGRAM, signal, 0, 0]) };
            }
            // Interrupted, by being frozen for example.
            _ => {}
        }
    }
}

/// Reaps all that has ended. Does not return if the program has.
fn reap() {
    loop {
        let mut status = 0_i32;
        let place = &raw mut status as i64;
        // SAFETY: the kernel writes `status`.
        let pid = unsafe { call(number::WAIT4, [-1, place, WNOHANG, 0]) };
        let has_ended = status & 0xff != 0x7f;
        match pid {
            // A program can make this process its tracer, and stops then.
            PROGRAM if has_ended => end_like(status),
            ECHILD => exit(1),
            1.. => {}
            _ => return,
        }
    }
}

fn end_like(status: i32) -> ! {
    let signal = status & 0x7f;
    if signal == 0 {
        exit(i64::from((status >> 8) & 0xff));
    }
    let mut name = *b"conman-init:00\0";
    name[12] += (signal / 10) as u8;
    name[13] += (signal % 10) as u8;
    rename(&name);
    exit(i64::from(128 + signal))
}

/// `name` ends with a zero.
fn rename(name: &[u8]) {
    // SAFETY: the kernel reads up to the zero, and writes nothing.
    unsafe { call(number::PRCTL, [PR_SET_NAME, name.as_ptr() as i64, 0, 0]) };
}

fn exit(code: i64) -> ! {
    loop {
        // SAFETY: no pointer is passed.
        unsafe { call(number::EXIT_GROUP, [code, 0, 0, 0]) };
    }
}

/// # Safety
/// As the system call requires.
#[cfg(target_arch = "x86_64")]
unsafe fn call(number: i64, [a, b, c, d]: [i64; 4]) -> i64 {
    let result;
    // SAFETY: the instruction changes these registers only; the rest is the caller's.
    unsafe {
        asm!("syscall", inlateout("rax") number => result, in("rdi") a, in("rsi") b, in("rdx") c,
            in("r10") d, lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result
}

/// # Safety
/// As the system call requires.
#[cfg(target_arch = "aarch64")]
unsafe fn call(number: i64, [a, b, c, d]: [i64; 4]) -> i64 {
    let result;
    // SAFETY: the instruction changes this register only; the rest is the caller's.
    unsafe {
        asm!("svc 0", in("x8") number, inlateout("x0") a => result, in("x1") b, in("x2") c,
            in("x3") d, options(nostack));
    }
    result
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    exit(1)
}
