//! Reads again what nodes know each other by, when it changes.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::peers::Credentials;

/// Between two looks at the files.
const LOOK_EVERY: Duration = Duration::from_secs(30);

/// Looks now and then whether the certificates or the secret have changed, until the daemon stops.
pub(super) fn run(credentials: &Credentials, closing: CancellationToken) {
    if credentials.tls.is_some() {
        metrics::describe_gauge!(
            "conman_fleet_certificate_expiry_seconds",
            "When this node's certificate for other nodes ends, in seconds since 1970"
        );
        tell_expiry(credentials);
    }
    if credentials.tls.is_none() && credentials.secret.is_none() {
        return;
    }
    let credentials = credentials.clone();
    tokio::spawn(async move {
        let pause = || tokio::time::sleep(LOOK_EVERY);
        // A look that is not taken any more matters to nobody.
        while closing.run_until_cancelled(pause()).await.is_some() {
            reload(&credentials).await;
        }
    });
}

/// Takes what has changed; what is wrong stays as it was.
pub(super) async fn reload(credentials: &Credentials) {
    reload_tls(credentials).await;
    reload_secret(credentials).await;
}

/// The keys of connect tokens follow.
async fn reload_secret(credentials: &Credentials) {
    let Some(secret) = credentials.secret.clone() else {
        return;
    };
    // A file is read: not on a thread that serves requests.
    match tokio::task::spawn_blocking(move || secret.reload()).await {
        Ok(Ok(true)) => tracing::info!("read the fleet's secret again"),
        Ok(Ok(false)) => {}
        Ok(Err(error)) => {
            tracing::error!("kept the fleet's former secret: {}", super::chain(&error));
        }
        Err(error) => tracing::error!(%error, "reading the fleet's secret panicked"),
    }
}

async fn reload_tls(credentials: &Credentials) {
    let Some(tls) = credentials.tls.clone() else {
        return;
    };
    match tokio::task::spawn_blocking(move || tls.reload()).await {
        Ok(Ok(true)) => tracing::info!("read the fleet's certificates again"),
        Ok(Ok(false)) => {}
        Ok(Err(error)) => {
            tracing::error!("kept the former certificates: {}", super::chain(&error));
        }
        Err(error) => tracing::error!(%error, "reading the fleet's certificates panicked"),
    }
    tell_expiry(credentials);
}

fn tell_expiry(credentials: &Credentials) {
    if let Some(tls) = &credentials.tls {
        let seconds = tls.expires_at().as_second();
        metrics::gauge!("conman_fleet_certificate_expiry_seconds").set(seconds as f64);
    }
}
