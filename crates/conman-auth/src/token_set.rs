//! The tokens of one version of the token file.

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use subtle::ConstantTimeEq as _;
use toml::Spanned;

use crate::bearer::{self, TokenHash};
use crate::{Caller, CallerOrigin, Scope};

/// Maximum number of tokens in a file: a presented token is compared with all of them.
const MAX_TOKENS: usize = 1_000;

/// Maximum length of a token name in bytes.
const MAX_NAME_BYTES: usize = 64;

/// A mistake in a token file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenMistake {
    /// Counted from 1.
    pub line: usize,
    /// What is wrong and what is allowed; never contains a hash or a secret.
    pub message: String,
}

impl fmt::Display for TokenMistake {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}", self.line, self.message)
    }
}

/// Content of the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    #[serde(default)]
    token: Vec<Spanned<Token>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Token {
    #[serde(deserialize_with = "name")]
    name: String,
    #[serde(deserialize_with = "scope")]
    scope: Scope,
    #[serde(deserialize_with = "hash")]
    sha256: TokenHash,
}

/// All tokens; immutable.
#[derive(Debug, Default)]
pub(crate) struct TokenSet {
    tokens: Vec<Token>,
}

impl TokenSet {
    /// Parses a whole file.
    pub(crate) fn parse(text: &str) -> Result<Self, TokenMistake> {
        let mistake = |span: Range<usize>, message: String| {
            let before = text.as_bytes()[..span.start.min(text.len())].iter();
            let line = 1 + before.filter(|byte| **byte == b'\n').count();
            TokenMistake { line, message }
        };
        let Document { token: entries } = toml::from_str(text).map_err(|error| {
            mistake(error.span().unwrap_or_default(), error.message().to_owned())
        })?;
        if entries.len() > MAX_TOKENS {
            return Err(mistake(0..0, format!("more than {MAX_TOKENS} tokens")));
        }
        // Two tokens of one name could not be distinguished in the journal, and two of one hash
        // would be one token with two scopes.
        let (mut names, mut hashes) = (HashSet::new(), HashSet::new());
        for entry in &entries {
            let token = entry.get_ref();
            let field = match (names.insert(&token.name), hashes.insert(token.sha256)) {
                (true, true) => continue,
                (false, _) => "name",
                (true, false) => "sha256",
            };
            let name = &token.name;
            let message = format!("the token `{name}` has the `{field}` of an earlier one");
            return Err(mistake(entry.span(), message));
        }
        let tokens = entries.into_iter().map(Spanned::into_inner).collect();
        Ok(Self { tokens })
    }

    pub(crate) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// The caller with the token `text`, if it is one of the tokens.
    pub(crate) fn find(&self, text: &str) -> Option<Caller> {
        let presented = bearer::hash(text);
        let mut found = None;
        // All are compared, so that the time does not reveal which one matched.
        for token in &self.tokens {
            if bool::from(token.sha256.ct_eq(&presented)) {
                found = Some(token);
            }
        }
        found.map(|token| Caller {
            name: token.name.clone(),
            scope: token.scope,
            origin: CallerOrigin::Token,
        })
    }
}

fn name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let text = String::deserialize(deserializer)?;
    if !is_name(&text) {
        return Err(D::Error::custom(format_args!(
            "`name` must be 1 to {MAX_NAME_BYTES} of a-z, A-Z, 0-9 and . _ - @"
        )));
    }
    Ok(text)
}

fn scope<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Scope, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse()
        .map_err(|unknown| D::Error::custom(format_args!("`scope`: {unknown}")))
}

fn hash<'de, D: Deserializer<'de>>(deserializer: D) -> Result<TokenHash, D::Error> {
    let text = String::deserialize(deserializer)?;
    bearer::parse_hash(&text).ok_or_else(|| {
        D::Error::custom(
            "`sha256` must be 64 hex digits: the hash of the token's text, as `conman auth \
             new-token` prints it",
        )
    })
}

fn is_name(text: &str) -> bool {
    (1..=MAX_NAME_BYTES).contains(&text.len())
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-' | b'@'))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry(name: &str, scope: &str, token: &str) -> String {
        let hash = bearer::hex(&bearer::hash(token));
        format!("[[token]]\nname = \"{name}\"\nscope = \"{scope}\"\nsha256 = \"{hash}\"\n")
    }

    fn mistake(text: &str) -> String {
        TokenSet::parse(text).expect_err("a mistake").to_string()
    }

    #[test]
    fn a_token_is_found_by_its_text_and_by_nothing_else() {
        let text = entry("web", "frontend", "secret-1") + &entry("ops", "admin", "secret-2");
        let set = TokenSet::parse(&text).expect("valid");
        let caller = set.find("secret-2").expect("known");
        assert_eq!((caller.name.as_str(), caller.scope), ("ops", Scope::Admin));
        assert_eq!(caller.origin, CallerOrigin::Token);
        for other in ["", "secret-", "secret-3", "SECRET-1", "secret-1 "] {
            assert_eq!(set.find(other), None, "{other}");
        }
    }

    #[test]
    fn an_empty_file_is_valid_and_lets_nobody_in() {
        let set = TokenSet::parse("# none at present\n").expect("valid");
        assert_eq!(set.len(), 0);
        assert_eq!(set.find(""), None);
    }

    #[test]
    fn a_mistake_is_reported_with_its_line() {
        let hash = "ab".repeat(31);
        for (wrong, line, part) in [
            ("colour = 1", 1, "unknown field `colour`"),
            ("[[token]]\nname = \"a b\"", 2, "`name` must be"),
            ("[[token]]\nname = 3", 2, "invalid type"),
            (
                "[[token]]\nscope = \"root\"",
                2,
                "`scope`: the scopes are `admin`",
            ),
            (
                "[[token]]\nsha256 = \"12\"",
                2,
                "`sha256` must be 64 hex digits",
            ),
            (
                &format!("[[token]]\nsha256 = \"{hash}\""),
                2,
                "64 hex digits",
            ),
            ("[[token]]\nage = 3", 2, "unknown field `age`"),
            ("[[token]]\n", 1, "missing field `name`"),
            ("[token]\nname = \"x\"\n", 1, "expected a sequence"),
            ("[[token]]\n\nname = \n", 3, ""),
        ] {
            let found = mistake(wrong);
            assert!(found.starts_with(&format!("{line}:")), "{wrong}: {found}");
            assert!(found.contains(part) && !found.contains(&hash), "{found}");
        }
    }

    #[test]
    fn a_name_or_a_hash_that_stands_twice_is_a_mistake_of_the_later_entry() {
        let first = entry("web", "read", "x");
        for (second, field) in [
            (entry("web", "read", "y"), "`name`"),
            (entry("b", "read", "x"), "`sha256`"),
        ] {
            let found = mistake(&(first.clone() + &second));
            assert!(found.starts_with("5:") && found.contains(field), "{found}");
        }
    }

    #[test]
    fn more_tokens_than_the_bound_are_refused() {
        let text: String = (0..=MAX_TOKENS)
            .map(|n| entry(&format!("t{n}"), "read", &n.to_string()))
            .collect();
        assert!(mistake(&text).contains("more than 1000"));
    }

    proptest! {
        #[test]
        fn no_text_makes_the_reader_panic(text in "[\\[\\]a-z0-9 =\"\n.#{},\\\\ä]{0,200}") {
            if let Err(mistake) = TokenSet::parse(&text) {
                let lines = text.split('\n').count();
                prop_assert!((1..=lines).contains(&mistake.line));
            }
        }
    }
}
