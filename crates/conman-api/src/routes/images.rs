//! Images: list, import, pull, remove, collect.

use std::convert::Infallible;
use std::time::Duration;

use axum::Json;
use axum::extract::{Extension, Request, State};
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse as _, Response};
use conman_auth::Caller;
use conman_core::listing::ListQuery;
use conman_core::runtime_traits;
use conman_image::{ImageKeeper, ImageName, name_of_reference};
use conman_proto::{GcReport, Image, ImageList, ImageRemoval, PullRequest, Session};
use futures_util::{Stream, StreamExt as _};
use http::header::{ACCEPT, CONTENT_LENGTH, CONTENT_TYPE, LOCATION};
use http::{HeaderMap, HeaderValue, StatusCode};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::image_errors::pull_problem;
use crate::json_body::{self, MAX_BODY_BYTES};
use crate::path_params::ImagePath;
use crate::problem::{ApiError, IntoApiError as _, Kind};
use crate::query::{NoQuery, Query};
use crate::{ApiState, field_errors, hidden_env, image_view, upload};

/// Interval between progress reports of a pull: often enough for a person.
const PROGRESS_PAUSE: Duration = Duration::from_millis(200);

/// Interval of comments on a quiet stream, which detect lost clients.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

const EVENT_STREAM: &str = "text/event-stream";

/// Media types of archives; their format is detected from the content.
const ARCHIVES: [&str; 2] = ["application/octet-stream", "application/x-tar"];

/// The name of an image: `NAME:TAG`, where `latest` is meant without a tag.
#[derive(utoipa::ToSchema)]
#[schema(
    max_length = 255,
    pattern = "^([a-z0-9](\\.?([_-]\\.?)*[a-z0-9])*(:([0-9]{1,4}|[1-5][0-9]{4}|6[0-4][0-9]{3}))?/)?[a-z0-9](\\.?([_-]\\.?)*[a-z0-9])*(/[a-z0-9](\\.?([_-]\\.?)*[a-z0-9])*)*(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?$",
    example = "python:3.12"
)]
#[expect(dead_code, reason = "it describes a parameter; conman-image reads it")]
struct ImageNameText(String);

/// An archive: an OCI image layout, what `docker save` writes, or a root file system; plain or
/// with gzip or zstd.
#[derive(utoipa::ToSchema)]
#[schema(value_type = String, format = Binary)]
#[expect(
    dead_code,
    reason = "it describes a body that is never whole in memory"
)]
struct ImageArchive(Vec<u8>);

/// List images
///
/// Callers of scope `read` get `***` for the values of `config.env`.
#[utoipa::path(
    get, path = "/v1/images", tag = "images", operation_id = "list_images",
    responses((status = 200, description = "All images, ordered by id.", body = ImageList))
)]
pub(crate) async fn list(
    State(state): State<ApiState>,
    Extension(caller): Extension<Caller>,
    _: NoQuery,
) -> Result<Json<ImageList>, ApiError> {
    let images = state.images.list().await?.into_iter();
    let images = images.map(|image| hidden_env::of_image(&caller, image_view::image(image)));
    Ok(Json(ImageList {
        images: images.collect(),
    }))
}

/// Show an image
///
/// Callers of scope `read` get `***` for the values of `config.env`.
#[utoipa::path(
    get, path = "/v1/images/{name}", tag = "images", operation_id = "get_image",
    params(("name" = inline(ImageNameText), Path, description =
        "The image's name, its slashes percent-encoded.")),
    responses(
        (status = 200, description = "The image.", body = Image),
        (status = 404, description = "image-not-found"),
    )
)]
pub(crate) async fn get(
    State(state): State<ApiState>,
    ImagePath(name): ImagePath,
    Extension(caller): Extension<Caller>,
    _: NoQuery,
) -> Result<Json<Image>, ApiError> {
    let image = image_view::image(state.images.get(&name).await?);
    Ok(Json(hidden_env::of_image(&caller, image)))
}

/// Import or pull an image
///
/// An archive as the body is imported under `name`; its type may be `application/x-tar` as well. It
/// is checked, unpacked and named once it is there whole; an upload that breaks off, and whatever is
/// refused, leaves nothing behind.
///
/// A JSON body requests a pull from a registry; requests for the same image and name share one
/// pull. It continues without its callers, and downloaded parts are kept for the next try. With
/// `Accept: text/event-stream` the answer reports progress: `progress` events with a
/// `PullProgress` each, and at last one `image` event with the `Image`, or one `problem` event
/// with a `Problem`. The name is the reference itself, unless `name` is given.
#[utoipa::path(
    post, path = "/v1/images", tag = "images", operation_id = "add_image",
    params(("name" = inline(Option<ImageNameText>), Query, description =
        "The image's name; required with an archive. Another image loses it.")),
    request_body(content(
        (ImageArchive = "application/octet-stream"),
        (PullRequest = "application/json"),
    )),
    responses(
        (status = 200, description = "The pull's progress.",
            content((String = "text/event-stream"))),
        (status = 201, description = "The image is in the store.",
            content((Image = "application/json")),
            headers(("Location" = String, description = "The image's path."))),
        (status = 422, description =
            "bad-image, not-in-registry or registry-not-allowed: what is wrong with the image"),
        (status = 502, description = "image-registry-failed or image-registry-refused"),
        (status = 503, description = "too-many-images or host-failed"),
        (status = 504, description = "image-registry-timed-out"),
        (status = 507, description = "image-store-full or image-store-read-only"),
    )
)]
pub(crate) async fn add(
    State(state): State<ApiState>,
    mut query: Query,
    request: Request,
) -> Result<Response, ApiError> {
    let name = query.parsed("name", str::parse::<ImageName>);
    let media_type = request
        .headers()
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .map(|value| value.split(';').next().unwrap_or(value).trim())
        .unwrap_or_default()
        .to_ascii_lowercase();
    query.finish()?;
    if ARCHIVES.contains(&media_type.as_str()) {
        let name = name.ok_or_else(|| no_name("an archive does not contain its name"))?;
        return import(&state.images, &name, request).await;
    }
    if media_type != "application/json" {
        return Err(Kind::MEDIA_TYPE.because(format!(
            "send an archive as `{}` or `{}`, or `application/json` for a pull; the \
             Content-Type is `{}`",
            ARCHIVES[0],
            ARCHIVES[1],
            field_errors::cut(&media_type)
        )));
    }
    let follow = accepts_events(request.headers());
    let asked: PullRequest = json_body::read(request, MAX_BODY_BYTES).await?;
    let name = name.map_or_else(|| name_of(&asked.pull), Ok)?;
    let pull = Pull::start(state.images.clone(), asked.pull, name.clone());
    if follow {
        let events = pull.events().take_until(state.closing.cancelled_owned());
        let events = Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE));
        return Ok(events.into_response());
    }
    // Cancel safe: the pull has a separate task.
    tokio::select! {
        image = pull.outcome => created(&name, ended(image)?),
        () = state.closing.cancelled() => Err(stopping()),
    }
}

/// Remove an image's name
///
/// The image is deleted soon after its last name, once no session uses it.
#[utoipa::path(
    delete, path = "/v1/images/{name}", tag = "images", operation_id = "remove_image",
    params(("name" = inline(ImageNameText), Path, description =
        "The image's name, its slashes percent-encoded."),
        ("force" = Option<bool>, Query, description =
            "Remove the name although a template or a session uses it."),
    ),
    responses(
        (status = 200, description = "The name is gone.", body = ImageRemoval),
        (status = 404, description = "image-not-found"),
        (status = 409, description = "image-in-use: by a template or a session"),
        (status = 503, description = "host-failed"),
        (status = 507, description = "image-store-full or image-store-read-only"),
    )
)]
pub(crate) async fn remove(
    State(state): State<ApiState>,
    ImagePath(name): ImagePath,
    mut query: Query,
) -> Result<Json<ImageRemoval>, ApiError> {
    let force = query.flag("force", false);
    query.finish()?;
    if !force {
        refuse_used(&state, &name)?;
    }
    let removed = state.images.remove(&name).await?;
    Ok(Json(image_view::removal(&name, &removed)))
}

/// Refuses to remove a name that a later start needs.
fn refuse_used(state: &ApiState, name: &ImageName) -> Result<(), ApiError> {
    let is_name = |image: &str| name_of_reference(image).is_some_and(|used| used == *name);
    let policy = state.node.policy();
    let template = policy.templates.iter().find(|(_, template)| {
        let image = template.request.image.as_deref();
        let stored = template
            .runtime
            .is_none_or(|kind| runtime_traits(kind).uses_image_store);
        stored && image.is_some_and(is_name)
    });
    let user = match template {
        Some((template, _)) => format!("template `{template}`"),
        None => {
            let every = ListQuery {
                limit: usize::MAX,
                ..ListQuery::default()
            };
            let sessions = state.node.sessions().list(&every).sessions;
            let used = |session: &&Session| {
                let spec = &session.spec;
                runtime_traits(spec.runtime).uses_image_store
                    && !session.state.is_ended()
                    && is_name(&spec.image)
            };
            match sessions.iter().find(used) {
                Some(session) => format!("session `{}`", session.id),
                None => return Ok(()),
            }
        }
    };
    Err(Kind::IMAGE_USED.because(format!("{user} uses {name}")))
}

/// Collect what nothing uses
///
/// Removes images that have no name and are used by no session, layers of no image, and downloads
/// without progress for a day. The node also does this automatically.
#[utoipa::path(
    post, path = "/v1/gc", tag = "images", operation_id = "collect_garbage",
    responses(
        (status = 200, description = "What was removed.", body = GcReport),
        (status = 503, description = "host-failed"),
        (status = 507, description = "image-store-full or image-store-read-only"),
    )
)]
pub(crate) async fn collect(
    State(state): State<ApiState>,
    _: NoQuery,
) -> Result<Json<GcReport>, ApiError> {
    Ok(Json(image_view::report(&state.images.collect().await?)))
}

async fn import(
    images: &ImageKeeper,
    name: &ImageName,
    request: Request,
) -> Result<Response, ApiError> {
    refuse_what_cannot_fit(images, request.headers())?;
    let mut pieces = Box::pin(upload::pieces(request.into_body()).fuse());
    match images.import(name, &mut pieces).await {
        Ok(_) => created(name, image_view::image(images.get(name).await?)),
        Err(error) => {
            upload::drain(pieces).await;
            Err(error.into())
        }
    }
}

/// Called before the body is read: a client that waits for `100 Continue` need not send it.
fn refuse_what_cannot_fit(images: &ImageKeeper, headers: &HeaderMap) -> Result<(), ApiError> {
    let announced = headers
        .get(CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.parse::<u64>().ok());
    let Some(bytes) = announced else {
        return Ok(());
    };
    let most = images.store().limits().max_blob_bytes;
    if bytes > most {
        return Err(Kind::BODY_TOO_LARGE.because(format!(
            "the archive has {bytes} bytes, and {most} are allowed"
        )));
    }
    let free = images.store().free_bytes();
    let free = free.map_err(|error| ApiError::from(conman_image::KeeperError::from(error)))?;
    if bytes > free {
        return Err(Kind::STORE_FULL.because(format!(
            "the archive has {bytes} bytes, and {free} are free below {}: make room there, or \
             remove images",
            images.store().directory().display()
        )));
    }
    Ok(())
}

/// What a pulled image is called unless the request says otherwise.
fn name_of(reference: &str) -> Result<ImageName, ApiError> {
    if let Some(name) = name_of_reference(reference) {
        return Ok(name);
    }
    match reference.parse::<ImageName>() {
        Err(error) if !reference.contains('@') => {
            Err(Kind::BAD_BODY.in_field("pull", error.to_string()))
        }
        _ => Err(no_name("the reference to pull is not a NAME:TAG")),
    }
}

fn created(name: &ImageName, image: Image) -> Result<Response, ApiError> {
    let name = name.to_string();
    let name = percent_encoding::utf8_percent_encode(&name, percent_encoding::NON_ALPHANUMERIC);
    let location = HeaderValue::from_str(&format!("/v1/images/{name}"))
        .map_err(|_| Kind::INTERNAL.because("the image's path is not a valid header value"))?;
    let headers = [(LOCATION, location)];
    Ok((StatusCode::CREATED, headers, Json(image)).into_response())
}

fn accepts_events(headers: &HeaderMap) -> bool {
    headers.get_all(ACCEPT).iter().any(|value| {
        value.to_str().is_ok_and(|value| {
            value
                .split([',', ';'])
                .any(|one| one.trim() == EVENT_STREAM)
        })
    })
}

fn no_name(why: &str) -> ApiError {
    let message = format!("is required, for example python:3.12: {why}");
    Kind::BAD_QUERY.in_field("name", message)
}

fn stopping() -> ApiError {
    Kind::SHUTTING_DOWN.because("the daemon stops; a repeated pull continues the download")
}

/// A pull in a separate task.
struct Pull {
    progress: watch::Receiver<conman_image::PullProgress>,
    outcome: JoinHandle<Result<Image, ApiError>>,
}

impl Pull {
    fn start(images: ImageKeeper, reference: String, name: ImageName) -> Self {
        let (sender, progress) = watch::channel(conman_image::PullProgress::default());
        let outcome = tokio::spawn(async move {
            images
                .pull(&reference, &name, |progress| {
                    sender.send_replace(progress.clone());
                })
                .await
                .map_err(|error| pull_problem(&error))?;
            Ok(image_view::image(images.get(&name).await?))
        });
        Self { progress, outcome }
    }

    /// Ends with the outcome.
    fn events(self) -> impl Stream<Item = Result<SseEvent, Infallible>> {
        futures_util::stream::unfold(Some(self), |pull| async {
            let mut pull = pull?;
            // The sender is dropped when the task ends.
            if pull.progress.changed().await.is_ok() {
                tokio::time::sleep(PROGRESS_PAUSE).await;
                let progress = image_view::progress(&pull.progress.borrow_and_update());
                return Some((Ok(event("progress", &progress)), Some(pull)));
            }
            let event = match ended((&mut pull.outcome).await) {
                Ok(image) => event("image", &image),
                Err(error) => event("problem", &error.into_problem()),
            };
            Some((Ok(event), None))
        })
    }
}

fn ended(
    outcome: Result<Result<Image, ApiError>, tokio::task::JoinError>,
) -> Result<Image, ApiError> {
    match outcome {
        Ok(outcome) => outcome,
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        Err(_) => Err(stopping()),
    }
}

fn event(name: &str, value: &impl serde::Serialize) -> SseEvent {
    // Plain data always becomes JSON, and JSON contains no line breaks.
    let data = serde_json::to_string(value).unwrap_or_default();
    SseEvent::default().event(name).data(data)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_of_events_is_given_only_to_whom_asks_for_it() {
        let accepts = |value: &'static str| {
            accepts_events(&HeaderMap::from_iter([(
                ACCEPT,
                HeaderValue::from_static(value),
            )]))
        };
        assert!(accepts("text/event-stream") && accepts("application/json, text/event-stream;q=1"));
        assert!(!accepts("*/*") && !accepts("application/json"));
        assert!(!accepts_events(&HeaderMap::new()));
    }
}
