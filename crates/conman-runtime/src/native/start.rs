//! Starting a container that was created.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use conman_linux::Mount;
use conman_proto::RuntimeKind;
use conman_shim_protocol::{
    Ahead, CallError, LaunchSpec, NetworkSpec, Phases, ProgramSpec, Reply, Request, RootKind,
};
use futures_util::stream::StreamExt;
use tokio::time::{Instant, sleep};

use super::ends::{ProcessEnd, end};
use super::failure::{START, call_failed, milliseconds, refused, start_failed};
use super::link::Connecting;
use super::oci::{self, OciOptions};
use super::{Inner, away, no_such_container, store};
use crate::shared::container_files::host_error;
use crate::shared::container_network::StoredLink;
use crate::shim_link::LinkError;
use crate::{ContainerKey, LogOptions, MADE_AHEAD, RuntimeError, Started};

/// Most lines and bytes of a failed container's output that an error quotes.
const QUOTED_LINES: u32 = 20;
const QUOTED_BYTES: usize = 300;

/// How long to wait for the end of a container that was dead when its start was answered.
const END_PATIENCE: Duration = Duration::from_secs(10);

/// Pause between two looks whether a session's program runs: its OCI runtime takes up to a tenth of a second.
const BEGIN_INTERVAL: Duration = Duration::from_millis(5);

struct Prepared {
    launch: LaunchSpec,
    mounts: Vec<Mount>,
    link: Option<StoredLink>,
    /// The program that the OCI runtime runs, and the session's limit of CPU time from then on.
    session: Option<(ProgramSpec, Option<u64>)>,
}

impl Inner {
    pub(super) async fn start(
        self: &Arc<Self>,
        key: &ContainerKey,
    ) -> Result<Started, RuntimeError> {
        let _starting = self.pool.start();
        self.keep_pool();
        let (inner, owned) = (Arc::clone(self), key.clone());
        let Prepared {
            launch,
            mounts,
            link,
            session,
        } = away("start", move || inner.prepare(&owned)).await?;
        let mut fds: Vec<_> = mounts.iter().map(AsFd::as_fd).collect();
        let link = link.filter(|_| launch.network == NetworkSpec::Linked);
        let connecting = link.map(|link| self.connecting(key, link)).transpose()?;
        fds.extend(connecting.as_ref().map(Connecting::container));
        let request = Request::Launch(Box::new(launch));
        let call = self.link.call(&request, &fds, self.timeouts.start);
        let (called, egress) = match &connecting {
            Some(connecting) => connecting.during(call).await,
            None => (call.await, None),
        };
        let started = |pid, steps| Started {
            container_id: self.container_id(key),
            pid,
            steps,
            egress,
        };
        let program = session.as_ref().map(|(program, _)| program);
        match called {
            Ok((Reply::Launched { pid, phases }, fds)) => {
                let name = store::name(key);
                let mut steps = steps(&phases);
                if let Some((program, cpu_millis)) = &session {
                    let took = self.program_begins(key, program).await?;
                    steps.push(("start.runtime", took));
                    if let Some(millis) = cpu_millis {
                        self.limit_cpu_of_started(key, *millis).await?;
                    }
                    return Ok(started(pid, steps));
                }
                match self.ends.of(&name) {
                    None if !fds.is_empty() => Ok(started(pid, steps)),
                    // It ended before a pidfd was opened; the shim is reporting its end.
                    None => {
                        let end = tokio::time::timeout(END_PATIENCE, self.ends.wait(&name));
                        let end = end.await.ok().and_then(Result::ok);
                        let end = end.unwrap_or(ProcessEnd(None));
                        Err(self.ended_at_once(key, program, end).await)
                    }
                    Some(end) => Err(self.ended_at_once(key, program, end).await),
                }
            }
            Ok(_) => Err(call_failed("start", key, LinkError::Unexpected)),
            Err(LinkError::Refused(CallError::Exists { .. })) => {
                let found = self.look(key, "start").await?;
                match found.container.map(|view| (view.pid, end(view.state))) {
                    Some((pid, None)) => Ok(started(pid, Vec::new())),
                    Some((_, Some(end))) => Err(self.ended_at_once(key, program, end).await),
                    None => Err(RuntimeError::TimedOut {
                        runtime: RuntimeKind::Native,
                        action: "start",
                        subject: key.to_string(),
                        after_ms: milliseconds(Duration::ZERO),
                    }),
                }
            }
            Err(error) => Err(start_failed(START, key, error)),
        }
    }

    /// Waits until the OCI runtime has begun the session's program, which may have ended then, and returns how long that
    /// took.
    async fn program_begins(
        self: &Arc<Self>,
        key: &ContainerKey,
        session: &ProgramSpec,
    ) -> Result<Duration, RuntimeError> {
        let begun = Instant::now();
        loop {
            // Read first: a program that has begun and ended since the last look is seen to have begun.
            let end = self.ends.of(&store::name(key));
            if self.program_runs(key).await? {
                return Ok(begun.elapsed());
            }
            if let Some(end) = end {
                return Err(self.ended_at_once(key, Some(session), end).await);
            }
            if begun.elapsed() > self.timeouts.start {
                return Err(RuntimeError::TimedOut {
                    runtime: self.kind_of(key),
                    action: "start",
                    subject: key.to_string(),
                    after_ms: milliseconds(self.timeouts.start),
                });
            }
            sleep(BEGIN_INTERVAL).await;
        }
    }

    /// The start order, with a mount for each bind, and the link.
    fn prepare(&self, key: &ContainerKey) -> Result<Prepared, RuntimeError> {
        let stored = self.store.container(key).plan()?;
        let stored = stored.ok_or_else(|| no_such_container(key))?;
        // A failed removal may have removed it, and the node takes its absence as proof that the
        // container cannot start.
        std::fs::symlink_metadata(&stored.files_dir)
            .map_err(|source| host_error("find", &stored.files_dir, source))?;
        let mounts: Result<Vec<_>, _> = stored.sources.iter().map(mount).collect();
        let mut mounts = mounts?;
        if let Some((kind, program)) = &stored.session_program {
            let config = self.store.container(key).runtime_config();
            mounts.extend(self.oci(*kind)?.files(program, &stored.launch, &config)?);
        }
        mounts.extend(self.mount_root(&stored.launch)?);
        let session = stored.session_program;
        let mut launch = stored.launch;
        if let Ahead::Take { name } = &launch.ahead
            && !self.pool.is_first_start(name)
        {
            // Its directory, which a start empties that finds what it takes ended, may be of a session that runs.
            launch.ahead = Ahead::No;
        }
        Ok(Prepared {
            launch,
            mounts,
            link: stored.link,
            session: session.map(|(_, program)| (program, stored.late_cpu_millis)),
        })
    }

    /// The root of a container that is not an overlay.
    fn mount_root(&self, launch: &LaunchSpec) -> Result<Option<Mount>, RuntimeError> {
        match (launch.root.kind, &self.snapshots) {
            (RootKind::Overlay, _) => Ok(None),
            (RootKind::Snapshot, Some(snapshots)) => snapshots.mount(&launch.name).map(Some),
            (RootKind::Snapshot, None) => Err(refused(
                START,
                &launch.name,
                "its root is a BTRFS snapshot, and `images.store` is \"overlay\" now: delete it and start it again"
                    .to_owned(),
            )),
        }
    }

    /// The error of a start whose container has ended. `session`: the program that its OCI runtime was to run.
    async fn ended_at_once(
        self: &Arc<Self>,
        key: &ContainerKey,
        session: Option<&ProgramSpec>,
        ProcessEnd(code): ProcessEnd,
    ) -> RuntimeError {
        let has_failed = |oci: &OciOptions| oci.may_have_failed(code);
        let not_run = match session {
            Some(session) if self.oci_of(key).is_ok_and(has_failed) => {
                let has_begun = self.has_begun_inside(key, oci::PROGRAM).await;
                (!has_begun).then_some(session)
            }
            _ => None,
        };
        let ending = match code {
            Some(code) => format!("ended at once with exit code {code}"),
            None => "ended at once".to_owned(),
        };
        let tail = LogOptions {
            tail: Some(QUOTED_LINES),
            ..LogOptions::default()
        };
        let mut last = Vec::new();
        if let Ok(mut log) = self.logs(key, tail).await {
            while let Some(Ok(chunk)) = log.next().await {
                last.extend_from_slice(&chunk.bytes);
            }
        }
        let from = last.len().saturating_sub(QUOTED_BYTES);
        let quoted = String::from_utf8_lossy(&last[from..]);
        let reason = format!("{ending}: {}", quoted.trim());
        let not_run = not_run.and_then(|session| oci::not_run(key, session, &reason));
        not_run.unwrap_or_else(|| RuntimeError::EndedAtOnce {
            subject: key.to_string(),
            reason,
        })
    }
}

/// A mount of what is at `path` below `trusted` at this moment; later changes of the path do not
/// affect it. Binds were checked before, but their sources may have changed since.
fn mount((trusted, path): &(PathBuf, PathBuf)) -> Result<Mount, RuntimeError> {
    let place = conman_linux::open_beneath(trusted, path);
    place
        .and_then(|place| Mount::copy_of(&place, Path::new("")))
        .map_err(|source| host_error("bind", &trusted.join(path), source))
}

/// The consecutive steps of the launcher and the container's first process. The rest of a start
/// is waiting for the launcher, and messages.
fn steps(phases: &Phases) -> Vec<(&'static str, Duration)> {
    if phases.ahead {
        let left = phases.files_us + phases.setup_us;
        return vec![(MADE_AHEAD, Duration::from_micros(left))];
    }
    vec![
        ("start.cgroup", Duration::from_micros(phases.cgroup_us)),
        ("start.clone", Duration::from_micros(phases.clone_us)),
        ("start.files", Duration::from_micros(phases.files_us)),
        ("start.root", Duration::from_micros(phases.root_us)),
        ("start.setup", Duration::from_micros(phases.setup_us)),
    ]
}
