//! A file that appears when the machine is about to go: what other software on the machine may write.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt};
use tokio::time::sleep;

use super::{FailureBackoff, NoticeSender, NoticeSource, NoticeSourceKind, Setting};

pub(super) const KIND: NoticeSourceKind = NoticeSourceKind {
    name: "file",
    setting: Setting::Path,
    open,
};

/// A look costs microseconds.
const INTERVAL: Duration = Duration::from_millis(250);

const SIGNAL: &str = "file";

#[derive(Debug)]
struct File(PathBuf);

fn open(setting: &[String]) -> Result<Box<dyn NoticeSource>, String> {
    match setting {
        [path] if path.starts_with('/') => Ok(Box::new(File(path.into()))),
        _ => Err("must be an absolute path".to_owned()),
    }
}

impl File {
    /// Looks on another thread: the file's disk may hang.
    async fn exists(&self) -> io::Result<bool> {
        tokio::fs::try_exists(&self.0).await
    }
}

fn pass_on(notices: &NoticeSender, path: &str, exists: bool) -> bool {
    let sent = match exists {
        true => notices
            .preempt(SIGNAL, &format!("{path} exists"), None)
            .map(drop),
        false => notices.withdraw(SIGNAL),
    };
    notices.passed(path, sent)
}

impl NoticeSource for File {
    fn watch(self: Box<Self>, notices: NoticeSender) -> BoxFuture<'static, ()> {
        let watch = async move {
            let path = self.0.display().to_string();
            let mut passed_on = false;
            let mut backoff = FailureBackoff::default();
            loop {
                let pause = match self.exists().await {
                    Ok(exists) => {
                        backoff.succeeded();
                        if exists != passed_on && pass_on(&notices, &path, exists) {
                            passed_on = exists;
                        }
                        INTERVAL
                    }
                    Err(error) => {
                        backoff.failed(&notices, &format!("cannot look for {path}"), &error)
                    }
                };
                sleep(pause).await;
            }
        };
        watch.boxed()
    }

    fn probe(self: Box<Self>) -> BoxFuture<'static, Result<String, String>> {
        let probe = async move {
            let path = self.0.display();
            match self.exists().await {
                Ok(true) => Ok(format!("{path} exists: the machine is about to stop")),
                Ok(false) => Ok(format!("no notice: {path} does not exist")),
                Err(error) => Err(format!("cannot look for {path}: {error}")),
            }
        };
        probe.boxed()
    }
}
