//! Threads that enter a session's network namespace.

use std::io;
use std::os::fd::BorrowedFd;
use std::thread;

use rustix::fs::fstat;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tokio::sync::oneshot;

/// Runs something that leaves the host's network namespace on a thread that ends afterwards.
pub(crate) async fn on_thread<T: Send + 'static>(
    run: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let (answer, answered) = oneshot::channel();
    thread::Builder::new()
        .name("conman-netns".to_owned())
        .spawn(move || drop(answer.send(run())))?;
    let panicked = |_| io::Error::other("the thread inside a session's network has panicked");
    answered.await.map_err(panicked)
}

/// Like [`enter`], but refuses the namespace that the thread is in, which is conman's.
pub(crate) fn enter_other(namespace: BorrowedFd<'_>) -> io::Result<()> {
    let home = std::fs::File::open("/proc/thread-self/ns/net")?;
    if fstat(&home)?.st_ino == fstat(namespace)?.st_ino {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    enter(namespace)
}

/// Moves the calling thread into a network namespace, where it stays.
pub(crate) fn enter(namespace: BorrowedFd<'_>) -> io::Result<()> {
    Ok(move_into_link_name_space(
        namespace,
        Some(LinkNameSpaceType::Network),
    )?)
}
