//! Brings up the loopback interface of a network namespace.

use std::io;
use std::os::fd::AsRawFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

/// Brings up `lo` in the calling thread's network namespace; the kernel gives it its addresses.
#[expect(unsafe_code, reason = "this ioctl has no safe wrapper")]
pub fn bring_loopback_up() -> io::Result<()> {
    let socket = socket_with(
        AddressFamily::INET,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    // SAFETY: `ifreq` is a plain C structure of integers and unions of them; all zeroes is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = libc::c_char::from_ne_bytes([*from]);
    }
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(libc::IFF_UP | libc::IFF_RUNNING)
        .map_err(|_| io::Error::other("interface flags do not fit"))?;
    // SAFETY: SIOCSIFFLAGS reads one `ifreq`, which is alive and initialised, name (terminated by
    // the zeroes behind it) and flags, and writes nothing.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw mut request) };
    if result == 0 {
        return Ok(());
    }
    Err(io::Error::last_os_error())
}
