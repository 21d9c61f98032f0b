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
    #[error("conman is not running here (the socket {path} is stale: its daemon has ended)")]
    StaleSocket { path: PathBuf },
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
        source: Box<dyn std::error::Error + Send + Sync>,
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
    Broken(#[source] io::Error),
    #[error("a piece of the stream is larger than {max_bytes} bytes")]
    TooLarge { max_bytes: usize },
    /// A log that is not sent as it was requested.
    #[error("the log is not in frames")]
    NotFrames,
}

impl ClientError {
    /// What the user can do next.
    pub(crate) fn advice(&self) -> Option<String> {
        let advice = match self {
            Self::BadUrl { .. } => "write for example --url http://127.0.0.1:7700",
            Self::TokenFile { .. } | Self::BadToken { .. } => {
                "put one token on one line of the file; `conman auth new-token` makes one"
            }
            Self::NoSocket { .. } | Self::StaleSocket { .. } => {
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
    let path = problem.instance.as_deref().unwrap_or_default();
    let id = named_in(path, "/v1/sessions/").unwrap_or("ID");
    let node = named_in(path, "/v1/nodes/").unwrap_or("NODE");
    let advice = match problem.slug() {
        "unauthenticated" => {
            "pass --token-file FILE (or CONMAN_TOKEN_FILE) with a token that the node knows; \
             `conman auth new-token` makes one"
        }
        "forbidden" => "use a token with a wider scope: read < frontend < admin",
        "no-such-session" => {
            return Some(format!(
                "`conman run {id} --template TEMPLATE` starts it, `conman ps --all` lists the sessions"
            ));
        }
        "session-ended" | "node-lost" => {
            return Some(format!(
                "`conman run {id}` starts it, `conman why {id}` shows what happened"
            ));
        }
        "log-not-kept" => return Some(format!("`conman why {id}` shows what happened to it")),
        "no-such-node" | "node-unreachable" | "node-silent" | "no-node" => {
            "`conman nodes` lists the nodes with their state"
        }
        "no-such-exec" => return Some(format!("`conman execs {id}` lists them")),
        "image-not-found" => "`conman image ls` lists the images",
        "no-such-image" => "`conman image import` or `conman image pull` brings it to the node",
        "image-in-use" => "`conman image rm --force` removes the name anyway",
        "image-store-full" => "make room on the node's disk, or remove images: `conman image rm`",
        "image-registry-unreachable" => "check the registry's name and port, and the node's DNS",
        "bad-image" => {
            "pack a root file system with tar, or an image with `docker save` or as an OCI layout"
        }
        "registry-not-allowed" => "the node's `images.registries` lists those that it pulls from",
        "image-registry-refused" => "check the node's login for that registry in `images.logins`",
        "host-full" => "`conman doctor --target N` shows what the host lacks for N sessions",
        "not-running" => {
            return Some(format!(
                "`conman why {id}` shows what happened to it, and what to do"
            ));
        }
        "session-stuck" => {
            return Some(format!(
                "`conman why {id}` shows what blocks it; no other session gets its name"
            ));
        }
        "node-draining" => "use another node, or `conman undrain` if this one is to stay",
        "node-cordoned" => "use another node, or `conman uncordon` if this one is to take sessions",
        "node-preempted" => "use another node, or `conman readmit` if this machine stays",
        "node-not-lost" => {
            return Some(format!(
                "`conman nodes` shows its state, `conman drain {node}` empties it"
            ));
        }
        "node-owns-sessions" => {
            return Some(format!(
                "`conman ps --node {node}` lists them, `conman run ID` starts one on another node"
            ));
        }
        "runtime-unavailable" => "`conman nodes` shows why; running sessions continue",
        _ if problem.retryable => "try again in a moment",
        _ if problem.status == 401 => "pass --token-file FILE with a token that the node knows",
        _ => return None,
    };
    Some(advice.to_owned())
}

/// The session or node that a request's path is about.
fn named_in<'a>(path: &'a str, below: &str) -> Option<&'a str> {
    let name = path.strip_prefix(below)?.split('/').next()?;
    (!name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn advice(slug: &str, path: Option<&str>) -> String {
        let mut problem = Problem::new(slug, "t", 409, "d");
        problem.instance = path.map(str::to_owned);
        advice_on(&problem).expect("there is one")
    }

    #[test]
    fn advice_names_what_the_request_was_about() {
        let path = Some("/v1/sessions/alice/exec");
        let told = advice("not-running", path);
        assert!(told.contains("`conman why alice`"), "{told}");
        let told = advice("node-not-lost", Some("/v1/nodes/n2"));
        assert!(told.contains("`conman drain n2`"), "{told}");
        let told = advice("not-running", None);
        assert!(told.contains("`conman why ID`"), "{told}");
    }
}
