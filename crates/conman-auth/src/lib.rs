//! Authentication and authorization: bearer tokens with scopes, connect tokens for one session,
//! the rules for `Host` and `Origin` that keep out a browser's other pages, and how the nodes of a
//! fleet authenticate each other.
//!
//! [`ApiGuard`] checks requests to the API, [`SessionGuard`] those to the sessions. Both are plain
//! functions of a request's head. [`FleetTls`] authenticates the connections between nodes. No task
//! runs here and no channel exists. What changes while the daemon runs are the tokens, the fleet's
//! secret with the connect token keys derived from it, and the fleet's certificates. They are replaced as a whole by [`TokenFile::reload`],
//! [`ClusterSecret::reload`] and [`FleetTls::reload`].
//!
//! Invariants:
//! * A credential of conman never reaches a session, whether it was valid or not.
//! * No secret is stored that could be presented again: the token file holds hashes. The exceptions
//!   are the administrator's token, whose file is for its owner, and the key of connect tokens, which
//!   never leaves its file and this crate.
//! * A comparison with a secret takes the same time wherever the difference is.
//! * The API admits a client without a token only with `auth.loopback = "open"`: then every client on
//!   the loopback address may do everything, but a browser only on behalf of pages that came from
//!   here. Without a token file every client on the loopback address may connect to sessions.
//!
//! Sessions addressed as `/s/{id}/…` share one origin, so the page of one can read another's that
//! is open in the same browser. `{id}.<domain>` separates them; use it for browsers. Browsers
//! report which site requests an image or a script (`Sec-Fetch-Site`) only under HTTPS and on
//! localhost. Under plain HTTP on other names, the page of one session can make the browser request
//! them from another session with its cookie, although it cannot read the answer as text. Put TLS
//! in front.
#![forbid(unsafe_code)]

mod admin_token;
mod api_guard;
mod bearer;
mod caller;
mod connect_tokens;
mod credentials;
mod host_rules;
mod key_file;
mod origin_rules;
mod peer;
mod private_file;
mod session_guard;
mod token_file;
mod token_set;

pub use admin_token::{AdminToken, AdminTokenError};
pub use api_guard::{ApiGuard, Peer};
pub use bearer::{GenerateError, NewToken, generate};
pub use caller::{Caller, CallerOrigin, Scope, UnknownScope};
pub use connect_tokens::{
    ConnectTokenError, ConnectTokens, MAX_CONNECT_TTL, MintError, MintedToken,
};
pub use host_rules::{HostMistake, HostRules};
pub use key_file::KeyFileError;
pub use origin_rules::{OriginMistake, OriginRules};
pub use peer::{
    ClusterSecret, ClusterSecretError, FleetTls, FleetTlsError, FleetTlsFiles,
    certificates_expire_at,
};
pub use private_file::{PrivateFileError, read_private_file};
pub use session_guard::{SessionGuard, SessionGuardOptions, SessionVerdict};
pub use token_file::{TokenFile, TokenFileError};
pub use token_set::TokenMistake;
