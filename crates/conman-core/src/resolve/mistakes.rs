//! The mistakes of one request, collected for one answer.

use conman_proto::FieldError;

/// Maximum number of mistakes listed; a last entry counts the others.
pub(super) const MAX_MISTAKES: usize = 50;

#[derive(Debug, Default)]
pub(super) struct Mistakes {
    found: Vec<FieldError>,
    more: usize,
}

impl Mistakes {
    pub(super) fn add(&mut self, field: impl Into<String>, message: impl Into<String>) {
        if self.found.len() < MAX_MISTAKES {
            self.found.push(FieldError {
                field: field.into(),
                message: message.into(),
            });
        } else {
            self.more += 1;
        }
    }

    pub(super) fn into_result<T>(mut self, value: T) -> Result<T, Vec<FieldError>> {
        if self.more > 0 {
            let message = format!("{} more mistakes are not listed", self.more);
            self.found.push(FieldError {
                field: String::new(),
                message,
            });
        }
        if self.found.is_empty() {
            Ok(value)
        } else {
            Err(self.found)
        }
    }
}

/// A caller's text, truncated and escaped for a message.
pub(super) fn quote(text: &str) -> String {
    const MAX_CHARS: usize = 64;
    let mut shown: String = text
        .chars()
        .take(MAX_CHARS)
        .flat_map(char::escape_debug)
        .collect();
    if text.chars().nth(MAX_CHARS).is_some() {
        shown.push('…');
    }
    shown
}

pub(super) fn has_control(text: &str) -> bool {
    text.chars().any(char::is_control)
}
