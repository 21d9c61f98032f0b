//! Disks that fail on command, for this crate's tests.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, Weak};

use redb::backends::FileBackend;
use redb::{BackendError, StorageBackend};

/// Keyed by file name. The tests own the plans; a plan without an owner has no effect.
static PLANS: LazyLock<Mutex<HashMap<PathBuf, Weak<Faults>>>> = LazyLock::new(Mutex::default);

/// When operations that change the file fail.
#[derive(Debug)]
pub(crate) struct Faults {
    /// Operations until the first failure; negative for never.
    until: AtomicI64,
    /// Remaining failures.
    failures: AtomicI64,
    /// Whether the failures are those of a full disk or of a broken one.
    full: AtomicBool,
    stalled: Mutex<bool>,
    moved: Condvar,
}

impl Faults {
    /// Controls the file of this name from its next open until this value is dropped.
    pub(crate) fn install(path: &Path) -> Arc<Self> {
        let faults = Arc::new(Self {
            until: AtomicI64::new(-1),
            failures: AtomicI64::new(0),
            full: AtomicBool::new(true),
            stalled: Mutex::new(false),
            moved: Condvar::new(),
        });
        PLANS
            .lock()
            .expect("no panic")
            .insert(path.to_owned(), Arc::downgrade(&faults));
        faults
    }

    /// Lets `operations` succeed, and `failures` after them fail.
    pub(crate) fn fail_after(&self, operations: u32, failures: i64) {
        self.failures.store(failures, Ordering::SeqCst);
        self.until.store(operations.into(), Ordering::SeqCst);
    }

    /// Whether failures are those of a full disk (the default) or of a broken one.
    pub(crate) fn set_full(&self, full: bool) {
        self.full.store(full, Ordering::SeqCst);
    }

    /// Makes every sync wait until the guard is dropped.
    pub(crate) fn stall(&self) -> Stalled<'_> {
        *self.stalled.lock().expect("no panic") = true;
        Stalled { faults: self }
    }

    fn wait(&self) {
        let stalled = self.stalled.lock().expect("no panic");
        drop(
            self.moved
                .wait_while(stalled, |stalled| *stalled)
                .expect("no panic"),
        );
    }

    pub(crate) fn heal(&self) {
        self.until.store(-1, Ordering::SeqCst);
    }

    fn operate(&self) -> io::Result<()> {
        let left = self.until.load(Ordering::SeqCst);
        if left < 0 {
            return Ok(());
        }
        if left > 0 {
            self.until.store(left - 1, Ordering::SeqCst);
            return Ok(());
        }
        if self.failures.fetch_sub(1, Ordering::SeqCst) <= 0 {
            self.heal();
            return Ok(());
        }
        let full = self.full.load(Ordering::SeqCst);
        let errno = if full {
            rustix::io::Errno::NOSPC
        } else {
            rustix::io::Errno::IO
        };
        Err(errno.into())
    }
}

/// A stalled disk. Declare it after the users of the disk, so that it is released first when a test
/// fails.
#[derive(Debug)]
pub(crate) struct Stalled<'a> {
    faults: &'a Faults,
}

impl Drop for Stalled<'_> {
    fn drop(&mut self) {
        *self.faults.stalled.lock().expect("no panic") = false;
        self.faults.moved.notify_all();
    }
}

/// The failing disk of a file, if one was installed for it.
pub(crate) fn backend(file: &File, path: &Path) -> Option<FaultyBackend> {
    let faults = PLANS.lock().expect("no panic").get(path)?.upgrade()?;
    let file = file.try_clone().expect("a descriptor");
    Some(FaultyBackend {
        inner: FileBackend::new(file).expect("a backend"),
        faults,
    })
}

#[derive(Debug)]
pub(crate) struct FaultyBackend {
    inner: FileBackend,
    faults: Arc<Faults>,
}

impl StorageBackend for FaultyBackend {
    fn len(&self) -> io::Result<u64> {
        self.inner.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.inner.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.faults.operate()?;
        self.inner.set_len(len)
    }

    /// Fails after the data was synced: the caller cannot know whether it is durable.
    fn sync_data(&self) -> io::Result<()> {
        self.faults.wait();
        self.inner.sync_data()?;
        self.faults.operate()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.faults.operate()?;
        self.inner.write(offset, data)
    }

    fn close(&self) -> io::Result<()> {
        self.inner.close()
    }

    fn try_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.inner.try_lock_range(start, end)
    }

    fn try_lock_shared_range(
        &self,
        start: Bound<u64>,
        end: Bound<u64>,
    ) -> Result<bool, BackendError> {
        self.inner.try_lock_shared_range(start, end)
    }

    fn lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.inner.lock_range(start, end)
    }

    fn lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.inner.lock_shared_range(start, end)
    }

    fn unlock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.inner.unlock_range(start, end)
    }

    fn query_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.inner.query_lock_range(start, end)
    }
}
