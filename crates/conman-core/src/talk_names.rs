//! Names by which sessions find those that they may talk to.
//!
//! | name | sessions |
//! |---|---|
//! | `ID.session.internal` | the one with this id |
//! | `NAME.GROUP.session.internal` | those in this group whose label `name` is NAME |
//!
//! A name exists only for sessions that have a group in common with what it names.

use std::net::IpAddr;

use conman_proto::{ResolvedSpec, SessionId};

use crate::resolve::is_group;

/// The domain of all these names.
const DOMAIN: &str = "session.internal";

/// The label that gives a session a name in its groups.
const NAME_LABEL: &str = "name";

/// Sessions of one name that an answer has at most.
pub const MAX_NAMED: usize = 16;

/// What a name names.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum TalkName {
    Session(SessionId),
    /// Sessions in a group, by their label.
    Label {
        name: String,
        group: String,
    },
}

/// A session that has not ended, as the registry has it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TalkingSession {
    pub groups: Vec<String>,
    /// Its name in them.
    pub name: Option<String>,
    pub addresses: Vec<IpAddr>,
}

/// Whether a host name in lower case, without a final dot, is in the domain of sessions.
#[must_use]
pub fn is_talk_name(host: &str) -> bool {
    within(host).is_some()
}

/// What is before the domain.
fn within(host: &str) -> Option<&str> {
    let within = host.strip_suffix(DOMAIN)?;
    match within.is_empty() {
        true => Some(within),
        false => within.strip_suffix('.'),
    }
}

/// A session's name in each of its groups, if it has one.
pub fn names_in_groups(spec: &ResolvedSpec) -> impl Iterator<Item = (&str, &str)> {
    let name = name_of(spec);
    let groups = spec.talk.iter().filter(move |_| name.is_some());
    groups.map(move |group| (name.unwrap_or_default(), group.as_str()))
}

/// A label that cannot be part of a host name gives none.
fn name_of(spec: &ResolvedSpec) -> Option<&str> {
    let name = spec.labels.get(NAME_LABEL)?;
    is_group(name).then_some(name)
}

impl TalkingSession {
    #[must_use]
    pub fn new(spec: &ResolvedSpec, addresses: &[IpAddr]) -> Self {
        Self {
            groups: spec.talk.clone(),
            name: name_of(spec).map(str::to_owned),
            addresses: addresses.to_vec(),
        }
    }
}

impl TalkName {
    /// Parses a host name in lower case, without a final dot. `None` if no session can have it.
    #[must_use]
    pub fn parse(host: &str) -> Option<Self> {
        let mut labels = within(host)?.split('.');
        match (labels.next()?, labels.next(), labels.next()) {
            (id, None, None) => id.parse().ok().map(Self::Session),
            (name, Some(group), None) if is_group(name) && is_group(group) => Some(Self::Label {
                name: name.to_owned(),
                group: group.to_owned(),
            }),
            _ => None,
        }
    }

    /// Whether the name may exist for a session in `groups`.
    #[must_use]
    pub fn may_exist_for(&self, groups: &[String]) -> bool {
        match self {
            Self::Session(_) => !groups.is_empty(),
            Self::Label { group, .. } => groups.contains(group),
        }
    }

    /// The addresses for a session in `groups`; `None`: the name does not exist for it.
    #[must_use]
    pub fn addresses(&self, groups: &[String], found: &[TalkingSession]) -> Option<Vec<IpAddr>> {
        let is_named = |session: &&TalkingSession| match self {
            Self::Session(_) => session.groups.iter().any(|group| groups.contains(group)),
            Self::Label { name, group } => {
                groups.contains(group)
                    && session.groups.contains(group)
                    && session.name.as_ref() == Some(name)
            }
        };
        let mut named = found.iter().filter(is_named).take(MAX_NAMED).peekable();
        named.peek()?;
        Some(
            named
                .flat_map(|session| session.addresses.iter().copied())
                .collect(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    fn session(in_groups: &[&str], name: Option<&str>, last: u8) -> TalkingSession {
        TalkingSession {
            groups: groups(in_groups),
            name: name.map(str::to_owned),
            addresses: vec![
                [10, 96, 0, last].into(),
                format!("fd00::{last}").parse().expect("one"),
            ],
        }
    }

    #[test]
    fn names_are_those_of_sessions_and_of_labels_in_groups() {
        let id = "alice.session.internal";
        assert_eq!(
            TalkName::parse(id),
            Some(TalkName::Session("alice".parse().expect("an id")))
        );
        let label = TalkName::Label {
            name: "db".to_owned(),
            group: "team".to_owned(),
        };
        assert_eq!(TalkName::parse("db.team.session.internal"), Some(label));
        for none in [
            "session.internal",
            ".session.internal",
            "a.b.c.session.internal",
            "-a.session.internal",
            "a_b.team.session.internal",
            "alice.example.internal",
        ] {
            assert_eq!(TalkName::parse(none), None, "{none}");
        }
        assert!(is_talk_name("session.internal") && is_talk_name("a.b.c.session.internal"));
        assert!(!is_talk_name("asession.internal") && !is_talk_name("internal"));
    }

    #[test]
    fn a_name_exists_only_for_sessions_that_may_talk_to_what_it_names() {
        let id = TalkName::parse("alice.session.internal").expect("a name");
        let found = [session(&["blue", "red"], Some("db"), 1)];
        let addresses = id.addresses(&groups(&["red"]), &found).expect("it exists");
        assert_eq!(addresses, found[0].addresses);
        assert_eq!(id.addresses(&groups(&["green"]), &found), None);
        assert_eq!(id.addresses(&groups(&["red"]), &[]), None);
        let label = TalkName::parse("db.red.session.internal").expect("a name");
        assert!(label.may_exist_for(&groups(&["red"])) && !label.may_exist_for(&groups(&["blue"])));
        let found = [
            session(&["blue", "red"], Some("db"), 1),
            session(&["red"], Some("web"), 2),
            session(&["blue"], Some("db"), 3),
            session(&["red"], Some("db"), 4),
        ];
        let addresses = label
            .addresses(&groups(&["red"]), &found)
            .expect("it exists");
        let both = [&found[0], &found[3]].map(|one| one.addresses.clone());
        assert_eq!(addresses, both.concat());
        assert_eq!(label.addresses(&groups(&["blue"]), &found), None);
    }
}
