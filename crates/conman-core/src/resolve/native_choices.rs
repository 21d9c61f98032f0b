//! What only a template chooses, and only for runtimes that offer it.

use conman_proto::RuntimeKind;

use super::mistakes::Mistakes;
use crate::runtime_traits::runtime_traits;
use crate::spec_policy::Template;

pub(super) struct NativeChoices {
    pub(super) own_filters: bool,
    pub(super) sys: bool,
    pub(super) durable: bool,
    pub(super) new_privs: bool,
    pub(super) without_ipc: bool,
}

impl NativeChoices {
    pub(super) fn of(
        template: Option<&Template>,
        runtime: RuntimeKind,
        mistakes: &mut Mistakes,
    ) -> Self {
        let traits = runtime_traits(runtime);
        let own_filters = template.is_some_and(|template| template.own_filters);
        if own_filters && !traits.refuses_filters {
            mistakes.add(
                "own_filters",
                format!("the {runtime} runtime does not refuse filters; leave it out"),
            );
        }
        let mut chosen = |field: &'static str, of: fn(&Template) -> Option<bool>| {
            let chosen = template.and_then(of);
            if chosen.is_some() && !traits.has_native_choices {
                let message = format!("the {runtime} runtime does not have this; leave it out");
                mistakes.add(field, message);
            }
            chosen
        };
        Self {
            own_filters,
            sys: chosen("sys", |one| one.sys).unwrap_or(traits.has_native_choices),
            durable: chosen("durable", |one| one.durable).unwrap_or(false),
            new_privs: chosen("no_new_privs", |one| one.no_new_privs) == Some(false),
            without_ipc: chosen("ipc", |one| one.ipc) == Some(false),
        }
    }
}
