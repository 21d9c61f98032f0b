//! Hides the values of environment variables from callers that may only read: they are often credentials.

use std::collections::BTreeMap;

use conman_auth::{Caller, Scope};
use conman_proto::{Image, Session, Template};

/// Shown instead of a value.
const HIDDEN: &str = "***";

/// Hides a session's values, unless the caller may start sessions.
pub(crate) fn of_session(caller: &Caller, mut session: Session) -> Session {
    if may_only_read(caller) {
        hide(&mut session.spec.env);
    }
    session
}

/// Likewise, a template's.
pub(crate) fn of_template(caller: &Caller, mut template: Template) -> Template {
    if let Some(env) = template.spec.env.as_mut().filter(|_| may_only_read(caller)) {
        hide(env);
    }
    template
}

/// Likewise, an image's.
pub(crate) fn of_image(caller: &Caller, mut image: Image) -> Image {
    if may_only_read(caller) {
        for variable in &mut image.config.env {
            let name = variable.split('=').next().unwrap_or_default();
            *variable = format!("{name}={HIDDEN}");
        }
    }
    image
}

fn hide(env: &mut BTreeMap<String, String>) {
    for value in env.values_mut() {
        HIDDEN.clone_into(value);
    }
}

fn may_only_read(caller: &Caller) -> bool {
    caller.scope < Scope::Frontend
}
