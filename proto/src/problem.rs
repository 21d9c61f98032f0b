//! Errors as problem details (RFC 9457).

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::ExecOutput;

/// Media type of every error body (RFC 9457).
pub const PROBLEM_CONTENT_TYPE: &str = "application/problem+json";

/// An error as RFC 9457 problem details.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// Stable identifier of the kind of error, for programs: `urn:conman:problem:<slug>`.
    #[serde(rename = "type")]
    pub kind: Cow<'static, str>,
    /// The kind of error in words; the same for every occurrence.
    pub title: Cow<'static, str>,
    /// The HTTP status code.
    pub status: u16,
    /// What failed, on what, and why.
    pub detail: String,
    /// What to do about it, as requests of this API.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
    /// The request path that failed, where one is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<String>,
    /// Every mistake in the request's body or query, one entry a field.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<FieldError>,
    /// Whether the same request may succeed later without a change.
    #[serde(default)]
    pub retryable: bool,
    /// The limit that was met, where one was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<Box<LimitMet>>,
    /// What a command had printed, with `exec-timed-out`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output: Option<Box<ExecOutput>>,
}

/// A limit of the node or of its host that leaves no room for what was asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LimitMet {
    /// Its own name where it has one, for example `kernel.pid_max`.
    pub name: String,
    /// What it bounds, in words.
    pub bounds: String,
    pub value: u64,
    /// What is used of it.
    pub used: u64,
    /// What to do about it.
    pub remedy: String,
}

/// One mistake in one field.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FieldError {
    /// The field's path as in the request, for example `env.PATH` or `binds[0]`.
    pub field: String,
    /// What is wrong with it and which values are allowed.
    pub message: String,
}

impl Problem {
    /// A problem of the kind `slug` without field errors.
    #[must_use]
    pub fn new(slug: &str, title: &'static str, status: u16, detail: impl Into<String>) -> Self {
        Self {
            kind: Cow::Owned(format!("urn:conman:problem:{slug}")),
            title: Cow::Borrowed(title),
            status,
            detail: detail.into(),
            remedy: None,
            instance: None,
            errors: Vec::new(),
            retryable: false,
            limit: None,
            output: None,
        }
    }

    /// The slug behind `urn:conman:problem:`, or the whole type where it has another form.
    #[must_use]
    pub fn slug(&self) -> &str {
        self.kind
            .strip_prefix("urn:conman:problem:")
            .unwrap_or(&self.kind)
    }
}
