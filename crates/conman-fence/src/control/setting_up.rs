//! Starting the shim, fresh or as the replacement of another program.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use conman_linux::{Capabilities, SoleThread, boot_id, inherited_fd, set_effective};
use conman_shim_protocol::{Reply, seqpacket};
use nix::sys::signal::{SigSet, Signal as NixSignal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::stat::{Mode, umask};
use rustix::event::epoll::EventFlags;
use rustix::mm::{MlockAllFlags, mlockall};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::Control;
use super::cgroup_orders::CgroupOrders;
use super::clients::Clients;
use super::replacement::Replacement;
use super::timer::Timer;
use super::token::Token;
use crate::containers::Containers;
use crate::fence::DeadManFence;
use crate::forbidden_starts::ForbiddenStarts;
use crate::handover::Sealed;
use crate::id_claim;
use crate::id_ranges::IdRanges;
use crate::launching::Launching;
use crate::ledger::Ledger;
use crate::log_bounds::Sweeper;
use crate::options::ShimOptions;
use crate::poller::Poller;
use crate::shim_parts::{HandedOverStreams, ShimParts};
use crate::state_lock::{self, Acquired};

/// Connections that wait to be accepted.
const BACKLOG: i32 = 16;

/// A former shim releases its claim a moment after its other locks. Far less than a fleet allows for the restart
/// of a shim, during which no container is frozen (`timing.shim_restart_ms`, 1 s).
const CLAIM_WITH_CONTAINERS: Duration = Duration::from_millis(100);

/// The OOM killer never chooses the first (proc_pid_oom_score_adj(5)); the others are fallbacks.
const OOM_SCORES: [i32; 4] = [-1000, -900, -500, -1];

impl Control {
    /// Binds the socket, adopts what an earlier shim left, and starts the launcher. The calling
    /// process has one thread.
    pub(crate) fn new(options: ShimOptions, parts: ShimParts) -> io::Result<Self> {
        let program = std::env::current_exe()?;
        let (lock, acquired) = state_lock::acquire(&options.state_file, options.standby)?;
        // From here on the shim ends only when nothing is left unfenced.
        hold_signals()?;
        let (kept, doubt) = Ledger::read(&options.state_file, &boot_id()?);
        let listener = bind(&options)?;
        // If the file is replaced meanwhile, the kernel only reports that this program is not there.
        let replacement = Replacement::new(program);
        let mut control = Self::build(options, parts, lock, listener, replacement)?;
        control.adopt(kept)?;
        if let Some(doubt) = doubt {
            control.recover(&doubt);
        }
        let has_containers = control.containers.iter().next().is_some();
        control.claim_ids(has_containers || control.fence.is_closed())?;
        // Not before: a client that is connected takes a shim that waits for its ids for one that hangs.
        rustix::net::listen(&control.listener, BACKLOG)?;
        control.begin()?;
        if acquired == Acquired::AfterWaiting {
            control.replace_if_upgraded();
        }
        Ok(control)
    }

    /// Continues where the replaced program left off, in the same process.
    pub(crate) fn take_over(
        options: ShimOptions,
        parts: ShimParts,
        mut sealed: Sealed,
    ) -> io::Result<Self> {
        let handover = &mut sealed.handover;
        let lock = File::from(inherited_fd(handover.lock)?);
        let listener = inherited_fd(handover.listener)?;
        let replacement = Replacement::new(std::env::current_exe()?);
        let mut control = Self::build(options, parts, lock, listener, replacement)?;
        // The replaced program's claim ended when this one was executed.
        control.claim_ids(true)?;
        if let Some(freeze_ms) = handover.freeze_ms {
            control.fence.set_freeze_ms(freeze_ms);
        }
        control.resume(handover)?;
        control.streams.resume(HandedOverStreams {
            streams: std::mem::take(&mut handover.streams),
            watchers: std::mem::take(&mut handover.watchers),
            blobs: std::mem::take(&mut sealed.blobs),
        })?;
        control.begin()?;
        if let Some((client, call)) = handover.asked_by {
            control.reply(client, call, Reply::Done, None);
        }
        tracing::info!("replaced the shim's program");
        Ok(control)
    }

    fn build(
        options: ShimOptions,
        parts: ShimParts,
        lock: File,
        listener: OwnedFd,
        replacement: Replacement,
    ) -> io::Result<Self> {
        let sole = SoleThread::prove()?;
        let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
        let signals = SignalFd::with_flags(&hold_signals()?, flags)?;
        let ledger = Ledger::at(&options.state_file);
        Ok(Self {
            cgroups: CgroupOrders::new(&options)?,
            fence: DeadManFence::new(options.freeze_patience, options.frozen_max),
            ids: IdRanges::new(options.ids),
            id_claim: None,
            options,
            sole,
            poller: Poller::new()?,
            timer: Timer::new()?,
            listener,
            signals,
            lock,
            buffer: seqpacket::buffer(),
            ledger,
            containers: Containers::default(),
            forbidden_starts: ForbiddenStarts::default(),
            launching: Launching::new(parts.launcher),
            sweeper: Sweeper::new(parts.log_sweeper),
            clients: Clients::new(),
            streams: parts.streams,
            replacement,
            ending_until_ns: None,
        })
    }

    /// Claims the pool's ids. Containers that live need their shim and its fence at once, even if another conman was
    /// started with the same ids while they had none.
    fn claim_ids(&mut self, has_containers: bool) -> io::Result<()> {
        let patience = match has_containers {
            true => CLAIM_WITH_CONTAINERS,
            false => id_claim::ENDING_TIMEOUT,
        };
        let claimed = id_claim::claim(&self.options.ids_file, self.options.ids, patience);
        let claimed = claimed
            .and_then(|it| it.map_err(|taken| io::Error::new(io::ErrorKind::AddrInUse, taken)));
        match claimed {
            Err(error) if has_containers => tracing::error!(
                %error,
                "containers of two conmans may have the same user ids; give one another `node.id_range`, and \
                 restart it"
            ),
            claimed => self.id_claim = Some(claimed?),
        }
        Ok(())
    }

    /// Starts working, once all state is in place.
    fn begin(&mut self) -> io::Result<()> {
        // The fence first, which may be due.
        self.hold_if_closed();
        self.on_time();
        self.release_if_closed();
        self.rewrite_ledger()?;
        let poller = &self.poller;
        poller.add(Token::Listener, &self.listener, EventFlags::IN)?;
        poller.add(Token::Signals, &self.signals, EventFlags::IN)?;
        poller.add(Token::Timer, &self.timer, EventFlags::IN)?;
        poller.add(Token::Streams, &self.streams, EventFlags::IN)?;
        if self.fence.is_closed() {
            // Starts from the replaced program: they have waited for too long.
            self.interrupt_starts();
        }
        // A process whose parent may trace it in its user namespace can make that parent its tracer
        // (cap_ptrace_traceme in security/commoncap.c). The launcher makes it effective for itself.
        if let Err(error) = set_effective(Capabilities::SYS_PTRACE, false) {
            tracing::error!(%error, "containers can make the shim their tracer");
        }
        self.ensure_launcher()?;
        self.ensure_sweeper()?;
        self.launching.flush();
        protect();
        // Signals of children that ended in between were lost.
        self.reap_all()
    }
}

/// Blocks the signals that the shim reads through its descriptor.
fn hold_signals() -> io::Result<SigSet> {
    let mut mask = SigSet::empty();
    mask.add(NixSignal::SIGCHLD);
    mask.add(NixSignal::SIGTERM);
    mask.add(NixSignal::SIGHUP);
    mask.thread_block()?;
    Ok(mask)
}

/// Protects the fence against a shortage of memory. What is not permitted is skipped, and logged.
fn protect() {
    // As low as is permitted: without the capability not below its earlier value.
    let score = OOM_SCORES.into_iter().find(|score| {
        let text = score.to_string();
        std::fs::write("/proc/self/oom_score_adj", text).is_ok()
    });
    if score != OOM_SCORES.first().copied() {
        tracing::warn!("the OOM killer may choose the shim (it lacks CAP_SYS_RESOURCE)");
    }
    // Without the capability allocations would fail at the limit.
    let capable = rustix::thread::capabilities(None)
        .is_ok_and(|sets| sets.effective.contains(Capabilities::IPC_LOCK));
    // Lock pages when they are used, so that a large program is not loaded whole.
    let flags = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
    if !capable || mlockall(flags).is_err() {
        tracing::warn!("the shim's memory may be swapped out (it lacks CAP_IPC_LOCK)");
    }
}

fn bind(options: &ShimOptions) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    match std::fs::remove_file(&options.socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mask = umask(Mode::from_bits_truncate(0o177));
    let bound = rustix::net::bind(&socket, &SocketAddrUnix::new(&options.socket)?);
    umask(mask);
    bound?;
    Ok(socket)
}
