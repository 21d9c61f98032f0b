//! One image in one registry.

use std::sync::Once;
use std::time::Duration;

use oci_client::client::{BlobResponse, ClientConfig, ClientProtocol, SizedStream};
use oci_client::errors::{OciDistributionError, OciEnvelope};
use oci_client::secrets::RegistryAuth;
use oci_client::{Client, Reference, RegistryOperation};
use oci_spec::image::{Descriptor, ImageIndex, ImageManifest};
use reqwest::StatusCode;
use reqwest::header::ACCEPT;
use serde::Deserialize;

use crate::blobs::{check_type, digest_of, parse, verify};
use crate::digest::Digest;
use crate::import::ImportError;
use crate::oci_layout::{INDEX_TYPES, MANIFEST_TYPES, choose};
use crate::pull::PullConfig;
use crate::pull::error::PullError;

/// Bound on connecting to a registry; a slower one is of no use.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);

const USER_AGENT: &str = concat!("conman/", env!("CARGO_PKG_VERSION"));

/// Longest pause within an answer.
pub(super) const STALL_TIMEOUT: Duration = Duration::from_secs(30);

/// Bound on a manifest or a configuration, including authentication.
const DOCUMENT_TIMEOUT: Duration = Duration::from_secs(60);

/// Where a registry has documents and blobs.
const MANIFESTS: &str = "manifests";
const BLOBS: &str = "blobs";

/// Most bytes that are read of an error answer.
const MAX_ERROR_BYTES: u64 = 64 * 1_024;

pub(super) struct Remote {
    client: Client,
    /// For manifests and configurations, which `client` would read whole, however long they are.
    http: reqwest::Client,
    scheme: &'static str,
    reference: Reference,
    auth: RegistryAuth,
    max_json_bytes: u64,
}

/// The fields that distinguish an index from a manifest.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Kind {
    #[serde(default)]
    media_type: Option<String>,
    #[serde(default)]
    manifests: Option<serde::de::IgnoredAny>,
}

impl Remote {
    pub(super) fn new(
        reference: &Reference,
        config: &PullConfig,
        max_json_bytes: u64,
    ) -> Result<Self, PullError> {
        static PROVIDER: Once = Once::new();
        PROVIDER.call_once(|| {
            // It fails only if the process has chosen one already, which is fine.
            let _ = rustls::crypto::ring::default_provider().install_default();
        });
        let registry = reference.resolve_registry();
        let plain = is_loopback(registry) || config.insecure_registries.contains(registry);
        let client = Client::try_from(ClientConfig {
            protocol: if plain {
                ClientProtocol::Http
            } else {
                ClientProtocol::Https
            },
            connect_timeout: Some(CONNECT_TIMEOUT),
            read_timeout: Some(STALL_TIMEOUT),
            user_agent: USER_AGENT,
            ..ClientConfig::default()
        })
        .map_err(|error| PullError::Client(Box::new(error)))?;
        let http = reqwest::Client::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .read_timeout(STALL_TIMEOUT)
            .user_agent(USER_AGENT)
            .build()
            .map_err(|error| PullError::Client(Box::new(error.into())))?;
        let auth = match config.credentials.get(reference.registry()) {
            Some(login) => RegistryAuth::Basic(login.user.clone(), login.password.clone()),
            None => RegistryAuth::Anonymous,
        };
        Ok(Self {
            client,
            http,
            scheme: if plain { "http" } else { "https" },
            reference: reference.clone(),
            auth,
            max_json_bytes,
        })
    }

    pub(super) fn reference(&self) -> &Reference {
        &self.reference
    }

    /// The manifest for this machine, through an index if there is one.
    pub(super) async fn manifest(&self) -> Result<ImageManifest, PullError> {
        let what = "the manifest";
        let tag = self.reference.tag().unwrap_or("latest");
        let version = self.reference.digest().unwrap_or(tag);
        let bytes = self.document(what, MANIFESTS, version).await?;
        if let Some(digest) = self.reference.digest() {
            self.read(verify_pinned(what, &bytes, digest))?;
        }
        let kind: Kind = self.read(parse(what, &bytes))?;
        let media_type = kind.media_type.as_deref();
        let is_index = match media_type {
            Some(media_type) => INDEX_TYPES.contains(&media_type),
            None => kind.manifests.is_some(),
        };
        if !is_index {
            if let Some(media_type) = media_type {
                self.read(check_type(what, media_type, &MANIFEST_TYPES))?;
            }
            return self.read(parse(what, &bytes));
        }
        let index: ImageIndex = self.read(parse("the index", &bytes))?;
        let chosen = self.read(choose(&index, None))?;
        let media_type = chosen.media_type().to_string();
        let in_index = "an image in the index";
        self.read(check_type(in_index, &media_type, &MANIFEST_TYPES))?;
        let bytes = self.verified(what, MANIFESTS, chosen).await?;
        self.read(parse(what, &bytes))
    }

    /// A configuration: small, and kept in memory.
    pub(super) async fn config(&self, descriptor: &Descriptor) -> Result<Vec<u8>, PullError> {
        self.verified("the configuration", BLOBS, descriptor).await
    }

    async fn verified(
        &self,
        what: &str,
        place: &str,
        descriptor: &Descriptor,
    ) -> Result<Vec<u8>, PullError> {
        let digest = self.read(digest_of(descriptor, what))?;
        let bytes = self.document(what, place, &digest.to_string()).await?;
        self.read(verify(what, &bytes, digest, descriptor.size()))?;
        Ok(bytes)
    }

    /// Reads at most `max_json_bytes`, whatever the registry sends.
    async fn document(&self, what: &str, place: &str, version: &str) -> Result<Vec<u8>, PullError> {
        let bytes = tokio::time::timeout(DOCUMENT_TIMEOUT, self.bytes_of(place, version))
            .await
            .map_err(|_| self.timed_out(what, DOCUMENT_TIMEOUT))?
            .map_err(|error| self.failed(what, error))?;
        match bytes {
            Some(bytes) => Ok(bytes),
            None => self.read(Err(ImportError::TooLarge {
                what: what.to_owned(),
                limit: self.max_json_bytes,
            })),
        }
    }

    /// `None` if it is longer than `max_json_bytes`.
    async fn bytes_of(
        &self,
        place: &str,
        version: &str,
    ) -> Result<Option<Vec<u8>>, OciDistributionError> {
        let (pull, reference) = (RegistryOperation::Pull, &self.reference);
        let token = self.client.auth(reference, &self.auth, pull).await?;
        let url = format!(
            "{}://{}/v2/{}/{place}/{version}",
            self.scheme,
            reference.resolve_registry(),
            reference.repository()
        );
        let accepted = [MANIFEST_TYPES, INDEX_TYPES].concat().join(", ");
        let request = self.http.get(&url).header(ACCEPT, accepted);
        let request = match (token, &self.auth) {
            (Some(token), _) => request.bearer_auth(token),
            (None, RegistryAuth::Basic(user, password)) => request.basic_auth(user, Some(password)),
            (None, _) => request,
        };
        let mut response = request.send().await?;
        let status = response.status();
        if status == StatusCode::OK {
            return Ok(body(&mut response, self.max_json_bytes).await?);
        }
        let text = body(&mut response, MAX_ERROR_BYTES)
            .await?
            .unwrap_or_default();
        Err(match serde_json::from_slice::<OciEnvelope>(&text) {
            _ if status == StatusCode::UNAUTHORIZED => {
                OciDistributionError::UnauthorizedError { url }
            }
            Ok(envelope) => OciDistributionError::RegistryError { envelope, url },
            Err(_) => OciDistributionError::ServerError {
                code: status.as_u16(),
                url,
                message: String::from_utf8_lossy(&text).into_owned(),
            },
        })
    }

    /// A blob from `offset` on, and whether the registry began there; otherwise it began at 0.
    pub(super) async fn blob(
        &self,
        digest: &Digest,
        offset: u64,
    ) -> Result<(bool, SizedStream), OciDistributionError> {
        let digest = digest.to_string();
        if offset == 0 {
            let stream = self
                .client
                .pull_blob_stream(&self.reference, digest.as_str());
            return Ok((false, stream.await?));
        }
        let answer =
            self.client
                .pull_blob_stream_partial(&self.reference, digest.as_str(), offset, None);
        Ok(match answer.await? {
            BlobResponse::Partial(stream) => (true, stream),
            BlobResponse::Full(stream) => (false, stream),
        })
    }

    pub(super) fn failed(&self, what: &str, error: OciDistributionError) -> PullError {
        PullError::Fetch {
            what: what.to_owned(),
            reference: self.reference.to_string(),
            source: Box::new(error),
        }
    }

    pub(super) fn too_long(&self, what: &str, expected: u64) -> PullError {
        PullError::TooLong {
            what: what.to_owned(),
            reference: self.reference.to_string(),
            expected,
        }
    }

    fn timed_out(&self, what: &str, after: Duration) -> PullError {
        PullError::Timeout {
            what: what.to_owned(),
            reference: self.reference.to_string(),
            after,
        }
    }

    pub(super) fn read<T>(&self, outcome: Result<T, ImportError>) -> Result<T, PullError> {
        outcome.map_err(|source| PullError::Import {
            reference: self.reference.to_string(),
            source,
        })
    }
}

/// Fails if the document is another than the reference names by its digest.
fn verify_pinned(what: &str, bytes: &[u8], digest: &str) -> Result<(), ImportError> {
    let digest: Digest = digest.parse().map_err(|source| ImportError::Digest {
        what: "the reference".to_owned(),
        source,
    })?;
    verify(what, bytes, digest, bytes.len() as u64)
}

/// The body of an answer; `None` as soon as it is longer than `limit`.
async fn body(
    response: &mut reqwest::Response,
    limit: u64,
) -> Result<Option<Vec<u8>>, reqwest::Error> {
    let mut bytes = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        bytes.extend_from_slice(&chunk);
        if bytes.len() as u64 > limit {
            return Ok(None);
        }
    }
    Ok(Some(bytes))
}

/// Plain HTTP is safe on the way to this machine itself.
fn is_loopback(registry: &str) -> bool {
    let host = match registry.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => registry.split(':').next().unwrap_or_default(),
    };
    host == "localhost"
        || host
            .parse::<std::net::IpAddr>()
            .is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machine_is_loopback() {
        for registry in [
            "127.0.0.1:5000",
            "127.9.9.9",
            "localhost:5000",
            "[::1]:5000",
        ] {
            assert!(is_loopback(registry), "{registry}");
        }
        for registry in [
            "127.0.0.1.example.com",
            "localhost.example.com",
            "registry",
            "10.0.0.1:5000",
            "[::2]:5000",
            "128.0.0.1",
            "",
        ] {
            assert!(!is_loopback(registry), "{registry}");
        }
    }
}
