//! Request bodies: bounded in size and time, JSON objects only. Every refusal is a problem that
//! names the field.

use std::time::Duration;

use axum::body::Body;
use axum::extract::FromRequest;
use bytes::Bytes;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use http::{HeaderMap, Request};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use serde::de::DeserializeOwned;

use crate::problem::{ApiError, IntoApiError as _, Kind};
use crate::query::Query;
use crate::{field_errors, json_value};

/// Bound on every body except a command's: enough for the largest valid spec (64 KiB of
/// environment, 64 KiB of command line, labels and binds) with JSON's escapes.
pub(crate) const MAX_BODY_BYTES: usize = 256 * 1024;

/// Bound on the body of `POST …/exec`, which may contain 1 MiB of standard input.
pub(crate) const MAX_EXEC_BODY_BYTES: usize = 2 * 1024 * 1024;

/// Most mistakes of one body that an answer lists.
const MAX_MISTAKES: usize = 16;

/// Time for a body: 256 KiB arrive within it at 70 kbit/s.
const BODY_PATIENCE: Duration = Duration::from_secs(30);

/// The JSON object in the body of a request that has no query.
#[derive(Debug)]
pub(crate) struct JsonBody<T>(pub(crate) T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequest<S> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request<Body>, _: &S) -> Result<Self, ApiError> {
        Query::of(request.uri()).finish()?;
        read(request, MAX_BODY_BYTES).await.map(Self)
    }
}

/// The JSON object in the request's body; an absent or empty body is an empty object.
pub(crate) async fn read<T: DeserializeOwned>(
    request: Request<Body>,
    max_bytes: usize,
) -> Result<T, ApiError> {
    let (parts, body) = request.into_parts();
    let bytes = collect(&parts.headers, body, max_bytes).await?;
    if bytes.is_empty() {
        return parse(&Bytes::from_static(b"{}"));
    }
    require_json(&parts.headers)?;
    parse(&bytes)
}

/// A body, within bounds of size and time.
pub(crate) async fn collect(
    headers: &HeaderMap,
    body: Body,
    max_bytes: usize,
) -> Result<Bytes, ApiError> {
    refuse_announced_excess(headers, max_bytes)?;
    let bytes = tokio::time::timeout(BODY_PATIENCE, Limited::new(body, max_bytes).collect())
        .await
        .map_err(|_| {
            let patience = BODY_PATIENCE.as_secs();
            Kind::BODY_TOO_SLOW.because(format!("the body must arrive within {patience} s"))
        })?
        .map_err(|error| {
            if error.is::<LengthLimitError>() {
                too_large(max_bytes)
            } else {
                Kind::BAD_REQUEST.because("the connection broke off within the body")
            }
        })?
        .to_bytes();
    Ok(bytes)
}

/// The JSON object in `bytes`.
pub(crate) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let mut value = json_value::parse(bytes).map_err(|error| {
        if error.is_data() {
            bad_field(".", &error.to_string())
        } else {
            Kind::BAD_JSON.because(field_errors::cut(&error.to_string()))
        }
    })?;
    // A derived struct could also be read from a list of its fields' values.
    if !value.is_object() {
        return Err(bad_field(".", "must be a JSON object"));
    }
    let mut mistakes = Vec::new();
    while mistakes.len() < MAX_MISTAKES {
        let error = match serde_path_to_error::deserialize::<_, T>(&value) {
            Ok(read) if mistakes.is_empty() => return Ok(read),
            Ok(_) => break,
            Err(error) => error,
        };
        let mistake =
            field_errors::from_serde(&error.path().to_string(), &error.inner().to_string());
        // Without the field with the mistake, the next one is found.
        let top = mistake.field.split(['.', '[']).next().unwrap_or_default();
        let removed = value.as_object_mut().and_then(|fields| fields.remove(top));
        let is_last = removed.is_none();
        // A required field that was removed because of its mistake is not missing.
        if !is_last || mistakes.is_empty() {
            mistakes.push(mistake);
        }
        if is_last {
            break;
        }
    }
    Err(Kind::BAD_BODY.with_fields(mistakes))
}

fn bad_field(path: &str, message: &str) -> ApiError {
    Kind::BAD_BODY.with_fields(vec![field_errors::from_serde(path, message)])
}

fn refuse_announced_excess(headers: &HeaderMap, max_bytes: usize) -> Result<(), ApiError> {
    let announced = headers
        .get(CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.parse::<u64>().ok());
    if announced.is_some_and(|length| length > max_bytes as u64) {
        return Err(too_large(max_bytes));
    }
    Ok(())
}

fn require_json(headers: &HeaderMap) -> Result<(), ApiError> {
    let given = headers
        .get(CONTENT_TYPE)
        .map(|value| value.to_str().unwrap_or("(not text)"));
    let essence = given.map(|value| value.split(';').next().unwrap_or(value).trim());
    match essence {
        Some(essence) if essence.eq_ignore_ascii_case("application/json") => Ok(()),
        Some(other) => Err(Kind::MEDIA_TYPE.because(format!(
            "the Content-Type is `{}`; send `application/json`",
            field_errors::cut(other)
        ))),
        None => Err(Kind::MEDIA_TYPE
            .because("the body has no Content-Type; send `Content-Type: application/json`")),
    }
}

fn too_large(max_bytes: usize) -> ApiError {
    Kind::BODY_TOO_LARGE.because(format!(
        "the body of this request is at most {max_bytes} bytes ({})",
        conman_core::size(max_bytes as u64)
    ))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use conman_proto::{ExecRequest, SessionRequest};

    use super::*;

    fn error_of(json: &str) -> conman_proto::Problem {
        parse::<SessionRequest>(json.as_bytes())
            .expect_err(json)
            .problem()
            .clone()
    }

    #[test]
    fn every_kind_of_bad_body_names_the_field_and_what_is_allowed() {
        let cases = [
            (r#"{"imgae": "x"}"#, "imgae", "did you mean `image`?"),
            (
                r#"{"port": "80"}"#,
                "port",
                "expected a whole number from 0 to 65535",
            ),
            (
                r#"{"port": 70000}"#,
                "port",
                "expected a whole number from 0 to 65535",
            ),
            (r#"{"env": {"A": 1}}"#, "env.A", "expected a string"),
            (
                r#"{"binds": ["/a:/b", 3]}"#,
                "binds[1]",
                "expected a string",
            ),
            (
                r#"{"network": "hosts"}"#,
                "network",
                "`hosts` is not \"loopback\"",
            ),
            (r#"{"image": "a", "image": "b"}"#, "image", "twice"),
            (r#"{"cpus": true}"#, "cpus", "expected a number"),
            (
                r#"{"port": 80.5}"#,
                "port",
                "expected a whole number from 0 to 65535",
            ),
            (r#"{"env": {"A": "", "A": ""}}"#, "A", "twice"),
            (r#"["template"]"#, "body", "must be a JSON object"),
            ("null", "body", "must be a JSON object"),
        ];
        for (json, field, part) in cases {
            let problem = error_of(json);
            assert_eq!(problem.status, 422, "{json}");
            assert_eq!(problem.errors.len(), 1, "{json}");
            assert_eq!(problem.errors[0].field, field, "{json}");
            assert!(
                problem.errors[0].message.contains(part),
                "{json}: {:?}",
                problem.errors
            );
        }
    }

    #[test]
    fn all_fields_of_a_wrong_type_are_listed() {
        let body = r#"{"port": "80", "imgae": "x", "env": {"A": 1}, "cpus": true, "image": "a"}"#;
        let problem = error_of(body);
        let fields: BTreeSet<_> = problem
            .errors
            .iter()
            .map(|one| one.field.as_str())
            .collect();
        assert_eq!(fields, BTreeSet::from(["port", "imgae", "env.A", "cpus"]));
        let problem = parse::<ExecRequest>(br#"{"command": 1, "timeout_ms": "x"}"#)
            .expect_err("two mistakes")
            .problem()
            .clone();
        assert_eq!(problem.errors.len(), 2, "{:?}", problem.errors);
    }

    #[test]
    fn what_is_no_json_is_a_bad_request_that_says_where() {
        for json in [
            "{",
            "{\"image\":}",
            "{} x",
            "\u{feff}{}",
            "nope",
            "{'image': 1}",
        ] {
            let problem = error_of(json);
            assert_eq!(
                (problem.status, problem.slug()),
                (400, "bad-json"),
                "{json}"
            );
            assert!(
                problem.detail.contains("line 1"),
                "{json}: {}",
                problem.detail
            );
        }
    }

    #[test]
    fn deep_nesting_is_refused_without_exhausting_the_stack() {
        let json = format!("{{\"env\": {}", "[".repeat(200_000));
        assert!(error_of(&json).status < 500);
        assert!(error_of(&"[".repeat(200_000)).status < 500);
    }

    #[test]
    fn a_command_is_required_by_name() {
        let problem = parse::<ExecRequest>(b"{}")
            .expect_err("no command")
            .problem()
            .clone();
        assert_eq!(problem.errors[0].field, "command");
        assert_eq!(problem.errors[0].message, "is required");
    }
}
