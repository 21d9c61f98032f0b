//! The proxy on the sessions listener.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use conman_auth::{SessionGuard, SessionGuardOptions};
use conman_proxy::{Proxy, ProxyOptions};

use super::directory::NodeDirectory;
use super::gate::SessionGate;
use super::listeners::Listeners;
use super::services::Services;

pub(super) fn start_proxy(
    services: &Services<'_>,
    listeners: &Listeners,
    directory: NodeDirectory,
) -> Result<Proxy> {
    let config = services.config;
    let guard = SessionGuard::new(
        services.auth.tokens.clone(),
        Arc::clone(&services.connect_tokens),
        listeners.host_rules(config, listeners.sessions_address)?,
        config.listen.origins.clone(),
        SessionGuardOptions {
            cookie_ttl: config.cookie_ttl,
            secure_cookie: config.listen.secure_urls,
        },
    );
    let options = ProxyOptions {
        domain: Some(config.listen.domain.clone()),
        max_connections: config.limits.max_connections,
        max_held: config.limits.node.max_held,
        trust_forwarded: config.listen.trust_forwarded,
        browser_paths: config.listen.browser_paths,
        trusted_headers: config.listen.trusted_headers.clone(),
        watchdog: services.state.watchdog.clone(),
        ..ProxyOptions::default()
    };
    let listener = listeners
        .sessions
        .try_clone()
        .context("cannot share the sessions listener")?;
    let proxy = Proxy::start(
        listener,
        options,
        Arc::new(directory),
        Arc::new(SessionGate::new(guard)),
    )
    .context("cannot start the sessions listener's threads")?;
    proxy.follow(services.node.leave().departure());
    Ok(proxy)
}
