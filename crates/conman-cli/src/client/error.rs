//! Why a request failed, and what to do.

use std::io;
use std::path::PathBuf;

use conman_proto::Problem;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClientError {
    #[error("`{given}` is not a URL of conman: {reason}")]
    BadUrl { given: String, reason: String },
    #[error("cannot read the token file {path}")]
    TokenFile {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the token file {path} contains no token: {reason}")]
    BadToken { path: PathBuf, reason: &'static str },
    #[error("conman is not running here (no socket at {path})")]
    NoSocket { path: PathBuf },
    #[error("this user may not use the socket {path}")]
    NotAllowed { path: PathBuf },
    #[error("cannot connect to {peer}")]
    Connect {
        peer: String,
        #[source]
        source: io::Error,
    },
    #[error("{peer} accepted no connection within {after_s} s")]
    ConnectTimedOut { peer: String, after_s: u64 },
    #[error("the connection to {peer} broke off")]
    Broken {
        peer: String,
        #[source]
        source: hyper::Error,
    },
    #[error("{peer} was silent for {after_s} s")]
    TimedOut { peer: String, after_s: u64 },
    #[error("invalid answer from {peer}: {reason}")]
    NotUnderstood { peer: String, reason: String },
    #[error("the answer is larger than {max_bytes} bytes")]
    TooLarge { max_bytes: usize },
    /// The daemon answered with problem details.
    #[error("{}: {}", .0.title, .0.detail)]
    Refused(Box<Problem>),
}

/// Why a stream ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StreamError {
    #[error("the stream broke off")]
    Broken(#[source] hyper::Error),
    #[error("a piece of the stream is larger than {max_bytes} bytes")]
    TooLarge { max_bytes: usize },
}

impl ClientError {
    /// What the user can do next.
    pub(crate) fn advice(&self) -> Option<String> {
        let advice = match self {
            Self::BadUrl { .. } => "write for example --url http://127.0.0.1:7700",
            Self::TokenFile { .. } | Self::BadToken { .. } => {
                "put one token on one line of the file; `conman auth new-token` makes one"
            }
            Self::NoSocket { .. } => {
                "start it with `conman serve`, or pass --socket PATH or --url URL"
            }
            Self::NotAllowed { .. } => {
                "run as root, for example with sudo, or use --url with --token-file"
            }
            Self::Connect { .. } | Self::ConnectTimedOut { .. } => {
                "check that `conman serve` runs there and listens at this address"
            }
            Self::Broken { .. } => {
                "the daemon may have stopped or be restarting: look at its log, then try again"
            }
            Self::TimedOut { .. } => {
                "the daemon may be overloaded or stuck: look at its log, then try again"
            }
            Self::NotUnderstood { .. } => {
                "check that the address is conman's API, and that its version fits: `conman version`"
            }
            Self::TooLarge { .. } => "narrow the request, for example with --label",
            Self::Refused(problem) => return advice_on(problem),
        };
        Some(advice.to_owned())
    }
}

/// The next step after a refusal, if the problem's kind has one.
fn advice_on(problem: &Problem) -> Option<String> {
    let advice = match problem.slug() {
        "unauthenticated" => {
            "pass --token-file FILE (or CONMAN_TOKEN_FILE) with a token that the node knows; \
             `conman auth new-token` makes one"
        }
        "forbidden" => "use a token with a wider scope: read < frontend < admin",
        "no-such-session" => "`conman ps --all` lists the sessions",
        "no-such-node" => "`conman nodes` lists the nodes",
        "image-not-found" => "`conman image ls` lists the images",
        "image-store-full" => "make room on the node's disk, or remove images: `conman image rm`",
        "bad-image" => {
            "pack a root file system with tar, or an image with `docker save` or as an OCI layout"
        }
        "registry-not-allowed" => "the node's `images.registries` lists those that it pulls from",
        "image-registry-refused" => "check the node's login for that registry in `images.logins`",
        "host-full" => "`conman doctor --target N` shows what the host lacks for N sessions",
        "not-running" => {
            "`conman why ID` shows what happened to it, `conman run ID` starts it again"
        }
        "session-stuck" => "`conman why ID` shows what blocks it; no other session gets its name",
        "node-draining" => "use another node, or `conman undrain` if this one is to stay",
        "node-cordoned" => "use another node, or `conman uncordon` if this one is to take sessions",
        "node-preempted" => "use another node, or `conman readmit` if this machine stays",
        "node-not-lost" => "`conman nodes` shows its state, `conman drain NODE` empties it",
        "node-owns-sessions" => {
            "`conman ps --node NODE` lists them, `conman run ID` starts one on another node"
        }
        "runtime-unavailable" => "`conman nodes` shows why; running sessions continue",
        _ if problem.retryable => "try again in a moment",
        _ if problem.status == 401 => "pass --token-file FILE with a token that the node knows",
        _ => return None,
    };
    Some(advice.to_owned())
}
