//! The kernel interfaces, on the real kernel.

mod cgroup;
mod death;
mod launching;
mod lookup_beneath;
mod netns;
mod support;
