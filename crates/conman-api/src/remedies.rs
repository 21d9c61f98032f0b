//! What to do about a problem, as requests of this API. The command line names commands instead.

/// The remedy for a kind of problem of the request at `path`, if there is one.
pub(crate) fn remedy(slug: &str, path: &str) -> Option<String> {
    let id = path
        .strip_prefix("/v1/sessions/")
        .and_then(|rest| rest.split('/').next())
        .filter(|id| !id.is_empty())
        .unwrap_or("{id}");
    let session = format!("/v1/sessions/{id}");
    Some(match slug {
        "no-such-session" => {
            format!("PUT {session} starts it; GET /v1/sessions lists the sessions")
        }
        "not-running" | "session-ended" | "node-lost" => {
            format!("PUT {session} starts it; GET {session}/timeline shows what happened to it")
        }
        "session-moves" => format!(
            "try again once another node has it or its node is back, or PUT {session} to start it \
             on another node now"
        ),
        "session-stuck" | "log-not-kept" => {
            format!("GET {session}/timeline shows what happened to it")
        }
        "no-such-exec" => format!("GET {session}/execs lists the kept commands"),
        "no-such-node" | "no-node" | "node-unreachable" | "node-silent" => {
            "GET /v1/nodes shows the nodes with their state".to_owned()
        }
        "node-cordoned" => "POST /v1/nodes/self/uncordon cancels that".to_owned(),
        "node-draining" => "POST /v1/nodes/self/undrain cancels that".to_owned(),
        "node-preempted" => "POST /v1/nodes/self/readmit cancels that".to_owned(),
        "image-not-found" => "GET /v1/images lists the images".to_owned(),
        "image-in-use" => "repeat it with force=true to remove the name anyway".to_owned(),
        "no-such-image" => "POST /v1/images imports or pulls it".to_owned(),
        _ => return None,
    })
}
