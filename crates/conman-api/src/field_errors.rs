//! Converts serde's messages to actionable ones: the field, what is wrong, what is allowed, and
//! the field that was probably meant.

use conman_core::nearest;
use conman_proto::FieldError;

/// Longest message and field name that an error repeats, in characters: serde's messages quote
/// the refused value whole, which may be as large as the body.
const MAX_QUOTED_CHARS: usize = 200;

/// The mistake of serde's `message` at `path` (`.` for the whole body).
pub(crate) fn from_serde(path: &str, message: &str) -> FieldError {
    let message = without_position(message);
    if let Some((name, known)) = unknown_field(message) {
        return unknown(name, &known);
    }
    let field = if path == "." { "body" } else { path };
    if let Some(name) = quoted_after(message, "missing field ") {
        return FieldError {
            field: cut(name),
            message: "is required".to_owned(),
        };
    }
    if let Some(name) = quoted_after(message, "duplicate field ") {
        return FieldError {
            field: cut(name),
            message: "stands there twice".to_owned(),
        };
    }
    let words = message.rsplit_once("expected ").map_or_else(
        || message.to_owned(),
        |(found, expected)| format!("{found}expected {}", in_words(expected)),
    );
    FieldError {
        field: cut(field),
        message: cut(&words),
    }
}

/// An unknown field or parameter, with the nearest known one.
pub(crate) fn unknown(name: &str, known: &[&str]) -> FieldError {
    let hint = nearest(name, known.iter().copied())
        .map_or_else(String::new, |near| format!("did you mean `{near}`? "));
    let list = known.join(", ");
    let allowed = if known.is_empty() {
        "nothing is known here".to_owned()
    } else {
        format!("known: {list}")
    };
    FieldError {
        field: cut(name),
        message: format!("is not known; {hint}{allowed}"),
    }
}

/// `text`, escaped and shortened to a length that is safe to send back.
pub(crate) fn cut(text: &str) -> String {
    let mut chars = text.chars();
    let mut kept: String = chars
        .by_ref()
        .take(MAX_QUOTED_CHARS)
        .flat_map(|char| {
            let escaped = char.is_control().then(|| char.escape_default());
            escaped
                .into_iter()
                .flatten()
                .chain((!char.is_control()).then_some(char))
        })
        .collect();
    if chars.next().is_some() {
        kept.push('…');
    }
    kept
}

fn without_position(message: &str) -> &str {
    message
        .rfind(" at line ")
        .map_or(message, |end| &message[..end])
}

/// The name and the known names in "unknown field `x`, expected one of `a`, `b`".
fn unknown_field(message: &str) -> Option<(&str, Vec<&str>)> {
    let rest = message.strip_prefix("unknown field `")?;
    // The name is the client's and may contain anything; the known ones contain no quote.
    let (name, expected) = rest.rsplit_once("`, expected ").or_else(|| {
        rest.rsplit_once("`, there are no fields")
            .map(|(name, _)| (name, ""))
    })?;
    Some((name, expected.split('`').skip(1).step_by(2).collect()))
}

fn quoted_after<'a>(message: &'a str, prefix: &str) -> Option<&'a str> {
    message.strip_prefix(prefix)?.split('`').nth(1)
}

/// A Rust type in terms of JSON.
fn in_words(expected: &str) -> &str {
    match expected {
        "u8" => "a whole number from 0 to 255",
        "u16" => "a whole number from 0 to 65535",
        "u32" => "a whole number from 0 to 4294967295",
        "u64" => "a whole number from 0 to 18446744073709551615",
        "i32" => "a whole number from -2147483648 to 2147483647",
        "f64" => "a number",
        "a boolean" => "true or false",
        "a sequence" => "a list",
        "a map" => "an object",
        other if other.starts_with("struct ") => "an object",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_field_names_the_one_that_was_meant() {
        let error = from_serde(
            "imgae",
            "unknown field `imgae`, expected one of `image`, `env` at line 1",
        );
        assert_eq!(error.field, "imgae");
        assert!(
            error.message.contains("did you mean `image`?"),
            "{}",
            error.message
        );
        assert!(
            error.message.contains("known: image, env"),
            "{}",
            error.message
        );
    }

    #[test]
    fn an_unknown_field_that_resembles_nothing_lists_the_known_ones() {
        let error = unknown("zzz", &["image", "env"]);
        assert_eq!(error.message, "is not known; known: image, env");
    }

    #[test]
    fn a_field_name_with_quotes_in_it_is_repeated_whole() {
        let error = from_serde(
            ".",
            "unknown field `a`, expected `b`, expected `env` at line 1",
        );
        assert_eq!(error.field, "a`, expected `b");
    }

    #[test]
    fn a_wrong_type_is_told_in_words_and_without_the_position() {
        let error = from_serde(
            "port",
            "invalid value: integer `70000`, expected u16 at line 1",
        );
        assert_eq!(error.field, "port");
        assert_eq!(
            error.message,
            "invalid value: integer `70000`, expected a whole number from 0 to 65535"
        );
    }

    #[test]
    fn an_overlong_or_unprintable_value_is_cut_and_escaped() {
        let error = from_serde("image", &format!("invalid type: \n{}", "x".repeat(5_000)));
        assert!(error.message.chars().count() < 250);
        assert!(!error.message.contains('\n'));
    }
}
