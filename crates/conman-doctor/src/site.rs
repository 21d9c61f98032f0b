/// Where on a host sessions are, and what is there already.
#[derive(Debug, Clone, Copy, Default)]
pub struct Site<'a> {
    /// Directories that their files lie in.
    pub folders: &'a [&'a str],
    /// The cgroup above all of them, as a path in every hierarchy; it need not exist yet.
    pub cgroup: Option<&'a str>,
    /// Sessions that there are. Known to the daemon alone, whose own limits are looked at then;
    /// what they take of limits that the kernel keeps no count of is reckoned from it.
    pub alive: Option<u64>,
}
