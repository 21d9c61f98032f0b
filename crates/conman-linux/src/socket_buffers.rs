//! Bounds and measures the kernel's buffers of sockets.

#![expect(
    unsafe_code,
    reason = "no crate in use has TCP_WINDOW_CLAMP and SO_MEMINFO"
)]

use std::io;
use std::os::fd::{AsFd, AsRawFd as _};

use libc::{c_int, socklen_t};

/// From linux/sock_diag.h: the values of `SO_MEMINFO`, and those that count what a socket holds.
const MEMORY_VALUES: usize = 9;
const RECEIVED: usize = 0;
const QUEUED_TO_SEND: usize = 5;
const BACKLOG: usize = 7;

/// Bounds what the kernel buffers for a TCP connection: what the peer may send before it is read, and what is
/// accepted for sending beyond what is on its way. The automatic sizes of the kernel grow to several MB.
pub fn bound_tcp_buffers(socket: impl AsFd, bytes: u32) -> io::Result<()> {
    let bytes = c_int::try_from(bytes).unwrap_or(c_int::MAX);
    for option in [libc::TCP_WINDOW_CLAMP, libc::TCP_NOTSENT_LOWAT] {
        // SAFETY: the value is an int that lives until the call returns, and its size is given.
        let outcome = unsafe {
            libc::setsockopt(
                socket.as_fd().as_raw_fd(),
                libc::IPPROTO_TCP,
                option,
                (&raw const bytes).cast(),
                length_of(&bytes),
            )
        };
        if outcome != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Returns the kernel memory that a socket's buffers hold, in bytes.
pub fn socket_memory(socket: impl AsFd) -> io::Result<u64> {
    let mut values = [0_u32; MEMORY_VALUES];
    let mut length = length_of(&values);
    // SAFETY: the kernel writes at most `length` bytes into `values`, which live until the call returns.
    let outcome = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_MEMINFO,
            values.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if outcome != 0 {
        return Err(io::Error::last_os_error());
    }
    let held = [RECEIVED, QUEUED_TO_SEND, BACKLOG].map(|index| u64::from(values[index]));
    Ok(held.iter().sum())
}

fn length_of<T>(value: &T) -> socklen_t {
    socklen_t::try_from(size_of_val(value)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::net::{TcpListener, TcpStream};

    use super::*;

    /// Writes until the kernel takes no more. Returns what both ends hold then.
    fn filled(bound: Option<u32>) -> u64 {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound");
        let mut sender = TcpStream::connect(address).expect("connected");
        let (receiver, _) = listener.accept().expect("accepted");
        for socket in [&sender, &receiver] {
            if let Some(bytes) = bound {
                bound_tcp_buffers(socket, bytes).expect("bounded");
            }
        }
        sender.set_nonblocking(true).expect("set");
        // Acknowledgements arrive later than writes.
        for _ in 0..50 {
            while sender.write(&[0; 65_536]).is_ok() {}
            std::thread::park_timeout(std::time::Duration::from_millis(2));
        }
        let held = |socket| socket_memory(socket).expect("measured");
        held(&sender) + held(&receiver)
    }

    #[test]
    fn a_bounded_connection_holds_no_more_than_its_bound_in_each_direction() {
        let (automatic, bounded) = (filled(None), filled(Some(32 << 10)));
        assert!(automatic > 1 << 20, "{automatic}");
        // What is held has overhead for each packet.
        assert!((1..512 << 10).contains(&bounded), "{bounded}");
    }
}
