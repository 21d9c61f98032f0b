//! Shared code of the API's listeners, the proxy's and sessions' egress proxies, up to the first request of a connection.
//!
//! * [`Places`] limits a listener's connections. When all places are taken, it closes the oldest
//!   connection without a completed request, of the address that has most of these. So callers
//!   without credentials cannot block others, and many clients behind one address are served.
//! * [`begin`] waits for the first request's head with a buffer as large as what has arrived. The
//!   HTTP implementation, with its buffers, is created only then.
//! * [`EndOfInput`], [`HalfCloseable`] and [`AnswerBody`] keep a request for a client that has ended its sending
//!   side.
//!
//! No task runs here. Each listener's accept task takes the places; the connections' tasks return
//! them.
#![forbid(unsafe_code)]

mod answer_body;
mod end_of_input;
mod first_head;
mod newcomers;
mod places;

pub use answer_body::AnswerBody;
pub use end_of_input::{EndOfInput, HalfCloseable, OpenRequest, OpenRequests};
pub use first_head::{Begun, begin};
pub use places::{Place, Places};
