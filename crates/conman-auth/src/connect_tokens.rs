//! Connect tokens: PASETO v4.local, valid for one session of one node and for a limited time.

use std::borrow::Cow;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use conman_proto::SessionId;
use jiff::Timestamp;
use pasetors::Local;
use pasetors::keys::SymmetricKey;
use pasetors::token::UntrustedToken;
use pasetors::version4::{LocalToken, V4};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::key_file;
use crate::{ClusterSecret, KeyFileError};

/// Maximum lifetime of a connect token: a token for a first visit need not outlast a day.
pub const MAX_CONNECT_TTL: Duration = Duration::from_secs(86_400);

/// Maximum lifetime of the cookie that a connect token is exchanged for.
pub(crate) const MAX_COOKIE_TTL: Duration = Duration::from_secs(400 * 86_400);

/// Purpose of the keys derived from the fleet's secret.
const FLEET_KEYS: &[u8] = b"conman-connect-tokens-v1";

/// Maximum length of a token that is checked; a valid one has about 300 bytes.
const MAX_TOKEN_BYTES: usize = 512;

/// Prefix of a connect token's text.
const HEADER: &str = LocalToken::HEADER;

/// Makes and checks connect tokens, and the cookies that they are exchanged for.
///
/// Both contain the session and the time until which connections may be opened. The implicit
/// assertion is the node's instance and the token's purpose: a cookie is not accepted as a token,
/// nor is either accepted on another node, even with the same keys.
pub struct ConnectTokens {
    keys: Keys,
    /// Implicit assertion of tokens in a header, a subprotocol or a URL.
    connect: Vec<u8>,
    /// Implicit assertion of cookies.
    cookie: Vec<u8>,
}

/// The first makes tokens; all of them are valid.
enum Keys {
    Fixed(Vec<SymmetricKey<V4>>),
    /// Derived from each line of the current secret whenever a token is made or checked: cheap
    /// compared to that, and a replaced secret takes effect at once.
    Fleet(Arc<ClusterSecret>),
}

impl fmt::Debug for ConnectTokens {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("ConnectTokens")
            .finish_non_exhaustive()
    }
}

/// A new token.
#[derive(Clone, PartialEq, Eq)]
pub struct MintedToken {
    /// The secret.
    pub token: String,
    /// Time from which it no longer opens connections; whole seconds.
    pub expires_at: Timestamp,
}

impl fmt::Debug for MintedToken {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("MintedToken")
            .field("expires_at", &self.expires_at)
            .finish_non_exhaustive()
    }
}

/// Why no token was made.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum MintError {
    #[error("a token's lifetime must be from 1 s to {max_s} s")]
    Ttl { max_s: u64 },
    #[error("cannot get random numbers for a token")]
    Random,
}

/// Why a token does not open the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ConnectTokenError {
    #[error("it is not a connect token of this node, or was changed")]
    Invalid,
    #[error("it is for another session")]
    OtherSession,
    #[error("it has expired")]
    Expired,
}

#[derive(Serialize, Deserialize)]
struct Claims {
    sub: SessionId,
    exp: Timestamp,
}

impl ConnectTokens {
    /// Opens the key file in `state_dir`, or creates it; the caller must hold the lock of that
    /// directory. `instance` is the node's instance id.
    ///
    /// # Errors
    /// A key file that cannot be read or created, or that other users could know or have chosen.
    pub fn open(state_dir: &Path, instance: &str) -> Result<Self, KeyFileError> {
        Ok(Self::with_keys(vec![key_file::open(state_dir)?], instance))
    }

    /// Tokens that every node of a fleet makes and accepts. Their keys are derived from the nodes'
    /// shared secret and change when it is reloaded. A token is valid for as long as the file holds
    /// the line that made it.
    #[must_use]
    pub fn of_fleet(secret: Arc<ClusterSecret>) -> Self {
        Self::with(Keys::Fleet(secret), "fleet")
    }

    /// Tokens that every node of a fleet without a secret file makes and accepts, with a key that
    /// the nodes share in another way.
    #[must_use]
    pub fn of_shared_key(key: &[u8; 32]) -> Self {
        // 32 bytes are a valid key.
        let key = SymmetricKey::from(key.as_slice()).ok();
        Self::with_keys(key.into_iter().collect(), "fleet")
    }

    fn with_keys(keys: Vec<SymmetricKey<V4>>, instance: &str) -> Self {
        Self::with(Keys::Fixed(keys), instance)
    }

    fn with(keys: Keys, instance: &str) -> Self {
        Self {
            keys,
            connect: format!("conman.connect.v1:{instance}").into_bytes(),
            cookie: format!("conman.cookie.v1:{instance}").into_bytes(),
        }
    }

    fn keys(&self) -> Cow<'_, [SymmetricKey<V4>]> {
        match &self.keys {
            Keys::Fixed(keys) => keys.into(),
            Keys::Fleet(secret) => {
                let keys = secret.derive(FLEET_KEYS);
                // 32 bytes are a valid key.
                let keys = keys.iter().filter_map(|key| SymmetricKey::from(key).ok());
                keys.collect::<Vec<_>>().into()
            }
        }
    }

    /// Makes a token that opens connections to `id` for `ttl` from `now`.
    ///
    /// # Errors
    /// `ttl` is below one second or above [`MAX_CONNECT_TTL`]; there are no random numbers.
    pub fn mint(
        &self,
        id: &SessionId,
        ttl: Duration,
        now: Timestamp,
    ) -> Result<MintedToken, MintError> {
        self.mint_for(&self.connect, id, ttl, MAX_CONNECT_TTL, now)
    }

    /// Returns the time until which the token opens connections to `id`.
    ///
    /// # Errors
    /// Why the token does not open connections.
    pub fn verify(
        &self,
        token: &str,
        id: &SessionId,
        now: Timestamp,
    ) -> Result<Timestamp, ConnectTokenError> {
        self.verify_for(&self.connect, token, id, now)
    }

    pub(crate) fn mint_cookie(
        &self,
        id: &SessionId,
        ttl: Duration,
        now: Timestamp,
    ) -> Result<MintedToken, MintError> {
        self.mint_for(&self.cookie, id, ttl, MAX_COOKIE_TTL, now)
    }

    pub(crate) fn verify_cookie(
        &self,
        token: &str,
        id: &SessionId,
        now: Timestamp,
    ) -> Result<Timestamp, ConnectTokenError> {
        self.verify_for(&self.cookie, token, id, now)
    }

    fn mint_for(
        &self,
        purpose: &[u8],
        id: &SessionId,
        ttl: Duration,
        max: Duration,
        now: Timestamp,
    ) -> Result<MintedToken, MintError> {
        let out_of_range = MintError::Ttl {
            max_s: max.as_secs(),
        };
        if !(Duration::from_secs(1)..=max).contains(&ttl) {
            return Err(out_of_range);
        }
        let exp = i64::try_from(ttl.as_secs())
            .ok()
            .and_then(|ttl_s| now.as_second().checked_add(ttl_s))
            .and_then(|second| Timestamp::from_second(second).ok())
            .ok_or(out_of_range)?;
        let claims = Claims {
            sub: id.clone(),
            exp,
        };
        let claims = serde_json::to_vec(&claims).map_err(|_| MintError::Random)?;
        let keys = self.keys();
        let key = keys.first().ok_or(MintError::Random)?;
        let token = LocalToken::encrypt(key, &claims, None, Some(purpose))
            .map_err(|_| MintError::Random)?;
        Ok(MintedToken {
            token,
            expires_at: exp,
        })
    }

    fn verify_for(
        &self,
        purpose: &[u8],
        token: &str,
        id: &SessionId,
        now: Timestamp,
    ) -> Result<Timestamp, ConnectTokenError> {
        if token.len() > MAX_TOKEN_BYTES {
            return Err(ConnectTokenError::Invalid);
        }
        let invalid = |_| ConnectTokenError::Invalid;
        let untrusted = UntrustedToken::<Local, V4>::try_from(token).map_err(invalid)?;
        let open = |key| LocalToken::decrypt(key, &untrusted, None, Some(purpose)).ok();
        let trusted = self.keys().iter().find_map(open);
        let trusted = trusted.ok_or(ConnectTokenError::Invalid)?;
        let claims: Claims =
            serde_json::from_str(trusted.payload()).map_err(|_| ConnectTokenError::Invalid)?;
        if claims.sub != *id {
            Err(ConnectTokenError::OtherSession)
        } else if claims.exp <= now {
            Err(ConnectTokenError::Expired)
        } else {
            Ok(claims.exp)
        }
    }
}

/// Whether the text has the form of a connect token.
pub(crate) fn looks_like_ours(text: &str) -> bool {
    text.starts_with(HEADER)
}

#[cfg(test)]
pub(crate) mod tests {
    use pasetors::keys::Generate as _;
    use proptest::prelude::*;

    use super::*;

    pub(crate) fn tokens(instance: &str) -> ConnectTokens {
        let key = SymmetricKey::generate().expect("random numbers");
        ConnectTokens::with_keys(vec![key], instance)
    }

    fn id(text: &str) -> SessionId {
        text.parse().expect("an id")
    }

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("in range")
    }

    const TTL: Duration = Duration::from_secs(300);

    #[test]
    fn a_token_opens_its_session_until_it_expires() {
        let tokens = tokens("0011aabb");
        let minted = tokens.mint(&id("alice"), TTL, at(1_000)).expect("made");
        assert_eq!(minted.expires_at, at(1_300));
        assert!(looks_like_ours(&minted.token));
        let verify = |name, second| tokens.verify(&minted.token, &id(name), at(second));
        assert_eq!(verify("alice", 1_000), Ok(at(1_300)));
        assert_eq!(verify("alice", 1_299), Ok(at(1_300)));
        assert_eq!(verify("alice", 1_300), Err(ConnectTokenError::Expired));
        assert_eq!(verify("bob", 1_000), Err(ConnectTokenError::OtherSession));
        assert_eq!(
            verify("alice2", 1_000),
            Err(ConnectTokenError::OtherSession)
        );
    }

    #[test]
    fn a_fraction_of_a_second_never_prolongs_a_token() {
        let now = Timestamp::new(1_000, 999_999_999).expect("in range");
        let minted = tokens("i").mint(&id("a"), TTL, now).expect("made");
        assert_eq!(minted.expires_at, at(1_300));
    }

    #[test]
    fn another_key_another_instance_and_another_purpose_do_not_verify() {
        let key = SymmetricKey::<V4>::generate().expect("random numbers");
        let here = ConnectTokens::with_keys(vec![key.clone()], "here");
        let there = ConnectTokens::with_keys(vec![key], "there");
        let minted = here.mint(&id("a"), TTL, at(0)).expect("made").token;
        let cookie = here.mint_cookie(&id("a"), TTL, at(0)).expect("made").token;
        let invalid = Err(ConnectTokenError::Invalid);
        assert_eq!(there.verify(&minted, &id("a"), at(0)), invalid);
        assert_eq!(tokens("here").verify(&minted, &id("a"), at(0)), invalid);
        assert_eq!(here.verify(&cookie, &id("a"), at(0)), invalid);
        assert_eq!(here.verify_cookie(&minted, &id("a"), at(0)), invalid);
        assert_eq!(here.verify_cookie(&cookie, &id("a"), at(0)), Ok(at(300)));
    }

    #[test]
    fn the_life_of_a_token_is_bounded_on_both_sides() {
        let tokens = tokens("i");
        let mint = |ttl, now| tokens.mint(&id("a"), ttl, now).map(|_| ());
        let refused = Err(MintError::Ttl { max_s: 86_400 });
        assert_eq!(mint(Duration::ZERO, at(0)), refused);
        assert_eq!(mint(Duration::from_millis(999), at(0)), refused);
        assert_eq!(mint(MAX_CONNECT_TTL, at(0)), Ok(()));
        assert_eq!(
            mint(MAX_CONNECT_TTL + Duration::from_secs(1), at(0)),
            refused
        );
        assert_eq!(mint(Duration::MAX, at(0)), refused);
        assert_eq!(mint(TTL, Timestamp::MAX), refused);
    }

    #[test]
    fn the_longest_id_makes_a_token_within_the_bound() {
        let tokens = tokens("ffffffff");
        let longest = id(&"a".repeat(63));
        let minted = tokens.mint(&longest, MAX_CONNECT_TTL, at(0)).expect("made");
        assert!(tokens.verify(&minted.token, &longest, at(0)).is_ok());
    }

    #[test]
    fn a_token_of_one_node_of_a_fleet_is_good_at_every_other_while_the_secret_is_replaced() {
        use std::os::unix::fs::PermissionsExt as _;

        let folder = tempfile::tempdir().expect("a folder");
        let write = |node: &str, secrets: &str| {
            let path = folder.path().join(node);
            std::fs::write(&path, secrets).expect("written");
            let mode = std::fs::Permissions::from_mode(0o600);
            std::fs::set_permissions(&path, mode).expect("chmod");
            path
        };
        let (old, new) = ("0".repeat(32), "1".repeat(32));
        let [here, there] = ["here", "there"].map(|node| {
            let secret = ClusterSecret::load(write(node, &old)).expect("valid");
            let secret = Arc::new(secret);
            (Arc::clone(&secret), ConnectTokens::of_fleet(secret))
        });
        let made = |by: &ConnectTokens| by.mint(&id("a"), TTL, at(0)).expect("made").token;
        let opens = |at_node: &ConnectTokens, token: &str| {
            let verified = at_node.verify(token, &id("a"), at(0));
            assert!(matches!(verified, Ok(_) | Err(ConnectTokenError::Invalid)));
            verified.is_ok()
        };
        let former = made(&here.1);
        assert!(opens(&there.1, &former));
        write("there", &format!("{old}\n{new}"));
        there.0.reload().expect("valid");
        write("here", &format!("{new}\n{old}"));
        here.0.reload().expect("valid");
        let later = made(&here.1);
        for node in [&here, &there] {
            assert!(opens(&node.1, &former) && opens(&node.1, &later));
        }
        write("there", &new);
        there.0.reload().expect("valid");
        assert!(!opens(&there.1, &former) && opens(&there.1, &later));
    }

    #[test]
    fn a_token_of_one_node_is_good_at_every_other_with_the_same_key_and_at_no_other() {
        let minted = ConnectTokens::of_shared_key(&[1; 32]).mint(&id("a"), TTL, at(0));
        let token = minted.expect("made").token;
        let verify = |key| ConnectTokens::of_shared_key(key).verify(&token, &id("a"), at(0));
        assert_eq!(verify(&[1; 32]), Ok(at(300)));
        assert_eq!(verify(&[2; 32]), Err(ConnectTokenError::Invalid));
    }

    proptest! {
        #[test]
        fn a_token_with_any_byte_changed_is_refused(place in 0_usize..400, letter in "[A-Za-z0-9._-]") {
            let tokens = tokens("i");
            let minted = tokens.mint(&id("a"), TTL, at(0)).expect("made").token;
            let place = place % minted.len();
            let mut changed = minted.clone();
            changed.replace_range(place..=place, &letter);
            if changed != minted {
                prop_assert_eq!(
                    tokens.verify(&changed, &id("a"), at(0)),
                    Err(ConnectTokenError::Invalid)
                );
            }
        }

        #[test]
        fn no_text_makes_verification_panic(text in "(v4\\.local\\.)?\\PC{0,600}") {
            prop_assert_eq!(
                tokens("i").verify(&text, &id("a"), at(0)),
                Err(ConnectTokenError::Invalid)
            );
        }
    }
}
