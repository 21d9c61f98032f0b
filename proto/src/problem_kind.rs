//! The one table of problems: what all occurrences of a kind of error share.

use crate::Problem;

/// A kind of error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProblemKind {
    /// Stable identifier for programs.
    pub slug: &'static str,
    /// The kind in words.
    pub title: &'static str,
    /// The HTTP status code.
    pub status: u16,
    /// Whether the same request may succeed later without a change.
    pub retryable: bool,
}

impl ProblemKind {
    const fn lasting(slug: &'static str, title: &'static str, status: u16) -> Self {
        Self {
            slug,
            title,
            status,
            retryable: false,
        }
    }

    const fn passing(slug: &'static str, title: &'static str, status: u16) -> Self {
        Self {
            retryable: true,
            ..Self::lasting(slug, title, status)
        }
    }

    /// An occurrence of this kind.
    #[must_use]
    pub fn problem(self, detail: impl Into<String>) -> Box<Problem> {
        let mut problem = Problem::new(self.slug, self.title, self.status, detail);
        problem.retryable = self.retryable;
        Box::new(problem)
    }
}

macro_rules! kinds {
    ($($name:ident = $how:ident($slug:literal, $title:literal, $status:literal);)*) => {
        impl ProblemKind {
            $(pub const $name: Self = Self::$how($slug, $title, $status);)*
            /// Every kind.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];
        }
    };
}

kinds! {
    // The request itself.
    BAD_PATH = lasting("bad-path", "The path names no resource", 400);
    BAD_QUERY = lasting("bad-query", "The query parameters are not valid", 400);
    BAD_JSON = lasting("bad-json", "The body is not JSON", 400);
    BAD_BODY = lasting("bad-body", "The body does not fit this request", 422);
    BAD_REQUEST = lasting("bad-request", "The request is not valid", 400);
    BODY_TOO_LARGE = lasting("body-too-large", "The body is too large", 413);
    BODY_TOO_SLOW = passing("body-too-slow", "The body did not arrive in time", 408);
    MEDIA_TYPE = lasting("unsupported-media-type", "The body is of another type", 415);
    NO_SUCH_ROUTE = lasting("no-such-route", "There is nothing at this path", 404);
    METHOD = lasting("method-not-allowed", "The path knows other methods", 405);
    UPGRADE = lasting("upgrade-required", "This is a WebSocket", 426);
    // Sessions.
    NO_SUCH_SESSION = lasting("no-such-session", "There is no such session", 404);
    BAD_SPEC = lasting("bad-spec", "The session's spec is not valid", 422);
    NO_SUCH_RUNTIME = lasting("no-such-runtime", "The node lacks the runtime", 422);
    NO_SUCH_IMAGE = lasting("no-such-image", "The image is not on this node", 422);
    BAD_BIND = lasting("bind-refused", "A bind cannot be made", 422);
    REFUSED = lasting("start-refused", "The runtime refuses the session", 422);
    EXITED = lasting("start-exited", "The program ended before it was ready", 502);
    UNREADY = lasting("start-not-ready", "The program did not answer in time", 504);
    SLOW_START = passing("start-timed-out", "The start took too long", 504);
    INTERRUPTED = passing("start-interrupted", "The daemon restarted meanwhile", 503);
    STOPPED = passing("session-stopped", "The session was stopped meanwhile", 409);
    ENDED = lasting("session-ended", "The session has ended", 409);
    PAUSED = lasting("session-paused", "The session is paused until it is resumed", 409);
    NOT_RUNNING = passing("not-running", "The session is not running", 409);
    NOT_KEPT = lasting("log-not-kept", "The session's log is gone", 404);
    ENDING = passing("session-ending", "The session's former container is ending", 409);
    STUCK = passing("session-stuck", "The session could not be killed yet", 409);
    NO_PORT = lasting("no-port", "The session has no port", 409);
    NO_SUCH_COMMAND = lasting("no-such-command", "The command cannot be run", 422);
    NO_SUCH_USER = lasting("no-such-user", "The session has no such user", 422);
    NO_SUCH_WORKDIR = lasting("no-such-workdir", "The working directory cannot be entered", 422);
    EXEC_FAILED = lasting("exec-failed", "How the command ended is unknown", 502);
    EXEC_TIMED_OUT = lasting("exec-timed-out", "The command did not end in time", 504);
    NO_TERMINAL = lasting("no-terminal", "The session has no terminal", 409);
    NO_SUCH_EXEC = lasting("no-such-exec", "There is no such kept command", 404);
    EXEC_ENDED = lasting("exec-ended", "The kept command has ended", 409);
    TOO_MANY_TERMINALS = passing("too-many-terminals", "There is no room for more terminals or kept commands", 409);
    NO_SUCH_LINK = lasting("no-such-link", "The session has no such attached link", 404);
    LINK_REFUSED = lasting("link-refused", "The link cannot be made", 422);
    UNSUPPORTED = lasting("not-supported", "The session's runtime cannot do that", 422);
    // Files in a session.
    NO_SUCH_FILE = lasting("no-such-file", "The session has no such file", 404);
    IS_DIRECTORY = lasting("is-a-directory", "The path is a directory", 409);
    FILE_CONFLICT = lasting("file-conflict", "The path holds something else", 409);
    FILE_REFUSED = lasting("file-refused", "The user may not do that in the session", 403);
    BAD_RANGE = lasting("bad-range", "The file does not have these bytes", 416);
    BAD_ARCHIVE = lasting("bad-archive", "The archive cannot be unpacked", 422);
    TOO_MANY_WATCHES = passing("too-many-watches", "There is no room for more watches of files", 429);
    DISK_FULL = lasting("disk-full", "The session's disk is full", 507);
    FILES_FAILED = lasting("files-failed", "The session's files cannot be reached", 502);
    // Images.
    NO_IMAGE = lasting("image-not-found", "There is no such image", 404);
    IMAGE_USED = lasting("image-in-use", "The image's name is in use", 409);
    BAD_IMAGE = lasting("bad-image", "The image cannot be imported", 422);
    STORE_FULL = passing("image-store-full", "The image store has no room", 507);
    STORE_READ_ONLY = lasting("image-store-read-only", "The image store cannot be written", 507);
    IMAGES_BUSY = passing("too-many-images", "Too many images arrive at a time", 503);
    NOT_IN_REGISTRY = lasting("not-in-registry", "The registry does not have the image", 422);
    NOT_FROM_THERE = lasting("registry-not-allowed", "This node does not pull from the registry", 422);
    REGISTRY_REFUSES = lasting("image-registry-refused", "The registry does not let conman in", 502);
    REGISTRY_TROUBLE = passing("image-registry-failed", "The registry did not answer as it should", 502);
    REGISTRY_UNREACHABLE = passing("image-registry-unreachable", "The registry cannot be reached", 502);
    REGISTRY_SLOW = passing("image-registry-timed-out", "The registry took too long", 504);
    // The node.
    NO_SUCH_NODE = lasting("no-such-node", "There is no such node", 404);
    NO_ROOM = passing("host-full", "The host takes no more sessions", 503);
    FULL = passing("node-full", "The node takes no more sessions", 503);
    CROWDED = passing("too-many-waiting", "Too many connections wait", 503);
    HELD_TOO_LONG = passing("hold-timed-out", "The session was not ready in time", 504);
    DRAINING = passing("node-draining", "The node is being drained", 503);
    CORDONED = passing("node-cordoned", "The node takes no new sessions", 503);
    REBALANCING = passing("rebalancing", "The node moves sessions already, or did so just now", 409);
    NOT_REBALANCED = lasting("not-rebalanced", "The node has moved nothing", 404);
    NOT_DRAINING = lasting("not-draining", "The node is not being drained", 404);
    PREEMPTED = passing("node-preempted", "The node is going away", 503);
    ELSEWHERE = passing("session-elsewhere", "The session is on another node", 421);
    NODE_LEAVES = passing("node-leaves", "The node leaves", 503);
    MOVES = passing("session-moves", "The session changes its node", 503);
    NO_NODE = passing("no-node", "No node takes the session", 503);
    TOO_MANY_STREAMS = passing("too-many-streams", "Too many streams of events are open", 503);
    MANY_OWN_STREAMS = passing("too-many-own-streams", "The caller has too many streams of events open", 429);
    NODE_UNREACHABLE = passing("node-unreachable", "The session's node cannot be reached", 503);
    NODE_SILENT = lasting("node-silent", "The session's node did not answer", 502);
    NODE_REFUSES = lasting("node-refuses", "The session's node does not know this one", 502);
    NODE_NOT_LOST = lasting("node-not-lost", "The node is not known to be dead", 409);
    NODE_OWNS = lasting("node-owns-sessions", "The node still owns sessions", 409);
    NODE_LOST = lasting("node-lost", "The session's node is gone", 409);
    NOT_READY = passing("node-not-ready", "The node is not ready", 503);
    NO_RUNTIME = passing("runtime-unavailable", "The runtime does not answer", 503);
    NO_REGISTRY = passing("registry-failed", "The registry failed", 503);
    HOST_FAILED = passing("host-failed", "The host lacks something", 503);
    TIMED_OUT = passing("timed-out", "The request took too long", 503);
    SHUTTING_DOWN = passing("shutting-down", "conman is shutting down", 503);
    // Who may do what.
    UNAUTHENTICATED = lasting("unauthenticated", "A valid token is needed", 401);
    FORBIDDEN = lasting("forbidden", "The token does not allow this", 403);
    HOST_REFUSED = lasting("host-refused", "The Host is not served here", 403);
    ORIGIN_REFUSED = lasting("origin-refused", "Requests from pages of this origin are refused", 403);
    // The listener for sessions.
    UNKNOWN_ADDRESS = lasting("unknown-address", "The address names no session", 404);
    BROWSER_PATH = lasting("browser-path", "Browsers need the session's own host", 403);
    REDIRECT = lasting("redirect", "See the location", 500);
    NOT_HERE = lasting("not-here", "Not here", 421);
    TOO_MANY_CONNECTIONS = passing("too-many-connections", "Too many connections", 503);
    TOO_MANY_HELD = passing("too-many-held", "Too many requests wait", 503);
    SESSION_NOT_READY = passing("session-not-ready", "The session is not ready", 503);
    NO_SUCH_PORT = lasting("no-such-port", "The session does not have this port", 404);
    CONNECTION_REFUSED = passing("connection-refused", "Nothing listens on the session's port", 502);
    CONNECT_TIMEOUT = passing("connect-timeout", "The session's port does not answer", 504);
    CONNECT_FAILED = passing("connect-failed", "The session cannot be reached", 502);
    NO_ANSWER = lasting("no-answer", "The session did not answer", 502);
    BAD_ANSWER = lasting("bad-answer", "The session's answer is malformed", 502);
    BODY_TIMEOUT = lasting("body-timeout", "The request's body stopped arriving", 408);
    // conman itself.
    INTERNAL = lasting("internal", "conman has a bug", 500);
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_kind_of_error_has_a_slug_of_its_own_and_an_error_status() {
        let slugs: BTreeSet<_> = ProblemKind::ALL.iter().map(|kind| kind.slug).collect();
        assert_eq!(slugs.len(), ProblemKind::ALL.len());
        for kind in ProblemKind::ALL {
            assert!((400..600).contains(&kind.status), "{kind:?}");
        }
    }
}
