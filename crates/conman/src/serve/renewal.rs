//! Reloads the nodes' credentials when their files change.

use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::task::spawn_blocking;
use tokio_util::sync::CancellationToken;

use super::peers::Credentials;
use super::trouble::Trouble;

/// Interval between checks of the files. They are small, and a short-lived certificate must be
/// replaced in time.
const LOOK_EVERY: Duration = Duration::from_secs(5);

const EXPIRY: &str = "conman_fleet_certificate_expiry_timestamp_seconds";

/// The credentials that are reloaded.
#[derive(Debug, Clone)]
pub(super) struct Renewal {
    credentials: Credentials,
    secret_trouble: Arc<Mutex<Trouble>>,
    tls_trouble: Arc<Mutex<Trouble>>,
}

impl Renewal {
    /// Checks periodically whether the certificates or the secret have changed, until the daemon
    /// stops.
    pub(super) fn run(credentials: &Credentials, closing: CancellationToken) -> Self {
        let trouble = |files| Arc::new(Mutex::new(Trouble::of(files)));
        let renewal = Self {
            credentials: credentials.clone(),
            secret_trouble: trouble("the fleet's secret"),
            tls_trouble: trouble("the fleet's certificates"),
        };
        metrics::describe_gauge!(
            EXPIRY,
            "When this node's certificate for other nodes ends, in seconds since 1970"
        );
        tell_expiry(credentials);
        if credentials.tls.is_none() && credentials.secret.is_none() {
            return renewal;
        }
        let looking = renewal.clone();
        tokio::spawn(async move {
            let pause = || tokio::time::sleep(LOOK_EVERY);
            // Cancel safe: a check skipped at shutdown is not needed.
            while closing.run_until_cancelled(pause()).await.is_some() {
                looking.look(false).await;
            }
        });
        renewal
    }

    /// Takes changed files. Invalid ones are reported, and the former content stays in use. `asked`: an
    /// operator ordered it, so an error is reported again.
    pub(super) async fn look(&self, asked: bool) {
        // First, since certificates may be derived from it. The keys of connect tokens are.
        if let Some(secret) = self.credentials.secret.clone() {
            reload(&self.secret_trouble, move || secret.reload(), asked).await;
        }
        if let Some(tls) = self.credentials.tls.clone() {
            reload(&self.tls_trouble, move || tls.reload(), asked).await;
            tell_expiry(&self.credentials);
        }
    }
}

async fn reload<E: Error + 'static>(
    trouble: &Mutex<Trouble>,
    read: impl FnOnce() -> Result<bool, E> + Send + 'static,
    asked: bool,
) {
    // It reads a file, so it must not run on a thread that serves requests.
    let read = spawn_blocking(move || read().map_err(|error| super::chain(&error)));
    let read = read.await;
    let read = read.unwrap_or_else(|error| Err(format!("reading it panicked: {error}")));
    // A panic while the lock is held cannot leave half a change.
    let mut trouble = trouble.lock().unwrap_or_else(PoisonError::into_inner);
    trouble.report(read, asked);
}

fn tell_expiry(credentials: &Credentials) {
    let tls = credentials.tls.as_ref();
    if let Some(at) = tls.and_then(|tls| tls.expires_at()) {
        metrics::gauge!(EXPIRY).set(at.as_second() as f64);
    }
}
