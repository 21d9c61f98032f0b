//! systemd-logind: hears that the machine is being shut down, and delays that until everything is released.
//!
//! With a delay inhibitor, logind announces a shutdown (`PrepareForShutdown`) and waits until the inhibitor is
//! closed, for `InhibitDelayMaxSec` of logind.conf at most (5 s by default).
//!
//! <https://www.freedesktop.org/software/systemd/man/latest/org.freedesktop.login1.html>,
//! <https://systemd.io/INHIBITOR_LOCKS/>

use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::StreamExt;
use tokio::time::sleep;
use zbus::{Address, Connection, OwnedFd, connection};

use super::{NoticeSender, NoticeSource, NoticeSourceKind, Setting, Troubles};

pub(super) const KIND: NoticeSourceKind = NoticeSourceKind {
    name: "logind",
    setting: Setting::Endpoint("unix:path=/run/dbus/system_bus_socket"),
    open,
};

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
        return Err("must be the address of a bus".to_owned());
    };
    let address = Address::try_from(address.as_str());
    let address = address.map_err(|error| format!("is no address of a bus: {error}"))?;
    Ok(Box::new(Logind(address)))
}

impl Logind {
    async fn connect(&self) -> zbus::Result<Connection> {
        connection::Builder::address(self.0.clone())
            .method_timeout(CALL_TIMEOUT)
            .build()
            .await
    }

    /// Watches until the bus or logind ends.
    async fn watch_once(
        &self,
        notices: &NoticeSender,
        passed_on: &mut bool,
        troubles: &mut Troubles,
    ) -> zbus::Result<()> {
        let connection = self.connect().await?;
        let manager = ManagerProxy::new(&connection).await?;
        let mut signals = manager.receive_prepare_for_shutdown().await?;
        let mut inhibitor = Some(inhibit(&manager).await?);
        // A shutdown may have begun before this was heard.
        let mut begins = manager.preparing_for_shutdown().await?;
        troubles.answered();
        loop {
            if begins != *passed_on && pass_on(&manager, notices, begins, &mut inhibitor).await? {
                *passed_on = begins;
            }
            let Some(signal) = signals.next().await else {
                return Err(zbus::Error::Failure("the bus has ended".to_owned()));
            };
            begins = signal.args()?.start;
        }
    }
}

async fn inhibit(manager: &ManagerProxy<'_>) -> zbus::Result<OwnedFd> {
    let why = "sessions are killed and released, so that other nodes serve them";
    manager.inhibit("shutdown", "conman", why, "delay").await
}

/// Passes the beginning of a shutdown on, which gets the inhibitor, or its end. Returns whether that succeeded.
async fn pass_on(
    manager: &ManagerProxy<'_>,
    notices: &NoticeSender,
    begins: bool,
    inhibitor: &mut Option<OwnedFd>,
) -> zbus::Result<bool> {
    if !begins {
        if inhibitor.is_none() {
            *inhibitor = Some(inhibit(manager).await?);
        }
        return Ok(notices.passed("a cancelled shutdown", notices.withdraw(SIGNAL)));
    }
    let delay = manager.inhibit_delay_max_usec().await?;
    let delay = Duration::from_micros(delay);
    let sent = notices.preempt(SIGNAL, "logind shuts this machine down", Some(delay));
    let held = inhibitor.take();
    let sent = sent.map(|report| {
        tokio::spawn(async move {
            // Whatever the report says: more time would not help.
            let _ = report.await;
            drop(held);
        });
    });
    Ok(notices.passed("a shutdown", sent))
}

impl NoticeSource for Logind {
    fn watch(self: Box<Self>, notices: NoticeSender) -> BoxFuture<'static, ()> {
        let watch = async move {
            let mut passed_on = false;
            let mut troubles = Troubles::default();
            loop {
                let watched = self.watch_once(&notices, &mut passed_on, &mut troubles);
                if let Err(error) = watched.await {
                    let what = "cannot hear logind's shutdowns";
                    sleep(troubles.another(&notices, what, &error)).await;
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
            // Whether it may be asked for is part of the answer.
            drop(inhibit(&manager).await?);
            let begins = manager.preparing_for_shutdown().await?;
            let told = if begins {
                "a shutdown has begun"
            } else {
                "no notice"
            };
            Ok(format!(
                "{told}; it may be delayed by {} s",
                delay.as_secs_f64()
            ))
        };
        let described = |error: zbus::Error| conman_core::error_chain(&error);
        probe.map(move |probed| probed.map_err(described)).boxed()
    }
}
