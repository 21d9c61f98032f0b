//! Network namespaces of the tests: each is a thread that has entered a new one.

use std::fs::File;
use std::sync::mpsc;
use std::thread::JoinHandle;

use conman_linux::{Namespaces, bring_loopback_up, unshare_namespaces};
use conman_net::Namespace;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

type Work = Box<dyn FnOnce() + Send>;

/// A thread in a network namespace, which ends with it.
pub(crate) struct Host {
    work: Option<mpsc::SyncSender<Work>>,
    thread: Option<JoinHandle<()>>,
}

impl Host {
    pub(crate) fn new() -> Self {
        let (work, queue) = mpsc::sync_channel::<Work>(1);
        let thread = std::thread::spawn(move || {
            unshare_namespaces(Namespaces::NEWNET).expect("a namespace; this needs root");
            bring_loopback_up().expect("loopback is up");
            for family in ["ipv4", "ipv6"] {
                let setting = format!("/proc/sys/net/{family}/conf/all/forwarding");
                std::fs::write(setting, "1").expect("it forwards");
            }
            while let Ok(next) = queue.recv() {
                next();
            }
        });
        Self {
            work: Some(work),
            thread: Some(thread),
        }
    }

    /// Runs something in the namespace.
    pub(crate) fn run<T: Send + 'static>(&self, run: impl FnOnce() -> T + Send + 'static) -> T {
        let (answer, answered) = mpsc::sync_channel(1);
        let work: Work = Box::new(move || drop(answer.send(run())));
        let sender = self.work.as_ref().expect("not dropped");
        sender.send(work).expect("the thread lives");
        answered.recv().expect("no panic in the namespace")
    }

    /// Runs a future there. What it spawns runs on the runtime of the test.
    pub(crate) fn wait<T: Send + 'static, F: Future<Output = T>>(
        &self,
        run: impl FnOnce() -> F + Send + 'static,
    ) -> T {
        let runtime = tokio::runtime::Handle::current();
        self.run(move || runtime.block_on(run()))
    }

    /// What a session's first process sends of its namespace.
    pub(crate) fn namespace(&self) -> Namespace {
        self.run(|| Namespace {
            file: File::open("/proc/thread-self/ns/net")
                .expect("opened")
                .into(),
            socket: socket_with(
                AddressFamily::NETLINK,
                SocketType::RAW,
                SocketFlags::CLOEXEC,
                None,
            )
            .expect("a socket"),
        })
    }

    /// Names of all interfaces but loopback.
    pub(crate) fn links(&self) -> Vec<String> {
        self.run(|| {
            let text = std::fs::read_to_string("/proc/thread-self/net/dev").expect("readable");
            let names = text
                .lines()
                .skip(2)
                .filter_map(|line| line.split(':').next());
            names
                .map(|name| name.trim().to_owned())
                .filter(|name| name != "lo")
                .collect()
        })
    }

    /// The namespace's file, for other programs.
    pub(crate) fn path(&self) -> String {
        self.run(|| {
            let thread = std::fs::read_link("/proc/thread-self").expect("readable");
            format!("/proc/{}/ns/net", thread.display())
        })
    }

    /// Runs a script there and returns what it prints.
    pub(crate) fn shell(&self, script: &str) -> String {
        let script = format!("set -e; {script}");
        self.run(move || {
            let output = std::process::Command::new("sh")
                .args(["-c", &script])
                .output();
            let output = output.expect("it runs");
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{script}: {text}{errors}");
            text
        })
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.work = None;
        // A panic there has failed the test already.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
