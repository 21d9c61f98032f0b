//! What only a template chooses, and only for runtimes that offer it.

use conman_proto::RuntimeKind;

use super::mistakes::Mistakes;
use crate::runtime_traits::runtime_traits;
use crate::spec_policy::{MAX_POOL, Template};

pub(super) struct NativeChoices {
    pub(super) own_filters: bool,
    pub(super) sys: bool,
    pub(super) durable: bool,
    pub(super) new_privs: bool,
    pub(super) without_ipc: bool,
    pub(super) pool: u32,
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
        let pool = template.and_then(|template| template.pool);
        if pool.is_some() && !traits.has_native_choices {
            let message = format!("the {runtime} runtime does not have this; leave it out");
            mistakes.add("pool", message);
        } else if pool.is_some_and(|pool| pool > MAX_POOL) {
            mistakes.add("pool", format!("it is at most {MAX_POOL}"));
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
            pool: pool.unwrap_or(0),
        }
    }
}
