//! User ids, group ids and capabilities of threads.

use std::io;

use nix::sys::prctl::{get_pdeathsig, set_keepcaps, set_no_new_privs, set_pdeathsig};
use rustix::process::{Gid, Uid, dumpable_behavior, set_dumpable_behavior};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
    configure_capability_in_ambient_set, remove_capability_from_bounding_set, set_capabilities,
    set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};

pub use rustix::thread::CapabilitySet as Capabilities;

/// Highest capability that is tried; the kernel refuses unknown ones.
const LAST_CAPABILITY: u32 = 63;

/// Sets all user ids, all group ids and the supplementary groups of the calling thread. If it was
/// privileged, its capabilities in its user namespace stay permitted.
pub fn become_user(uid: u32, gid: u32, groups: &[u32]) -> io::Result<()> {
    let invalid = || io::Error::new(io::ErrorKind::InvalidInput, "not a user or group id");
    if uid == u32::MAX || gid == u32::MAX || groups.contains(&u32::MAX) {
        return Err(invalid());
    }
    let groups: Vec<Gid> = groups.iter().copied().map(Gid::from_raw).collect();
    set_keepcaps(true)?;
    set_thread_groups(&groups)?;
    let gid = Gid::from_raw(gid);
    set_thread_res_gid(gid, gid, gid)?;
    let uid = Uid::from_raw(uid);
    set_thread_res_uid(uid, uid, uid)?;
    Ok(set_keepcaps(false)?)
}

/// Makes every capability effective that the calling thread is permitted.
fn raise_capabilities() -> io::Result<()> {
    let sets = capabilities(None)?;
    Ok(set_capabilities(
        None,
        CapabilitySets {
            effective: sets.permitted,
            ..sets
        },
    )?)
}

/// Runs `action` with another effective user and all permitted capabilities. The calling thread
/// must be root and is root again afterwards.
pub(crate) fn as_effective_user<T>(
    uid: u32,
    action: impl FnOnce() -> io::Result<T>,
) -> io::Result<T> {
    let (root, other) = (Uid::ROOT, Uid::from_raw(uid));
    // The kernel resets both settings when the effective user changes. A parent that dies before
    // they are set again is noticed by other means.
    let dumpable = dumpable_behavior()?;
    let death_signal = get_pdeathsig()?;
    set_thread_res_uid(root, other, root)?;
    let outcome = set_dumpable_behavior(dumpable)
        .map_err(io::Error::from)
        .and_then(|()| raise_capabilities())
        .and_then(|()| action());
    set_thread_res_uid(root, root, root)?;
    set_dumpable_behavior(dumpable)?;
    set_pdeathsig(death_signal)?;
    outcome
}

/// Removes every capability except `keep` from the bounding set, permanently: no program that is executed
/// can get it again, even by its file's capabilities. Needs CAP_SETPCAP.
pub fn bound_capabilities(keep: Capabilities) -> io::Result<()> {
    for number in 0..=LAST_CAPABILITY {
        let one = CapabilitySet::from_bits_retain(1 << number);
        if keep.contains(one) {
            continue;
        }
        match remove_capability_from_bounding_set(one) {
            Ok(()) => {}
            // The first one that this kernel does not have; there are no gaps.
            Err(rustix::io::Errno::INVAL) => break,
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// Reduces the calling thread's capabilities to those of `keep` that it has. `ambient` passes them through
/// exec to programs of a user other than root; otherwise such a program has none.
pub fn limit_capabilities(keep: Capabilities, ambient: bool) -> io::Result<()> {
    clear_ambient_capability_set()?;
    set_capabilities(
        None,
        CapabilitySets {
            effective: keep,
            permitted: keep,
            inheritable: if ambient {
                keep
            } else {
                CapabilitySet::empty()
            },
        },
    )?;
    if ambient {
        for one in keep.iter() {
            configure_capability_in_ambient_set(one, true)?;
        }
    }
    Ok(())
}

/// Whether the calling thread has a capability.
#[must_use]
pub fn has_capability(one: Capabilities) -> bool {
    capabilities(None).is_ok_and(|sets| sets.effective.contains(one))
}

/// Makes a capability of the calling thread effective, or only permitted. One that is not permitted stays
/// absent.
pub fn set_effective(one: Capabilities, effective: bool) -> io::Result<()> {
    let mut sets = capabilities(None)?;
    let wanted = effective && sets.permitted.contains(one);
    if sets.effective.contains(one) == wanted {
        return Ok(());
    }
    sets.effective.set(one, wanted);
    Ok(set_capabilities(None, sets)?)
}

/// Runs `work` with a permitted capability of the calling thread made effective.
pub fn with_effective<T>(one: Capabilities, work: impl FnOnce() -> T) -> T {
    let was = has_capability(one);
    // If it fails, `work` fails for that reason.
    let _ = set_effective(one, true);
    let done = work();
    let _ = set_effective(one, was);
    done
}

/// Makes set-user-id bits and file capabilities of programs executed from now on ineffective.
pub fn no_new_privileges() -> io::Result<()> {
    Ok(set_no_new_privs()?)
}

/// One instruction of a system call filter: `struct sock_filter` of linux/filter.h.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FilterInstruction {
    pub code: u16,
    pub jump_true: u8,
    pub jump_false: u8,
    pub value: u32,
}

/// Installs a system call filter for the calling thread and all its descendants, permanently. Needs
/// `CAP_SYS_ADMIN` in its user namespace, or [`no_new_privileges`].
///
/// # Errors
/// As seccomp(2).
#[expect(
    unsafe_code,
    reason = "seccomp(2) has no wrapper that leaves no_new_privs unset"
)]
pub fn install_filter(program: &[FilterInstruction]) -> io::Result<()> {
    let mut program: Vec<libc::sock_filter> = program
        .iter()
        .map(|one| libc::sock_filter {
            code: one.code,
            jt: one.jump_true,
            jf: one.jump_false,
            k: one.value,
        })
        .collect();
    let length = u16::try_from(program.len());
    let program = libc::sock_fprog {
        len: length.map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: seccomp(2) with SECCOMP_SET_MODE_FILTER reads a `struct sock_fprog`, whose pointer leads to as many
    // instructions as it says: the vector lives until after the call. It keeps no pointer.
    let result = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            0,
            &raw const program,
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
