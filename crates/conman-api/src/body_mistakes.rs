//! Collects what is wrong with the values of a body, so that one answer names all of it.

use conman_proto::FieldError;

use crate::problem::{ApiError, IntoApiError as _, Kind};

/// Longest reason for an order, in characters. It is shown in lists and events.
const MAX_REASON_CHARS: usize = 500;

/// All mistakes found so far.
#[derive(Debug, Default)]
pub(crate) struct BodyMistakes(Vec<FieldError>);

impl BodyMistakes {
    pub(crate) fn add(&mut self, field: &str, message: impl Into<String>) {
        self.0.push(FieldError {
            field: field.to_owned(),
            message: message.into(),
        });
    }

    pub(crate) fn unless(&mut self, valid: bool, field: &str, message: impl Into<String>) {
        if !valid {
            self.add(field, message);
        }
    }

    /// Checks the `reason` of an order.
    pub(crate) fn reason(&mut self, reason: Option<&str>) {
        let valid = reason.is_none_or(|reason| {
            reason.chars().count() <= MAX_REASON_CHARS && !reason.chars().any(char::is_control)
        });
        let message = format!(
            "must have at most {MAX_REASON_CHARS} characters, none of them a control character"
        );
        self.unless(valid, "reason", message);
    }

    pub(crate) fn into_result(self) -> Result<(), ApiError> {
        if self.0.is_empty() {
            return Ok(());
        }
        Err(Kind::BAD_BODY.with_fields(self.0))
    }
}
