//! The tokens of one version of the token file.

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;

use subtle::ConstantTimeEq as _;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::bearer::{self, TokenHash};
use crate::{Caller, CallerOrigin, Scope};

/// Maximum number of tokens in a file: a presented token is compared with all of them.
const MAX_TOKENS: usize = 1_000;

/// Maximum length of a token name in bytes.
const MAX_NAME_BYTES: usize = 64;

/// One mistake in a token file.
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

#[derive(Debug)]
struct Token {
    name: String,
    scope: Scope,
    hash: TokenHash,
}

/// All tokens; immutable.
#[derive(Debug, Default)]
pub(crate) struct TokenSet {
    tokens: Vec<Token>,
}

impl TokenSet {
    /// Parses a whole file and reports every mistake in it.
    pub(crate) fn parse(text: &str) -> Result<Self, Vec<TokenMistake>> {
        let (document, syntax) = DeTable::parse_recoverable(text);
        let mut reader = Reader {
            text,
            mistakes: Vec::new(),
        };
        for error in syntax {
            reader.mistake(&error.span().unwrap_or(0..0), error.message());
        }
        // The intended content of a broken line is unknown, so errors that follow from it are not
        // reported.
        let tokens = if reader.mistakes.is_empty() {
            reader.document(document.get_ref())
        } else {
            Vec::new()
        };
        if reader.mistakes.is_empty() {
            Ok(Self { tokens })
        } else {
            reader.mistakes.sort_by_key(|mistake| mistake.line);
            Err(reader.mistakes)
        }
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
            if bool::from(token.hash.ct_eq(&presented)) {
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

struct Reader<'text> {
    text: &'text str,
    mistakes: Vec<TokenMistake>,
}

impl Reader<'_> {
    fn mistake(&mut self, span: &Range<usize>, message: impl Into<String>) {
        let before = &self.text.as_bytes()[..span.start.min(self.text.len())];
        let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
        self.mistakes.push(TokenMistake {
            line,
            message: message.into(),
        });
    }

    fn document(&mut self, document: &DeTable<'_>) -> Vec<Token> {
        let mut tokens = Vec::new();
        for (key, value) in document {
            if key.get_ref() != "token" {
                let key_text = key.get_ref().escape_debug();
                self.mistake(
                    &key.span(),
                    format!("unknown field `{key_text}`: the file holds [[token]] tables only"),
                );
                continue;
            }
            let Some(array) = value.get_ref().as_array() else {
                self.mistake(&value.span(), "`token` must be written as [[token]] tables");
                continue;
            };
            if array.len() > MAX_TOKENS {
                self.mistake(&value.span(), format!("more than {MAX_TOKENS} tokens"));
                continue;
            }
            for entry in array.iter() {
                tokens.extend(self.token(entry));
            }
        }
        self.duplicates(document, &tokens);
        tokens
    }

    fn token(&mut self, entry: &Spanned<DeValue<'_>>) -> Option<Token> {
        let Some(table) = entry.get_ref().as_table() else {
            self.mistake(&entry.span(), "a token must be a [[token]] table");
            return None;
        };
        let (mut name, mut scope, mut hash) = (None, None, None);
        let mut fields = HashSet::new();
        for (key, value) in table {
            let field = key.get_ref().as_ref();
            fields.insert(field.to_owned());
            let text = value.get_ref().as_str();
            match (field, text) {
                ("name", Some(text)) if is_name(text) => name = Some(text.to_owned()),
                ("name", _) => self.mistake(
                    &value.span(),
                    format!("`name` must be 1 to {MAX_NAME_BYTES} of a-z, A-Z, 0-9 and . _ - @"),
                ),
                ("scope", text) => match text.unwrap_or_default().parse() {
                    Ok(parsed) => scope = Some(parsed),
                    Err(unknown) => self.mistake(&value.span(), format!("`scope`: {unknown}")),
                },
                ("sha256", text) => match bearer::parse_hash(text.unwrap_or_default()) {
                    Some(parsed) => hash = Some(parsed),
                    None => self.mistake(
                        &value.span(),
                        "`sha256` must be 64 hex digits: the hash of the token's text, as \
                         `conman auth new-token` prints it",
                    ),
                },
                _ => self.mistake(
                    &key.span(),
                    format!(
                        "unknown field `{}`: a token has `name`, `scope` and `sha256`",
                        field.escape_debug()
                    ),
                ),
            }
        }
        for field in ["name", "scope", "sha256"] {
            if !fields.contains(field) {
                self.mistake(&entry.span(), format!("the token lacks `{field}`"));
            }
        }
        Some(Token {
            name: name?,
            scope: scope?,
            hash: hash?,
        })
    }

    /// Two tokens of one name could not be distinguished in the journal, and two of one hash would
    /// be one token with two scopes.
    fn duplicates(&mut self, document: &DeTable<'_>, tokens: &[Token]) {
        let mut names = HashSet::new();
        let mut hashes = HashSet::new();
        let twice: Vec<(&str, &str)> = tokens
            .iter()
            .flat_map(|token| {
                let name = (!names.insert(token.name.as_str())).then_some(("name", &*token.name));
                let hash = (!hashes.insert(token.hash)).then_some(("sha256", &*token.name));
                [name, hash].into_iter().flatten()
            })
            .collect();
        for (field, name) in twice {
            let span = last_entry_named(document, name).unwrap_or(0..0);
            self.mistake(
                &span,
                format!("the token `{name}` has the `{field}` of an earlier one"),
            );
        }
    }
}

fn last_entry_named(document: &DeTable<'_>, name: &str) -> Option<Range<usize>> {
    let entries = document.get("token")?.get_ref().as_array()?;
    let named = |entry: &&Spanned<DeValue<'_>>| {
        let value = entry
            .get_ref()
            .as_table()
            .and_then(|table| table.get("name"));
        value.and_then(|value| value.get_ref().as_str()) == Some(name)
    };
    entries.iter().rfind(named).map(Spanned::span)
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

    fn mistakes(text: &str) -> Vec<String> {
        let mistakes = TokenSet::parse(text).expect_err("a mistake");
        mistakes.iter().map(ToString::to_string).collect()
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
    fn every_mistake_is_reported_with_its_line() {
        let text = format!(
            "colour = 1\n{}[[token]]\nname = \"a b\"\nscope = \"root\"\nsha256 = \"12\"\nage = 3\n\
             [[token]]\n",
            entry("web", "read", "x")
        );
        let found = mistakes(&text);
        let expected = [
            ("1:", "unknown field `colour`"),
            ("7:", "`name` must be"),
            ("8:", "`scope`: the scopes are `admin`"),
            ("9:", "`sha256` must be 64 hex digits"),
            ("10:", "unknown field `age`"),
            ("11:", "lacks `name`"),
            ("11:", "lacks `scope`"),
            ("11:", "lacks `sha256`"),
        ];
        assert_eq!(found.len(), expected.len(), "{found:#?}");
        for (found, (line, part)) in found.iter().zip(expected) {
            assert!(
                found.starts_with(line) && found.contains(part),
                "{found} / {line} {part}"
            );
        }
    }

    #[test]
    fn broken_toml_is_reported_line_by_line() {
        let found = mistakes("[[token]]\nname = \n[[token]]\nscope = = 3\n");
        assert!(found[0].starts_with("2:"), "{found:?}");
        assert!(
            found.iter().any(|mistake| mistake.starts_with("4:")),
            "{found:?}"
        );
    }

    #[test]
    fn a_name_or_a_hash_that_stands_twice_is_a_mistake_of_the_later_entry() {
        let text =
            entry("web", "read", "x") + &entry("web", "read", "y") + &entry("b", "read", "x");
        let found = mistakes(&text);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(
            found[0].starts_with("5:") && found[0].contains("`name`"),
            "{found:?}"
        );
        assert!(
            found[1].starts_with("9:") && found[1].contains("`sha256`"),
            "{found:?}"
        );
    }

    #[test]
    fn a_single_table_in_place_of_the_list_is_named_as_such() {
        let found = mistakes("[token]\nname = \"x\"\n");
        assert!(found[0].contains("[[token]]"), "{found:?}");
    }

    #[test]
    fn more_tokens_than_the_bound_are_refused() {
        let text: String = (0..=MAX_TOKENS)
            .map(|n| entry(&format!("t{n}"), "read", &n.to_string()))
            .collect();
        assert!(mistakes(&text)[0].contains("more than 1000"));
    }

    #[test]
    fn no_mistake_repeats_a_hash() {
        let hash = "ab".repeat(31);
        let text =
            format!("[[token]]\nname = \"{hash} \"\nsha256 = \"{hash}\"\nscope = \"{hash}\"");
        assert!(
            mistakes(&text)
                .iter()
                .all(|mistake| !mistake.contains(&hash))
        );
    }

    proptest! {
        #[test]
        fn no_text_makes_the_reader_panic(text in "[\\[\\]a-z0-9 =\"\n.#{},\\\\ä]{0,200}") {
            if let Err(mistakes) = TokenSet::parse(&text) {
                let lines = text.split('\n').count();
                prop_assert!(!mistakes.is_empty());
                prop_assert!(mistakes.iter().all(|m| (1..=lines).contains(&m.line)));
            }
        }
    }
}
