//! What belongs to one start: logs, files, binds. The container's first process waits for it, most often for less than
//! a millisecond; one made ahead waits until a start takes it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use conman_fence::Start;
use conman_linux::SessionCgroup;
use conman_shim_protocol::{LaunchError, LaunchSpec, NetworkSpec};
use rustix::fs::OFlags;

use super::handed::Finish;
use super::launch::{Launcher, Made};
use super::under_way::UnderWay;

impl Launcher {
    /// Finishes a container made ahead as the one of this start. It waits as before if that fails before anything can
    /// find it by the start's name.
    pub(super) fn complete(
        &self,
        order: &Start,
        fds: Vec<OwnedFd>,
        ahead: &mut UnderWay,
    ) -> Result<(), LaunchError> {
        let made = ahead.waiting().ok_or(LaunchError::EndedEarly)?;
        if let Some(scratch) = &mut made.scratch {
            scratch.moved(&order.spec.root)?;
        }
        if let Some(cgroup) = &made.cgroup {
            label(cgroup, &order.spec.name)?;
        }
        let (made, socket) = ahead.resume().ok_or(LaunchError::EndedEarly)?;
        self.hand_over_rest(order, fds, made, (socket, true))
    }

    /// Hands over what belongs to one start. A process made ahead has another spec, and no socket for a link.
    pub(super) fn hand_over_rest(
        &self,
        order: &Start,
        mut fds: Vec<OwnedFd>,
        made: &mut Made,
        (socket, is_ahead): (&OwnedFd, bool),
    ) -> Result<(), LaunchError> {
        let spec = &order.spec;
        let link = (is_ahead && spec.network == NetworkSpec::Linked).then(|| fds.pop());
        let (log, log_stderr) = open_logs(spec, &mut fds, &mut made.logs)?;
        let files = self.places.files(order.ids, &spec.files);
        let files =
            files.map_err(|error| LaunchError::step("make the container's files", &error))?;
        let user_namespace = made.user_namespace.as_ref();
        let user_namespace = user_namespace.ok_or(LaunchError::EndedEarly)?;
        let binds = self.own_binds(spec, fds, user_namespace.as_fd(), order.ids)?;
        let quota = made.cgroup.as_ref().and_then(SessionCgroup::cpu_quota);
        let mounts = files.iter().chain(&binds).map(AsFd::as_fd);
        let logs = [&log].into_iter().chain(&log_stderr).map(AsFd::as_fd);
        let link = link.iter().flatten().map(AsFd::as_fd);
        let fds = logs.chain(mounts).chain(link);
        let fds: Vec<_> = fds.chain(quota.map(|(file, _)| file)).collect();
        let finish = Finish {
            quota: quota.map(|(_, text)| text.to_owned()),
            spec: is_ahead.then(|| Box::new(spec.clone())),
        };
        finish.hand_over(socket, &fds)
    }
}

/// Writes down whose a cgroup is that was made ahead.
pub(super) fn label(cgroup: &SessionCgroup, name: &str) -> Result<(), LaunchError> {
    let labelled = cgroup.label(name);
    labelled.map_err(|error| LaunchError::step("label the cgroup", &error))
}

/// Returns what the container's standard output is written to, and its standard error if that is kept
/// apart.
fn open_logs(
    spec: &LaunchSpec,
    binds: &mut Vec<OwnedFd>,
    made: &mut Vec<PathBuf>,
) -> Result<(OwnedFd, Option<OwnedFd>), LaunchError> {
    // The terminal takes the log's place; it is the first descriptor.
    let log = if spec.terminal.is_some() && !binds.is_empty() {
        binds.remove(0)
    } else {
        open_log(&spec.log, made).map_err(|error| LaunchError::step("open the log", &error))?
    };
    let log_stderr = spec.log_stderr.as_ref();
    let log_stderr = log_stderr.map(|path| open_log(path, made));
    let log_stderr = log_stderr
        .transpose()
        .map_err(|error| LaunchError::step("open the log of its errors", &error))?;
    Ok((log, log_stderr))
}

/// Opens the log, which the container's processes write to.
///
/// Root owns it: only a file's owner may change its mode or take a lease, which would block its readers.
/// All users may write to it, so that programs can open `/dev/stdout`; only root can reach its
/// directory.
fn open_log(path: &Path, made: &mut Vec<PathBuf>) -> io::Result<OwnedFd> {
    let mut options = File::options();
    options
        .append(true)
        .mode(0o600)
        .custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed());
    let file = match options.clone().create_new(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => options.open(path)?,
        other => {
            let file = other?;
            made.push(path.to_owned());
            file
        }
    };
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    std::os::unix::fs::fchown(&file, Some(0), Some(0))?;
    file.set_permissions(std::fs::Permissions::from_mode(0o622))?;
    Ok(file.into())
}
