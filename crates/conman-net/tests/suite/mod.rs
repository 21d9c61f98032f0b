mod connecting;
mod egress;
mod isolation;
mod namespace;
mod sweeping;
