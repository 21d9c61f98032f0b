//! The kernel interfaces that conman uses: pidfds and process identity, network namespaces, cgroups,
//! path resolution below a root, removal of hostile trees; and for launching containers: cloning into
//! namespaces, detached mounts, privileges, limits. `/proc` is read through `procfs` ([`read_proc`]), for the other
//! crates too, except:
//! - on the way to a kill and to a certificate, which must not depend on fields that nobody needs there: the cgroup
//!   of a process, its ids in namespaces, its pending signals, when its threads began and whether they exit. To parse
//!   a whole `status` takes longer than to read it;
//! - mappings and descriptors of a session's processes (`disk_usage`), whose number a session chooses: they are
//!   read up to a bound, as bytes.
//!
//! System calls are made through `nix` for processes, signals, users, limits and terminals, and through `rustix` for
//! descriptors (pidfds, sockets and timers among them), mounts, namespaces, working directories and `openat2`; in the
//! other crates, too. Exceptions:
//! - signals are named by nix and sent by rustix ([`SignalNumber`], [`signal_process`]): nix knows no real-time signals;
//! - children are waited for by [`reap`] and [`next_child_event`], which call `waitid`: nix takes an end by a real-time
//!   signal for an error;
//! - users, groups and capabilities of a *thread*, between clone and exec and in threads that act for a session, are
//!   rustix's: the C library's calls, which are nix's, change all threads of the process, and nix knows no
//!   capabilities. So is "dumpable", which nix reads as one of two values and the kernel has three;
//! - rustix's, since nix has none or only unsafe ones: sizes of terminals, the controlling terminal and the far end of
//!   one, priorities of threads.
//!
//! The crate knows processes, descriptors and paths, but no sessions. It has no global state, and no
//! background threads except those of [`NetnsSockets`], which are joined to their callers by one bounded
//! channel of requests and a oneshot channel for each answer.
//!
//! Blocking: everything that is not `async` reads procfs or cgroupfs, or makes a system call that does not
//! wait, except [`PidFd::wait_dead`], as documented. The crate talks to no
//! daemon, so all of it works while every daemon hangs.
//!
//! It is the only crate that may have `unsafe`; each use is allowed individually.
#![deny(unsafe_code)]

mod beneath;
mod btrfs;
mod cgroup_cpu;
mod cgroup_label;
mod cgroup_limits;
mod cgroup_mounts;
mod cgroup_proof;
mod cgroup_usage;
mod cgroup_weight;
mod cgroups;
mod child_events;
mod clone_process;
mod disk_usage;
mod exit_info;
mod exit_scan;
mod features;
mod freezer;
mod heap;
mod identity;
mod inherited;
mod init_program;
mod io_limits;
mod kept_namespaces;
mod loop_device;
mod loopback;
mod mounts;
mod netns_sockets;
mod pidfd;
mod privileges;
mod proc_files;
mod process_entry;
mod process_facts;
mod project_quota;
mod realtime;
mod session_cgroup;
mod signals;
mod socket_buffers;
mod spread;
mod state_file;
mod superblock_arrays;
mod thread_stat;
mod time_slice;
mod tree_removal;

pub use beneath::{create_dir_in_root, open_beneath, open_file_in_root, open_in_root};
pub use btrfs::{
    create_snapshot, create_subvolume, destroy_subvolume, enable_simple_quotas,
    free_destroyed_subvolumes, grow_to_device, is_subvolume_read_only, limit_subvolume,
    make_subvolume_read_only,
};
pub use cgroup_cpu::CpuLimit;
pub use cgroup_limits::CgroupLimits;
pub use cgroup_mounts::{CgroupLayout, CgroupPart};
pub use cgroup_usage::{ResourceUsage, UsageReader, host_oom_kills, network_bytes};
pub use cgroup_weight::CgroupWeight;
pub use cgroups::{CgroupError, Cgroups};
pub use child_events::{ChildEvent, next_child_event, reap, reap_if_dead};
pub use clone_process::{
    CloneOptions, Namespaces, SoleThread, clone_process, close_on_exec_from, reset_signal_actions,
    unshare_namespaces,
};
pub use disk_usage::{DiskUsage, TreeUsage, nameless_usage, tree_usage};
pub use exit_info::{Ended, ended_unreaped};
pub use exit_scan::{CgroupThread, ExitScan};
pub use features::{Features, Interface};
pub use freezer::Freezer;
pub use heap::trim_heap;
pub use identity::{ProcessIdentity, boot_id};
pub use inherited::inherited_fd;
pub use init_program::{InitProgram, program_of_init};
pub use io_limits::{Disk, IoLimits};
pub use kept_namespaces::KeptNamespaces;
pub use loop_device::LoopDevice;
pub use loopback::bring_loopback_up;
pub use mounts::{Mount, MountAttributes, NewFilesystem};
pub use netns_sockets::{NetnsSockets, network_namespace};
pub use nix::sys::resource::Resource;
pub use nix::sys::signal::Signal;
pub use pidfd::{PidFd, ProcessError};
pub use privileges::{
    Capabilities, FilterInstruction, become_user, bound_capabilities, has_capability,
    install_filter, limit_capabilities, no_new_privileges, set_effective, with_effective,
};
pub use proc_files::{
    CGroupControllers, FromRead, LimitValue, Limits, LoadAverage, Meminfo, PressureRecord,
    ProcessCGroups, Status, parse_pressure_record, read_proc,
};
pub use process_entry::ProcessEntry;
pub use process_facts::{
    Lineage, inner_pid, is_namespace_init, lower_limit, pid_below, raise_nofile,
    try_is_namespace_init,
};
pub use project_quota::ProjectQuotas;
pub use realtime::{run_as_ordinary_thread, run_before_ordinary_threads};
pub use session_cgroup::{CgroupMaker, MakeCgroupError, SessionCgroup, join_cgroups};
pub use signals::{SignalNumber, parse_signal, signal_group, signal_process};
pub use socket_buffers::{bound_tcp_buffers, socket_memory};
pub use spread::spread_directories;
pub use state_file::{
    FORMAT, StateFile, remove_if_present, replace_file, sync_parent, with_suffix,
};
pub use superblock_arrays::SuperblockArray;
pub use time_slice::run_in_short_slices;
pub use tree_removal::{empty_directory, remove_tree, remove_tree_partly};
