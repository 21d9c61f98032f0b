//! What the API's listeners and the proxy's have in common, up to the first request of a
//! connection.
//!
//! * [`Places`] bounds a listener's connections. When all places are taken, the oldest connection
//!   without a completed request is closed, of the address that has most of these. So callers
//!   without credentials cannot keep others out, and many clients behind one address are served.
//! * [`begin`] waits for the first request's head with a buffer as large as what has arrived. The
//!   HTTP implementation, with its buffers, is made only then.
//!
//! No task runs here. Each listener's accepting task takes the places; the connections' tasks give
//! them back.
#![forbid(unsafe_code)]

mod first_head;
mod newcomers;
mod places;

pub use first_head::{Begun, begin};
pub use places::{Place, Places};
