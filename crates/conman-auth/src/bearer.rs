//! The text of a bearer token: generating, hashing and recognizing it.

use std::fmt;

use sha2::{Digest as _, Sha256};
use thiserror::Error;

use crate::Scope;

/// Prefix of every token made here. Secret scanners find it, and the sessions listener
/// distinguishes it from a credential of the session.
const PREFIX: &str = "cmn_";

const ALPHABET: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// Number of characters after the prefix: 62^43 is just above 2^256.
const SECRET_CHARS: usize = 43;

/// Greatest multiple of the alphabet's size that fits a byte. Greater bytes are drawn again,
/// because otherwise the first letters would be more likely than the others.
const UNBIASED: u8 = 248;

/// Maximum length of a token that is checked; longer ones are unknown.
const MAX_TOKEN_BYTES: usize = 512;

/// SHA-256 of a token's text.
pub(crate) type TokenHash = [u8; 32];

/// A token as it is given to its holder; only the hash is stored.
#[derive(Clone, PartialEq, Eq)]
pub struct NewToken {
    /// The secret: `cmn_<scope>_<43 letters and digits>`.
    pub text: String,
    /// What the token file holds: SHA-256 of the text, in hex.
    pub sha256: String,
}

impl fmt::Debug for NewToken {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("NewToken")
            .field("sha256", &self.sha256)
            .finish_non_exhaustive()
    }
}

/// The kernel returned no random numbers.
#[derive(Debug, Error)]
#[error("cannot generate a random token")]
pub struct GenerateError(#[from] getrandom::Error);

/// Generates a token of 256 random bits.
///
/// # Errors
/// The kernel returns no random numbers.
pub fn generate(scope: Scope) -> Result<NewToken, GenerateError> {
    let mut text = format!("{PREFIX}{scope}_");
    let full = text.len() + SECRET_CHARS;
    let mut random = [0_u8; 64];
    while text.len() < full {
        getrandom::fill(&mut random)?;
        let drawn = random.iter().filter(|byte| **byte < UNBIASED);
        let letters = drawn.map(|byte| char::from(ALPHABET[usize::from(*byte) % ALPHABET.len()]));
        text.extend(letters.take(full - text.len()));
    }
    let sha256 = hex(&hash(&text));
    Ok(NewToken { text, sha256 })
}

pub(crate) fn hash(text: &str) -> TokenHash {
    Sha256::digest(text.as_bytes()).into()
}

/// Whether the text has the form of conman's bearer tokens.
pub(crate) fn looks_like_ours(text: &str) -> bool {
    text.starts_with(PREFIX)
}

/// Whether the text has the form that [`generate`] gives a token of this scope.
pub(crate) fn is_complete(text: &str, scope: Scope) -> bool {
    text.strip_prefix(&format!("{PREFIX}{scope}_"))
        .is_some_and(|secret| {
            secret.len() == SECRET_CHARS && secret.bytes().all(|byte| byte.is_ascii_alphanumeric())
        })
}

/// The token of an `Authorization` header with the `Bearer` scheme.
pub(crate) fn of_header(value: &[u8]) -> Option<&str> {
    let value = std::str::from_utf8(value).ok()?;
    let (scheme, credentials) = value.trim_ascii().split_once([' ', '\t'])?;
    let credentials = credentials.trim_ascii();
    (scheme.eq_ignore_ascii_case("bearer")
        && !credentials.is_empty()
        && credentials.len() <= MAX_TOKEN_BYTES)
        .then_some(credentials)
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Parses 64 hex digits of either case.
pub(crate) fn parse_hash(text: &str) -> Option<TokenHash> {
    let digits = text.as_bytes();
    if digits.len() != 64 || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    let mut hash = TokenHash::default();
    for (byte, pair) in hash.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(hash)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_new_token_names_its_scope_and_its_hash_is_of_its_text() {
        for scope in [Scope::Read, Scope::Frontend, Scope::Admin] {
            let token = generate(scope).expect("random numbers");
            let secret = token
                .text
                .strip_prefix(&format!("cmn_{scope}_"))
                .expect("prefix and scope");
            assert_eq!(secret.len(), SECRET_CHARS);
            assert!(
                secret.bytes().all(|byte| ALPHABET.contains(&byte)),
                "{secret}"
            );
            assert_eq!(parse_hash(&token.sha256), Some(hash(&token.text)));
            assert!(looks_like_ours(&token.text));
        }
    }

    #[test]
    fn new_tokens_differ_and_use_the_whole_alphabet() {
        let tokens: BTreeSet<String> = (0..200)
            .map(|_| generate(Scope::Read).expect("random numbers").text)
            .collect();
        assert_eq!(tokens.len(), 200);
        let letters: BTreeSet<char> = tokens
            .iter()
            .flat_map(|text| text["cmn_read_".len()..].chars())
            .collect();
        assert_eq!(letters.len(), ALPHABET.len());
    }

    #[test]
    fn the_hash_is_what_sha256sum_prints() {
        // printf %s abc | sha256sum
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(hex(&hash("abc")), expected);
        assert_eq!(parse_hash(&expected.to_uppercase()), Some(hash("abc")));
    }

    #[test]
    fn what_is_not_64_hex_digits_is_no_hash() {
        for text in [
            "",
            "ab",
            &"g".repeat(64),
            &"a".repeat(63),
            &"a".repeat(65),
            &"ä".repeat(32),
        ] {
            assert_eq!(parse_hash(text), None, "{text}");
        }
    }

    #[test]
    fn only_the_bearer_scheme_holds_a_token() {
        assert_eq!(of_header(b"Bearer abc"), Some("abc"));
        assert_eq!(of_header(b"bEARER   abc "), Some("abc"));
        for value in [
            &b"Bearer"[..],
            b"Bearer ",
            b"Basic abc",
            b"abc",
            b"",
            b"Bearer \xff",
        ] {
            assert_eq!(of_header(value), None, "{value:?}");
        }
        assert_eq!(
            of_header(format!("Bearer {}", "a".repeat(513)).as_bytes()),
            None
        );
    }

    #[test]
    fn the_secret_is_not_in_the_debug_form() {
        let token = generate(Scope::Admin).expect("random numbers");
        assert!(!format!("{token:?}").contains(&token.text));
    }
}
