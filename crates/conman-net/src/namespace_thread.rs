//! Threads that enter a session's network namespace.

use std::io;
use std::os::fd::BorrowedFd;
use std::thread;

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

/// Moves the calling thread into a network namespace, where it stays.
pub(crate) fn enter(namespace: BorrowedFd<'_>) -> io::Result<()> {
    Ok(move_into_link_name_space(
        namespace,
        Some(LinkNameSpaceType::Network),
    )?)
}
