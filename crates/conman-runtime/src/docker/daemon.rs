//! Calls to the Docker daemon, bounded in number and time.
//!
//! A call takes a place in its lane, reads the daemon's facts if they are unknown, and sends its
//! request. The sum of these steps is bounded. Dropping a call closes its connection (each call
//! has a separate one), so a daemon that hangs delays its callers and leaves no work behind.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bollard::errors::Error as BollardError;
use bollard::models::{SystemInfoCgroupDriverEnum, SystemVersion};
use bollard::{ClientVersion, Docker};
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore};

use super::failure::Failure;
use super::hijack;
use conman_core::naming::CgroupDriver;

/// The API version whose behaviour the tests pin. Another one is used only if the daemon does not
/// support it.
const PREFERRED_VERSION: ClientVersion = ClientVersion {
    major_version: 1,
    minor_version: 41,
};

/// A limit in the client library, longer than all limits here.
const LIBRARY_TIMEOUT_S: u64 = 600;

/// A pool of places for concurrent calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lane {
    Calls,
    Removals,
}

/// Facts about the daemon.
#[derive(Debug)]
pub(super) struct Facts {
    pub(super) client: Docker,
    pub(super) cgroup_driver: CgroupDriver,
}

#[derive(Debug)]
pub(super) struct Daemon {
    socket: PathBuf,
    calls: Semaphore,
    removals: Semaphore,
    streams: Arc<Semaphore>,
    /// Locked while they are read, so that one caller reads them for all.
    facts: Mutex<Option<Arc<Facts>>>,
}

impl Daemon {
    /// Does not connect.
    pub(super) fn new(
        socket: PathBuf,
        max_calls: usize,
        max_removals: usize,
        max_streams: usize,
    ) -> Self {
        Self {
            socket,
            calls: Semaphore::new(max_calls),
            removals: Semaphore::new(max_removals),
            streams: Arc::new(Semaphore::new(max_streams)),
            facts: Mutex::new(None),
        }
    }

    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Calls the daemon within `limit`.
    pub(super) async fn call<T, F>(
        &self,
        lane: Lane,
        limit: Duration,
        ask: impl FnOnce(Arc<Facts>) -> F,
    ) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, BollardError>>,
    {
        let places = match lane {
            Lane::Calls => &self.calls,
            Lane::Removals => &self.removals,
        };
        let asked = AtomicBool::new(false);
        let whole = async {
            let _place = places.acquire().await.expect("lanes are never closed");
            let facts = self.facts().await?;
            asked.store(true, Ordering::Relaxed);
            let result = ask(facts)
                .await
                .map_err(|error| Failure::of(error, &self.socket));
            if let Err(failure) = &result {
                self.forget_facts_after(failure).await;
            }
            result
        };
        match tokio::time::timeout(limit, whole).await {
            Ok(result) => result,
            Err(_) if asked.into_inner() => Err(Failure::TimedOut { after: limit }),
            Err(_) => Err(Failure::Unreachable {
                reason: format!(
                    "it is busy or hangs: the request could not be sent within {} ms",
                    limit.as_millis()
                ),
            }),
        }
    }

    /// Waits until the daemon answers, without a place: other calls may have taken all of them.
    pub(super) async fn ping(&self) -> Result<(), Failure> {
        let facts = self.facts().await?;
        let answered = facts.client.ping().await;
        answered
            .map(drop)
            .map_err(|error| Failure::of(error, &self.socket))
    }

    /// Takes a place for a stream, held as long as it lasts; `None` at once if all are taken.
    pub(super) fn stream_place(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.streams).try_acquire_owned().ok()
    }

    async fn facts(&self) -> Result<Arc<Facts>, Failure> {
        let mut known = self.facts.lock().await;
        if let Some(facts) = &*known {
            return Ok(Arc::clone(facts));
        }
        // The library's negotiation requests its newest version, which dockerd refuses.
        let version = hijack::get_version(&self.socket).await?;
        let socket = self.socket.to_string_lossy();
        let failure = |error| Failure::of(error, &self.socket);
        let client = Docker::connect_with_unix(&socket, LIBRARY_TIMEOUT_S, &agreed(&version))
            .map_err(failure)?;
        let info = client.info().await.map_err(failure)?;
        let cgroup_driver = match info.cgroup_driver {
            Some(SystemInfoCgroupDriverEnum::SYSTEMD) => CgroupDriver::Systemd,
            Some(_) | None => CgroupDriver::Cgroupfs,
        };
        let facts = Arc::new(Facts {
            client,
            cgroup_driver,
        });
        *known = Some(Arc::clone(&facts));
        Ok(facts)
    }

    /// Another daemon may answer next time.
    async fn forget_facts_after(&self, failure: &Failure) {
        let lost = matches!(
            failure,
            Failure::Unreachable { .. } | Failure::Unavailable { .. }
        );
        if lost || failure.is_version_mismatch() {
            *self.facts.lock().await = None;
        }
    }
}

/// The preferred version, or the nearest one that the daemon supports.
fn agreed(daemon: &SystemVersion) -> ClientVersion {
    let mut version = PREFERRED_VERSION;
    if let Some(oldest) = daemon.min_api_version.as_deref().and_then(parse_version)
        && oldest > version
    {
        version = oldest;
    }
    if let Some(newest) = daemon.api_version.as_deref().and_then(parse_version)
        && newest < version
    {
        version = newest;
    }
    version
}

fn parse_version(text: &str) -> Option<ClientVersion> {
    let (major, minor) = text.split_once('.')?;
    Some(ClientVersion {
        major_version: major.parse().ok()?,
        minor_version: minor.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agreed_with(oldest: &str, newest: &str) -> String {
        let version = SystemVersion {
            min_api_version: Some(oldest.to_owned()),
            api_version: Some(newest.to_owned()),
            ..SystemVersion::default()
        };
        agreed(&version).to_string()
    }

    #[test]
    fn the_nearest_version_to_the_tested_one_is_spoken() {
        assert_eq!(agreed_with("1.12", "1.41"), "1.41");
        assert_eq!(agreed_with("1.24", "1.50"), "1.41");
        assert_eq!(agreed_with("1.44", "1.52"), "1.44");
        assert_eq!(agreed_with("1.12", "1.39"), "1.39");
        assert_eq!(agreed_with("", "nonsense"), "1.41");
    }
}
