//! Takes over descriptors that were inherited through exec.

use std::io;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};

/// The first descriptor after the standard ones.
const FIRST_OWN_FD: RawFd = 3;

/// Takes over a descriptor that this process inherited through exec, by number. It becomes close-on-exec,
/// and cannot be taken twice.
///
/// An error for a number that is not open or was not inherited: descriptors that this process opened are
/// close-on-exec, inherited ones are not.
#[expect(unsafe_code, reason = "a number becomes a descriptor")]
pub fn inherited_fd(number: RawFd) -> io::Result<OwnedFd> {
    if number < FIRST_OWN_FD {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("descriptor {number} is a standard one or invalid"),
        ));
    }
    // SAFETY: the number is not -1, and it is used for two fcntl(2) calls only, which have no
    // effect on memory and fail when it is not open.
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    let flags = fcntl_getfd(borrowed)?;
    if flags.contains(FdFlags::CLOEXEC) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("descriptor {number} was not handed over"),
        ));
    }
    fcntl_setfd(borrowed, FdFlags::CLOEXEC)?;
    // SAFETY: it is open. Every descriptor that this program makes, and that the standard library
    // makes, is close-on-exec from its birth; this one was not, so it came through exec and has no
    // owner here. From now on it is, so a second call for it fails.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn what_was_not_handed_over_or_is_not_open_is_refused() {
        let own = std::fs::File::open("/dev/null").expect("there is one");
        assert!(inherited_fd(own.as_raw_fd()).is_err());
        assert!(inherited_fd(1).is_err());
        assert!(inherited_fd(-1).is_err());
        assert!(inherited_fd(1 << 20).is_err());
    }
}
