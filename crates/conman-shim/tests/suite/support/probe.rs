//! Programs of a few system calls, as static ELF files of some hundred bytes, so that a container
//! needs nothing to run them and no library softens what the kernel answers.

#![allow(dead_code, reason = "every test program takes what it needs")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use conman_shim::{ContainerState, Hardening, LaunchSpec};

use crate::support::{Launched, Shim, next_end, subscribe};

/// Where the program is loaded.
const BASE: u64 = 0x40_0000;

/// Sizes of the two headers.
const HEADERS: u64 = 64 + 56;

/// An argument of a system call.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Arg {
    Number(u64),
    Text(&'static str),
}

/// System calls one after the other. The program exits with the error number of the last one, or
/// with the lowest byte of its result.
#[derive(Debug, Default)]
pub(crate) struct Probe {
    code: Vec<u8>,
    /// Places in `code` that want the address of a text.
    texts: Vec<(usize, &'static str)>,
}

impl Probe {
    /// A single call.
    pub(crate) fn of(number: i64, arguments: &[Arg]) -> Self {
        Self::default().call(number, arguments)
    }

    pub(crate) fn call(mut self, number: i64, arguments: &[Arg]) -> Self {
        // movabs into rdi, rsi, rdx, r10, r8.
        let registers: [[u8; 2]; 5] = [
            [0x48, 0xBF],
            [0x48, 0xBE],
            [0x48, 0xBA],
            [0x49, 0xBA],
            [0x49, 0xB8],
        ];
        for (index, register) in registers.iter().enumerate() {
            self.code.extend(register);
            match arguments.get(index).copied().unwrap_or(Arg::Number(0)) {
                Arg::Number(value) => self.code.extend(value.to_le_bytes()),
                Arg::Text(text) => {
                    self.texts.push((self.code.len(), text));
                    self.code.extend([0; 8]);
                }
            }
        }
        // mov eax, number; syscall
        self.code.push(0xB8);
        self.code
            .extend(u32::try_from(number).expect("a number").to_le_bytes());
        self.code.extend([0x0F, 0x05]);
        self
    }

    /// What follows is done by a second thread, and the first one ends. The program has no stack of
    /// its own to share, as it uses none.
    pub(crate) fn in_second_thread(self) -> Self {
        let flags = libc::CLONE_VM
            | libc::CLONE_FS
            | libc::CLONE_FILES
            | libc::CLONE_SIGHAND
            | libc::CLONE_THREAD
            | libc::CLONE_SYSVSEM;
        let flags = Arg::Number(u64::from(flags.unsigned_abs()));
        let mut probe = self.call(libc::SYS_clone, &[flags]);
        // test eax, eax; jz over the rest; mov eax, 60; syscall
        probe
            .code
            .extend([0x85, 0xC0, 0x74, 0x07, 0xB8, 60, 0, 0, 0, 0x0F, 0x05]);
        probe
    }

    /// A call through the 32-bit entry, without arguments.
    pub(crate) fn legacy_call(mut self, number: u32) -> Self {
        // mov eax, number; int 0x80
        self.code.push(0xB8);
        self.code.extend(number.to_le_bytes());
        self.code.extend([0xCD, 0x80]);
        self
    }

    /// So far, again and again.
    pub(crate) fn repeated(mut self, times: u32) -> Self {
        // mov r12d, times; the calls; dec r12d; jnz back to them
        let mut code = vec![0x41, 0xBC];
        code.extend(times.to_le_bytes());
        for (at, _) in &mut self.texts {
            *at += code.len();
        }
        let body = i32::try_from(self.code.len()).expect("short");
        code.append(&mut self.code);
        code.extend([0x41, 0xFF, 0xCC, 0x0F, 0x85]);
        code.extend((-(body + 9)).to_le_bytes());
        self.code = code;
        self
    }

    /// And then the other's calls.
    pub(crate) fn then(mut self, other: Self) -> Self {
        let texts = other.texts.iter();
        self.texts
            .extend(texts.map(|(at, text)| (at + self.code.len(), *text)));
        self.code.extend(other.code);
        self
    }

    /// Writes the program.
    pub(crate) fn write(mut self, path: &Path, mode: u32) {
        // test eax, eax; jns +2; neg eax; mov edi, eax; mov eax, 60; syscall
        self.code.extend([
            0x85, 0xC0, 0x79, 0x02, 0xF7, 0xD8, 0x89, 0xC7, 0xB8, 60, 0, 0, 0, 0x0F, 0x05,
        ]);
        let mut pool = Vec::new();
        for (at, text) in &self.texts {
            let address = BASE + HEADERS + (self.code.len() + pool.len()) as u64;
            self.code[*at..*at + 8].copy_from_slice(&address.to_le_bytes());
            pool.extend(text.as_bytes());
            pool.push(0);
        }
        let size = HEADERS + (self.code.len() + pool.len()) as u64;
        let mut file = vec![0x7F, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        // Executable, x86-64, version; entry; program headers; no sections; flags; sizes, counts.
        file.extend([2, 0, 62, 0, 1, 0, 0, 0]);
        file.extend((BASE + HEADERS).to_le_bytes());
        file.extend(64_u64.to_le_bytes());
        file.extend([0; 8]);
        file.extend([0; 4]);
        file.extend([64, 0, 56, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        // Load, readable and executable.
        file.extend([1, 0, 0, 0, 5, 0, 0, 0]);
        for field in [0, BASE, BASE, size, size, 0x1000_u64] {
            file.extend(field.to_le_bytes());
        }
        file.extend(self.code);
        file.extend(pool);
        fs::create_dir_all(path.parent().expect("a parent")).expect("made");
        fs::write(path, file).expect("written");
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("set");
    }
}

/// Every capability that could matter, over what is the container's own, and no other layer.
pub(crate) fn nothing_but_namespaces() -> Hardening {
    let all = [
        "BPF",
        "CHOWN",
        "DAC_OVERRIDE",
        "DAC_READ_SEARCH",
        "FOWNER",
        "MKNOD",
        "NET_ADMIN",
        "NET_RAW",
        "SETGID",
        "SETUID",
        "SYSLOG",
        "SYS_ADMIN",
        "SYS_CHROOT",
        "SYS_MODULE",
        "SYS_NICE",
        "SYS_PTRACE",
        "SYS_RAWIO",
        "SYS_RESOURCE",
    ];
    Hardening {
        seccomp: false,
        no_new_privileges: false,
        own_filters: false,
        without_ipc: false,
        masked_proc: false,
        runtime_files: Vec::new(),
        capabilities: Some(all.map(str::to_owned).to_vec()),
    }
}

/// Starts a program of few system calls in a container.
pub(crate) fn launch_probe(
    shim: &Shim,
    name: &str,
    probe: Probe,
    change: impl FnOnce(&mut LaunchSpec),
) -> Launched {
    let mut spec = probe_spec(shim, name, probe, 0o755);
    spec.hardening = nothing_but_namespaces();
    change(&mut spec);
    shim.client()
        .launch(spec)
        .unwrap_or_else(|error| panic!("{error}: {error:?}"))
}

fn probe_spec(shim: &Shim, name: &str, probe: Probe, mode: u32) -> LaunchSpec {
    let layer = format!("probe-{name}");
    probe.write(&shim.path("store").join(&layer).join("probe"), mode);
    shim.made_layer(&layer);
    let mut spec = shim.spec(name, "");
    spec.root.layers.insert(0, PathBuf::from(layer));
    spec.program.argv = vec!["/probe".to_owned()];
    spec
}

/// Runs a program of few system calls in a container and tells how it ended.
pub(crate) fn run_probe(
    shim: &Shim,
    name: &str,
    probe: Probe,
    mode: u32,
    change: impl FnOnce(&mut LaunchSpec),
) -> ContainerState {
    let mut spec = probe_spec(shim, name, probe, mode);
    change(&mut spec);
    let mut client = shim.client();
    subscribe(&mut client);
    client
        .launch(spec)
        .unwrap_or_else(|error| panic!("{error}: {error:?}"));
    loop {
        let ended = next_end(&mut client);
        if ended.name == name {
            return ended.state;
        }
    }
}
