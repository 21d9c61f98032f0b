//! Query parameters. They are read by hand, because a parameter may repeat, an unknown one is an
//! error, and all mistakes are reported at once.

use std::convert::Infallible;

use axum::extract::FromRequestParts;
use conman_proto::FieldError;
use http::Uri;
use http::request::Parts;
use percent_encoding::percent_decode_str;

use crate::field_errors;
use crate::problem::{ApiError, IntoApiError as _, Kind};

/// Most parameters in one query; hyper bounds the bytes.
const MAX_PARAMETERS: usize = 128;

/// The parameters of one request. Each is taken by name; the rest at the end is unknown.
#[derive(Debug)]
pub(crate) struct Query {
    pairs: Vec<(String, String)>,
    known: Vec<&'static str>,
    errors: Vec<FieldError>,
}

impl<S: Send + Sync> FromRequestParts<S> for Query {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Self::of(&parts.uri))
    }
}

/// The query of a request that has no parameters: any is refused.
#[derive(Debug)]
pub(crate) struct NoQuery;

impl<S: Send + Sync> FromRequestParts<S> for NoQuery {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        Query::of(&parts.uri).finish().map(|()| Self)
    }
}

impl Query {
    /// Splits the query of `uri`.
    pub(crate) fn of(uri: &Uri) -> Self {
        let mut query = Self {
            pairs: Vec::new(),
            known: Vec::new(),
            errors: Vec::new(),
        };
        let parts = uri
            .query()
            .unwrap_or_default()
            .split('&')
            .filter(|part| !part.is_empty());
        for (count, part) in parts.enumerate() {
            if count == MAX_PARAMETERS {
                query.mistake(
                    "query",
                    format!("has more than {MAX_PARAMETERS} parameters"),
                );
                break;
            }
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            match (decode(name), decode(value)) {
                (Some(name), Some(value)) => query.pairs.push((name, value)),
                (name, _) => query.mistake(
                    &name.unwrap_or_else(|| name_for_message(part)),
                    "is not UTF-8 after percent-decoding",
                ),
            }
        }
        query
    }

    /// Every value of a parameter that may repeat.
    fn all(&mut self, name: &'static str) -> Vec<String> {
        self.known.push(name);
        let (found, rest) = std::mem::take(&mut self.pairs)
            .into_iter()
            .partition(|(key, _)| key == name);
        self.pairs = rest;
        let found: Vec<(String, String)> = found;
        found.into_iter().map(|(_, value)| value).collect()
    }

    /// The value of a parameter that occurs at most once.
    pub(crate) fn one(&mut self, name: &'static str) -> Option<String> {
        let mut values = self.all(name);
        if values.len() > 1 {
            self.mistake(name, "stands there more than once");
        }
        values.pop()
    }

    /// Whether a parameter that has not been taken yet occurs.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.pairs.iter().any(|(key, _)| key == name)
    }

    /// A whole number between bounds.
    pub(crate) fn number(&mut self, name: &'static str, min: u64, max: u64) -> Option<u64> {
        let text = self.one(name)?;
        // `u64::from_str` accepts a leading plus sign, which the description does not.
        let digits = text.bytes().all(|byte| byte.is_ascii_digit());
        match text.parse::<u64>() {
            Ok(number) if digits && (min..=max).contains(&number) => Some(number),
            _ => {
                let given = field_errors::cut(&text);
                self.mistake(
                    name,
                    format!("is `{given}`; give a whole number from {min} to {max}"),
                );
                None
            }
        }
    }

    /// `true` or `false`; `?follow` alone is true.
    pub(crate) fn flag(&mut self, name: &'static str, default: bool) -> bool {
        match self.one(name).as_deref() {
            None => default,
            // `?flag` and `?flag=`
            Some("true" | "1" | "") => true,
            Some("false" | "0") => false,
            Some(other) => {
                let given = field_errors::cut(other);
                self.mistake(name, format!("is `{given}`; give `true` or `false`"));
                default
            }
        }
    }

    /// A value that `parse` accepts, or refuses with a message.
    pub(crate) fn parsed<T, E: std::fmt::Display>(
        &mut self,
        name: &'static str,
        parse: impl FnOnce(&str) -> Result<T, E>,
    ) -> Option<T> {
        let text = self.one(name)?;
        match parse(&text) {
            Ok(value) => Some(value),
            Err(error) => {
                self.mistake(name, field_errors::cut(&error.to_string()));
                None
            }
        }
    }

    /// The values of a parameter that may repeat, each of which `parse` accepts, or refuses with a
    /// message.
    pub(crate) fn each<T, E: std::fmt::Display>(
        &mut self,
        name: &'static str,
        parse: impl Fn(&str) -> Result<T, E>,
    ) -> Vec<T> {
        let mut found = Vec::new();
        for text in self.all(name) {
            match parse(&text) {
                Ok(value) => found.push(value),
                Err(error) => self.mistake(name, field_errors::cut(&error.to_string())),
            }
        }
        found
    }

    /// Records a mistake; [`Query::finish`] reports it.
    pub(crate) fn mistake(&mut self, field: &str, message: impl Into<String>) {
        self.errors.push(FieldError {
            field: field_errors::cut(field),
            message: message.into(),
        });
    }

    /// Refuses the request if any parameter was wrong or unknown.
    pub(crate) fn finish(mut self) -> Result<(), ApiError> {
        for (name, _) in &self.pairs {
            self.errors.push(field_errors::unknown(name, &self.known));
        }
        if self.errors.is_empty() {
            Ok(())
        } else {
            Err(Kind::BAD_QUERY.with_fields(self.errors))
        }
    }
}

fn decode(text: &str) -> Option<String> {
    let spaced = text.replace('+', " ");
    let decoded = percent_decode_str(&spaced).decode_utf8().ok()?;
    Some(decoded.into_owned())
}

fn name_for_message(part: &str) -> String {
    part.split('=').next().unwrap_or(part).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(text: &str) -> Query {
        Query::of(&format!("/x?{text}").parse().expect("a URI"))
    }

    #[test]
    fn every_mistake_is_told_at_once_with_the_allowed_values() {
        let mut query = query("limit=0&follow=maybe&lable=a%3Db&tail=7");
        assert_eq!(query.number("limit", 1, 1000), None);
        assert!(!query.flag("follow", false));
        assert_eq!(query.number("tail", 0, 9), Some(7));
        assert!(query.all("label").is_empty());
        let error = query.finish().expect_err("three mistakes");
        let errors = &error.problem().errors;
        assert_eq!(errors.len(), 3, "{errors:?}");
        assert!(errors[0].message.contains("from 1 to 1000"), "{errors:?}");
        assert!(
            errors[1].message.contains("`true` or `false`"),
            "{errors:?}"
        );
        assert!(
            errors[2].message.contains("did you mean `label`?"),
            "{errors:?}"
        );
    }

    #[test]
    fn a_repeated_parameter_is_kept_or_refused_as_its_meaning_has_it() {
        let mut query = query("label=a&label=b%3D1&cursor=x&cursor=y");
        assert_eq!(query.all("label"), ["a", "b=1"]);
        query.one("cursor");
        assert_eq!(
            query.finish().expect_err("twice").problem().errors[0].field,
            "cursor"
        );
    }

    #[test]
    fn numbers_with_signs_spaces_or_too_many_digits_are_refused() {
        for text in [
            "-1",
            "%2B1",
            "+1",
            "1.0",
            "1e3",
            "99999999999999999999999",
            "",
        ] {
            let mut query = query(&format!("limit={text}"));
            assert_eq!(query.number("limit", 0, u64::MAX), None, "{text}");
            assert!(query.finish().is_err(), "{text}");
        }
    }

    #[test]
    fn a_flag_is_true_by_its_name_alone_and_with_an_empty_value() {
        assert!(query("follow").flag("follow", false));
        assert!(query("follow=").flag("follow", false));
    }

    #[test]
    fn bytes_that_are_no_text_are_refused_by_name() {
        let error = query("session=%ff").finish().expect_err("not UTF-8");
        assert_eq!(error.problem().errors[0].field, "session");
    }
}
