mod connecting;
mod egress;
mod inside;
mod isolation;
mod namespace;
mod sweeping;
