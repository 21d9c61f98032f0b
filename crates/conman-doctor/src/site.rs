//! Where on a host sessions are, and what exists already.

/// Where on a host sessions are, and what exists already.
#[derive(Debug, Clone, Copy, Default)]
pub struct Site<'a> {
    /// Directories with their files.
    pub folders: &'a [&'a str],
    /// The cgroup above all of them, as a path in every hierarchy; it need not exist yet.
    pub cgroup: Option<&'a str>,
    /// Number of existing sessions. Only the daemon knows it, and then its own limits are checked; usage that
    /// the kernel does not count is computed from it.
    pub alive: Option<u64>,
    /// Bytes of TCP buffers that the node's proxies may hold.
    pub proxy_buffer_bytes: u64,
}
