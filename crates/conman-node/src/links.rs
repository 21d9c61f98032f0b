//! Links that operators attach to running sessions.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use conman_linux::{PidFd, network_namespace};
use conman_net::attached::{self, LinkError, NewLink};
use conman_net::{Namespace, class_of};
use conman_proto::{LinkRequest, SessionId, SessionLink};

use crate::access::not_running;
use crate::context::Context;
use crate::error::AccessError;
use crate::session::SessionHandle;

/// Attaches a link to a running session.
pub(crate) async fn attach(
    context: &Context,
    handle: &SessionHandle,
    request: &LinkRequest,
) -> Result<SessionLink, AccessError> {
    let parsed = NewLink::parse(request).map_err(|error| AccessError::BadLink { error })?;
    let link = NewLink {
        bandwidth: handle.spec().bandwidth,
        ..parsed
    };
    apply_rules(context, handle).await?;
    handle.may_have_links.store(true, Ordering::Relaxed);
    let netlink = context.options.netlink.clone();
    let made = change(context, handle, move |namespace| {
        attached::make(&netlink, &link, namespace)
    })
    .await?;
    tracing::info!(session = %handle.id, link = made.name, to = %made.to, "attached a link");
    Ok(made)
}

/// Puts the rules for what every session is refused into its namespace, before it has a way out.
async fn apply_rules(context: &Context, handle: &SessionHandle) -> Result<(), AccessError> {
    let file = change(context, handle, |namespace| Ok(namespace.file)).await?;
    let class = class_of(handle.spec().template.as_deref().unwrap_or_default());
    let applied = context.options.session_rules.apply(class, file).await;
    applied.map_err(|error| namespace_failed(handle.id.clone(), io::Error::other(error)))
}

/// Lists the links that are attached to a running session.
pub(crate) async fn list(
    context: &Context,
    handle: &SessionHandle,
) -> Result<Vec<SessionLink>, AccessError> {
    if handle.spec().network.traits().shares_host {
        return Ok(Vec::new());
    }
    change(context, handle, attached::list).await
}

/// Detaches a link from a running session.
pub(crate) async fn detach(
    context: &Context,
    handle: &SessionHandle,
    name: String,
) -> Result<(), AccessError> {
    let link = name.clone();
    change(context, handle, move |namespace| {
        attached::delete(&name, namespace)
    })
    .await?;
    tracing::info!(session = %handle.id, link, "detached a link");
    Ok(())
}

/// Deletes the links that a crash of an earlier daemon has left unfinished in the sessions that it adopted.
pub(crate) async fn sweep(context: Arc<Context>) {
    for handle in context.sessions.shown_after(None) {
        let Some(process) = handle.view().process else {
            continue;
        };
        if handle.spec().network.traits().shares_host {
            continue;
        }
        let swept = match namespace(&context, process).await {
            Ok(namespace) => blocking(move || attached::sweep(namespace)).await,
            Err(error) => Err(error),
        };
        match swept {
            Ok(0) => {}
            Ok(count) => tracing::info!(session = %handle.id, count, "deleted unfinished links"),
            // It has ended, and its links with it, or the next daemon tries again.
            Err(error) => {
                tracing::debug!(session = %handle.id, %error, "cannot look for unfinished links");
            }
        }
    }
}

/// Runs something with a running session's namespace, on another thread.
async fn change<T: Send + 'static>(
    context: &Context,
    handle: &SessionHandle,
    run: impl FnOnce(Namespace) -> Result<T, LinkError> + Send + 'static,
) -> Result<T, AccessError> {
    let id = || handle.id.clone();
    if handle.spec().network.traits().shares_host {
        return Err(AccessError::NodesNetwork { id: id() });
    }
    let process = handle.view().process;
    let process = process.ok_or_else(|| not_running(handle))?;
    let namespace = namespace(context, process).await;
    let namespace = namespace.map_err(|source| namespace_failed(id(), source))?;
    let done = blocking(move || Ok(run(namespace))).await;
    done.map_err(|source| namespace_failed(id(), source))?
        .map_err(|source| AccessError::Link { id: id(), source })
}

fn namespace_failed(id: SessionId, source: io::Error) -> AccessError {
    let source = LinkError::Namespace(source);
    AccessError::Link { id, source }
}

async fn namespace(context: &Context, process: Arc<PidFd>) -> io::Result<Namespace> {
    let socket = context.sockets.netlink_socket(Arc::clone(&process)).await?;
    let file = network_namespace(&process)?;
    Ok(Namespace { file, socket })
}

async fn blocking<T: Send + 'static>(
    run: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(run).await?
}
