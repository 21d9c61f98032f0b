//! Callers and their scopes.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// What a caller may do; each scope includes the ones before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Scope {
    /// Read only.
    Read,
    /// Start, stop and use sessions, and make connect tokens.
    Frontend,
    /// Everything, preemption included.
    Admin,
}

/// A text that is not a scope.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("the scopes are `admin`, `frontend` and `read`")]
pub struct UnknownScope;

impl Scope {
    /// The name in token files and in a token's text.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Frontend => "frontend",
            Self::Admin => "admin",
        }
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}

impl FromStr for Scope {
    type Err = UnknownScope;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        [Self::Read, Self::Frontend, Self::Admin]
            .into_iter()
            .find(|scope| scope.as_str() == text)
            .ok_or(UnknownScope)
    }
}

/// The client that sent a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// For the log and the journal: the token's name, or the client's address if it has no token.
    pub name: String,
    pub scope: Scope,
    pub origin: CallerOrigin,
}

/// How a caller was authenticated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallerOrigin {
    /// By the credentials of its process on the admin socket.
    AdminSocket { uid: u32 },
    /// By a bearer token.
    Token,
    /// By another node, which asserts its name and scope.
    Peer,
    /// Not at all: no tokens are configured, and the caller is on this host.
    Local,
}

impl fmt::Display for Caller {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.name)
    }
}
