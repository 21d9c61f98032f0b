//! The proxy from outside: real sockets on loopback on both sides.
mod answer_heads;
mod confinement;
mod forwarding;
mod framing;
mod hold;
mod hop;
mod lifecycle;
mod limits;
mod pooling;
mod routing;
mod streaming;
mod support;
mod upgrade;
mod websocket;
