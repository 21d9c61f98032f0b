mod connecting;
mod isolation;
mod namespace;
mod sweeping;
