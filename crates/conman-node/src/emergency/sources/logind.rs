//! systemd-logind: receives its announcement of a shutdown, and delays the shutdown until everything is released and
//! nothing passes through the node any more.
//!
//! With a delay inhibitor, logind announces a shutdown (`PrepareForShutdown`) and waits until the inhibitor is
//! closed, for `InhibitDelayMaxSec` of logind.conf at most (5 s by default).
//!
//! <https://www.freedesktop.org/software/systemd/man/latest/org.freedesktop.login1.html>,
//! <https://systemd.io/INHIBITOR_LOCKS/>

use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::StreamExt;
use tokio::time::{sleep, timeout};
use zbus::{Address, Connection, OwnedFd, connection};

use super::{FailureBackoff, NoticeSender, NoticeSource, NoticeSourceKind, Setting};

pub(super) const KIND: NoticeSourceKind = NoticeSourceKind {
    name: "logind",
    setting: Setting::Endpoint(SYSTEM_BUS),
    open,
};

/// Where systemd's distributions have it.
const SYSTEM_BUS: &str = "unix:path=/run/dbus/system_bus_socket";

/// A call to the bus or to logind.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

const SIGNAL: &str = "shutdown";

#[derive(Debug)]
struct Logind(Address);

#[zbus::proxy(
    default_service = "org.freedesktop.login1",
    default_path = "/org/freedesktop/login1",
    interface = "org.freedesktop.login1.Manager"
)]
trait Manager {
    fn inhibit(&self, what: &str, who: &str, why: &str, mode: &str) -> zbus::Result<OwnedFd>;

    #[zbus(property(emits_changed_signal = "false"), name = "InhibitDelayMaxUSec")]
    fn inhibit_delay_max_usec(&self) -> zbus::Result<u64>;

    #[zbus(property(emits_changed_signal = "false"))]
    fn preparing_for_shutdown(&self) -> zbus::Result<bool>;

    #[zbus(signal)]
    fn prepare_for_shutdown(&self, start: bool) -> zbus::Result<()>;
}

fn open(setting: &[String]) -> Result<Box<dyn NoticeSource>, String> {
    let [address] = setting else {
        return Err(format!(
            "must be the address of a bus, for example {SYSTEM_BUS}"
        ));
    };
    let address = Address::try_from(address.as_str());
    let address = address.map_err(|error| {
        format!("is no address of a bus ({error}); give one such as {SYSTEM_BUS}")
    })?;
    Ok(Box::new(Logind(address)))
}

/// Bounds what D-Bus calls alone are not bounded in.
async fn in_time<T>(call: impl Future<Output = zbus::Result<T>>) -> zbus::Result<T> {
    let late = |_| Err(zbus::Error::Failure("no answer in time".to_owned()));
    timeout(CALL_TIMEOUT, call).await.unwrap_or_else(late)
}

impl Logind {
    async fn connect(&self) -> zbus::Result<Connection> {
        let builder = connection::Builder::address(self.0.clone());
        in_time(builder.method_timeout(CALL_TIMEOUT).build()).await
    }

    /// Watches until the bus or logind ends.
    async fn watch_once(
        &self,
        notices: &NoticeSender,
        passed_on: &mut bool,
        backoff: &mut FailureBackoff,
    ) -> zbus::Result<()> {
        let connection = self.connect().await?;
        let manager = in_time(ManagerProxy::new(&connection)).await?;
        let mut signals = in_time(manager.receive_prepare_for_shutdown()).await?;
        // Before the shutdown, which leaves no time for it.
        let delay = manager.inhibit_delay_max_usec().await.ok();
        let delay = delay.map(Duration::from_micros);
        let (mut begins, mut inhibitor) = inhibit(&manager).await?;
        backoff.succeeded();
        loop {
            if begins != *passed_on {
                pass_on(notices, begins, delay, inhibitor.take())?;
                *passed_on = begins;
            }
            if !begins && inhibitor.is_none() {
                (begins, inhibitor) = inhibit(&manager).await?;
                continue;
            }
            let Some(signal) = signals.next().await else {
                return Err(zbus::Error::Failure("the bus has ended".to_owned()));
            };
            begins = signal.args()?.start;
        }
    }
}

/// Whether a shutdown has begun, and an inhibitor if not: logind gives none during a shutdown.
async fn inhibit(manager: &ManagerProxy<'_>) -> zbus::Result<(bool, Option<OwnedFd>)> {
    let why = "sessions are killed and released, so that other nodes serve them";
    let inhibitor = manager.inhibit("shutdown", "conman", why, "delay").await;
    match manager.preparing_for_shutdown().await? {
        true => Ok((true, inhibitor.ok())),
        false => Ok((false, Some(inhibitor?))),
    }
}

/// Passes the beginning of a shutdown on, which keeps the inhibitor until the report, or its end.
fn pass_on(
    notices: &NoticeSender,
    begins: bool,
    delay: Option<Duration>,
    inhibitor: Option<OwnedFd>,
) -> zbus::Result<()> {
    let sent = match begins {
        true => notices
            .preempt(SIGNAL, "logind shuts this machine down", delay)
            .map(|report| {
                tokio::spawn(async move {
                    // Whatever the report says: more time would not help.
                    let _ = report.await;
                    drop(inhibitor);
                });
            }),
        false => notices.withdraw(SIGNAL),
    };
    sent.map_err(|error| zbus::Error::Failure(error.to_string()))
}

impl NoticeSource for Logind {
    fn watch(self: Box<Self>, notices: NoticeSender) -> BoxFuture<'static, ()> {
        let watch = async move {
            let mut passed_on = false;
            let mut backoff = FailureBackoff::default();
            loop {
                let watched = self.watch_once(&notices, &mut passed_on, &mut backoff);
                if let Err(error) = watched.await {
                    let what = "cannot watch logind for shutdowns";
                    sleep(backoff.failed(&notices, what, &error)).await;
                }
            }
        };
        watch.boxed()
    }

    fn probe(self: Box<Self>) -> BoxFuture<'static, Result<String, String>> {
        let probe = async move {
            let connection = self.connect().await?;
            let manager = ManagerProxy::new(&connection).await?;
            let delay = Duration::from_micros(manager.inhibit_delay_max_usec().await?);
            // The probe also tests whether conman may take an inhibitor.
            let state = match inhibit(&manager).await? {
                (true, _) => "a shutdown has begun",
                (false, _) => "no notice",
            };
            Ok(format!(
                "{state}; it may be delayed by {} s",
                delay.as_secs_f64()
            ))
        };
        let described = |error: zbus::Error| conman_core::error_chain(&error);
        probe.map(move |probed| probed.map_err(described)).boxed()
    }
}
