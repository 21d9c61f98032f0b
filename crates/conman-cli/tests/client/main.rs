//! The real client process against a fake daemon on a Unix socket: output, exit codes, and what
//! the daemon is asked.

mod calls;
mod exec;
mod images;
mod node;
mod refusals;
mod sessions;
mod streams;
mod support;
mod terminal;
