//! Real network namespaces, whose programs use the proxy and the resolver in them.

mod bounds;
mod name_server;
mod namespace;
mod refused;
mod served;
mod talk;
mod tools;
