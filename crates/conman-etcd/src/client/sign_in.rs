//! Signing in at etcd, and the token that it gives.

use std::sync::PoisonError;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::time::Instant;
use tonic::metadata::{Ascii, MetadataValue};

use super::Client;
use super::method::AUTHENTICATE;
use crate::access::EtcdCredentials;
use crate::call_error::CallError;
use crate::wire::{AuthenticateRequest, AuthenticateResponse};

/// Pause after a failed try to sign in: every call of this node would try.
const SIGN_IN_PAUSE: Duration = Duration::from_secs(1);

impl Client {
    /// One at a time; a caller that waited uses the token of the one before.
    pub(super) fn sign_in(&self) -> BoxFuture<'_, Result<(), CallError>> {
        Box::pin(self.signed_in())
    }

    async fn signed_in(&self) -> Result<(), CallError> {
        let Some(credentials) = self.credentials() else {
            return Ok(());
        };
        let before = self.token();
        let mut failed = self.signing_in.lock().await;
        if self.token() != before {
            return Ok(());
        }
        if let Some((at, error)) = &*failed
            && at.elapsed() < SIGN_IN_PAUSE
        {
            return Err(error.clone());
        }
        let signed_in = self.authenticate(&credentials).await;
        *failed = signed_in
            .as_ref()
            .err()
            .map(|error| (Instant::now(), error.clone()));
        signed_in
    }

    async fn authenticate(&self, credentials: &EtcdCredentials) -> Result<(), CallError> {
        let request = AuthenticateRequest {
            name: credentials.user.clone(),
            password: credentials.password.clone(),
        };
        let answered: Result<AuthenticateResponse, _> = self.once(AUTHENTICATE, request).await;
        let answer = answered.map_err(|error| match error {
            CallError::Refused { reason } => CallError::Refused {
                reason: format!(
                    "user `{}` cannot sign in ({reason}); see `registry.user` and \
                     `registry.password_file`",
                    credentials.user
                ),
            },
            // Signing in has no lasting effect, so the call itself has none.
            CallError::NotSent { reason }
            | CallError::Full { reason }
            | CallError::Unknown { reason }
            | CallError::Late { reason }
            | CallError::TooLong { reason }
            | CallError::Stale { reason } => CallError::NotSent { reason },
        })?;
        let token = answer.token.parse().map_err(|_| CallError::Refused {
            reason: "etcd's token is not a valid header value".to_owned(),
        })?;
        *self.token.lock().unwrap_or_else(PoisonError::into_inner) = Some(token);
        Ok(())
    }

    pub(super) fn token(&self) -> Option<MetadataValue<Ascii>> {
        let token = self.token.lock().unwrap_or_else(PoisonError::into_inner);
        token.clone()
    }
}
