//! Reloads the nodes' credentials when their files change.

use std::fmt::Display;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::task::spawn_blocking;
use tokio_util::sync::CancellationToken;

use super::peers::Credentials;
use super::trouble::{News, Trouble};

/// Interval between checks of the files. They are small, and a short-lived certificate must be
/// replaced in time.
const LOOK_EVERY: Duration = Duration::from_secs(5);

const EXPIRY: &str = "conman_fleet_certificate_expiry_timestamp_seconds";

/// The credentials that are reloaded.
#[derive(Debug, Clone)]
pub(super) struct Renewal {
    credentials: Credentials,
    troubles: Arc<Troubles>,
}

/// Errors of the files.
#[derive(Debug, Default)]
struct Troubles {
    secret: Mutex<Trouble>,
    tls: Mutex<Trouble>,
}

/// Why the files are checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Occasion {
    /// The periodic check.
    Turn,
    /// An operator's order; its result is always reported.
    Order,
}

impl Renewal {
    /// Checks periodically whether the certificates or the secret have changed, until the daemon
    /// stops.
    pub(super) fn run(credentials: &Credentials, closing: CancellationToken) -> Self {
        let renewal = Self {
            credentials: credentials.clone(),
            troubles: Arc::default(),
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
                looking.look(Occasion::Turn).await;
            }
        });
        renewal
    }

    /// Takes changed files. Invalid ones are reported, and the former content stays in use.
    pub(super) async fn look(&self, occasion: Occasion) {
        // Certificates may be derived from the secret.
        self.look_at_secret(occasion).await;
        self.look_at_tls(occasion).await;
    }

    /// The keys of connect tokens, and derived certificates, change with the secret.
    async fn look_at_secret(&self, occasion: Occasion) {
        let Some(secret) = self.credentials.secret.clone() else {
            return;
        };
        // It reads a file, so it must not run on a thread that serves requests.
        let read = spawn_blocking(move || secret.reload().map_err(|error| super::chain(&error)));
        let read = read.await.unwrap_or_else(|error| Err(panicked(&error)));
        let known = &self.troubles.secret;
        tell(
            known,
            occasion,
            ("the fleet's secret", "the fleet's former secret"),
            read,
        );
    }

    async fn look_at_tls(&self, occasion: Occasion) {
        let Some(tls) = self.credentials.tls.clone() else {
            return;
        };
        let read = spawn_blocking(move || tls.reload().map_err(|error| super::chain(&error)));
        let read = read.await.unwrap_or_else(|error| Err(panicked(&error)));
        let known = &self.troubles.tls;
        tell(
            known,
            occasion,
            ("the fleet's certificates", "the former certificates"),
            read,
        );
        tell_expiry(&self.credentials);
    }
}

fn panicked(error: &dyn Display) -> String {
    format!("reading it panicked: {error}")
}

/// Logs the result of a check: whether the file has changed, or why it cannot be used.
fn tell(
    known: &Mutex<Trouble>,
    occasion: Occasion,
    (what, former): (&str, &str),
    read: Result<bool, String>,
) {
    if read == Ok(true) {
        tracing::info!("reloaded {what}");
    }
    // A panic while the lock is held cannot leave half a change.
    let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
    match known.look(read.err(), occasion == Occasion::Order) {
        Some(News::Wrong(why)) => tracing::error!(%why, "cannot reload {what}; keeping {former}"),
        Some(News::Over) => tracing::info!("{what} can be read again"),
        None => {}
    }
}

fn tell_expiry(credentials: &Credentials) {
    let tls = credentials.tls.as_ref();
    if let Some(at) = tls.and_then(|tls| tls.expires_at()) {
        metrics::gauge!(EXPIRY).set(at.as_second() as f64);
    }
}
