//! Publishes this node's announcement.

use conman_core::ownership::BootTime;

use super::super::codec::{self, PeerText};
use super::super::shared::{Shared, boot_time};
use super::super::wire::{self, TxnRequest};
use super::Membership;
use conman_registry::NodeLoad;

/// An unchanged announcement is published again after this long, and so are values that change all
/// the time and matter little. Other nodes rely on an announcement for three times as long.
const ANNOUNCE_AGAIN_MS: u64 = 5_000;

/// Whether they differ in more than what fluctuates on any machine: memory, pressure, connections,
/// and how close the host is to its limits. etcd keeps each version until it is compacted.
fn is_worth_telling(before: &PeerText, after: &PeerText) -> bool {
    let settled = |one: &PeerText| {
        let mut settled = one.clone();
        let announced = &mut settled.announcement;
        announced.load = NodeLoad {
            sessions: announced.load.sessions,
            starting: announced.load.starting,
            ..NodeLoad::default()
        };
        if let Some(view) = &mut announced.view {
            (view.connections, view.host_limit) = (0, None);
        }
        settled
    };
    settled(before) != settled(after)
}

pub(super) async fn tell(
    shared: &Shared,
    membership: &Membership,
    announced: &mut Option<(BootTime, PeerText)>,
) {
    let incarnation = *shared.incarnation.borrow();
    // In a store that is refused, each announcement would raise the revision by which other nodes
    // recognize that it went back, and fill it while nobody compacts it.
    let is_refused = shared.store.client.seen().went_back().is_some();
    if incarnation == 0 || is_refused {
        return;
    }
    let key = shared.store.keys.peer(&shared.me);
    let Some(announcement) = membership.own_announcement() else {
        // An earlier life's announcement is out of date.
        if membership.is_announced(&shared.me) {
            let request = TxnRequest {
                compare: Vec::new(),
                success: vec![wire::delete(key)],
            };
            if let Some(trouble) = shared.store.transact(request).await.trouble {
                tracing::debug!(trouble, "cannot delete this node's earlier announcement");
            }
        }
        return;
    };
    let text = PeerText {
        incarnation,
        announcement,
    };
    let now = boot_time();
    let known = announced.as_ref().is_some_and(|(at, before)| {
        now.since(*at) < ANNOUNCE_AGAIN_MS && !is_worth_telling(before, &text)
    });
    if known {
        return;
    }
    let request = TxnRequest {
        compare: Vec::new(),
        success: vec![wire::put(key, codec::text(&text))],
    };
    match shared.store.transact(request).await.trouble {
        None => *announced = Some((now, text)),
        Some(trouble) => tracing::debug!(trouble, "cannot publish this node's announcement"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use conman_registry::Announcement;

    fn announcement(label: &str) -> Announcement {
        Announcement {
            templates: vec![label.to_owned()],
            ..Announcement::default()
        }
    }

    #[test]
    fn what_flutters_is_announced_with_the_rest_only() {
        let before = PeerText {
            incarnation: 1,
            announcement: Announcement {
                view: Some(shown()),
                ..announcement("one")
            },
        };
        let differs = |change: &dyn Fn(&mut PeerText)| {
            let mut after = before.clone();
            change(&mut after);
            assert_ne!(after, before);
            is_worth_telling(&before, &after)
        };
        let view = |text: &mut PeerText, change: &dyn Fn(&mut conman_proto::Node)| {
            change(text.announcement.view.as_mut().expect("it is shown"));
        };
        assert!(!differs(&|text| text
            .announcement
            .load
            .memory_available_bytes = 1));
        assert!(!differs(&|text| text
            .announcement
            .load
            .cpu_pressure_percent = 0.5));
        assert!(!differs(&|text| view(text, &|view| view.connections = 1)));
        assert!(differs(&|text| text.incarnation = 2));
        assert!(differs(&|text| text.announcement.load.sessions = 1));
        assert!(differs(&|text| text.announcement.load.starting = 1));
        assert!(differs(&|text| text.announcement.max_sessions = 1));
        assert!(differs(&|text| text.announcement.draining = true));
        assert!(differs(
            &|text| text.announcement.peer_url = Some("http://a".to_owned())
        ));
        let preempted = conman_proto::NodeState::Preempted;
        assert!(differs(&|text| view(text, &|view| view.state = preempted)));
    }

    #[test]
    fn a_node_of_another_version_is_reached_though_its_view_is_not_understood() {
        let text = PeerText {
            incarnation: 7,
            announcement: Announcement {
                peer_url: Some("http://10.0.0.1:7702".to_owned()),
                view: Some(shown()),
                ..announcement("one")
            },
        };
        let written = codec::text(&text);
        let read = |bytes: &[u8]| codec::parse::<PeerText>(b"peer/a", bytes).expect("readable");
        assert_eq!(read(&written), text);
        let mut later: serde_json::Value = serde_json::from_slice(&written).expect("JSON");
        later["announcement"]["view"]["state"] = "hibernating".into();
        later["announcement"]["hibernates"] = true.into();
        let understood = PeerText {
            announcement: Announcement {
                view: None,
                ..text.announcement
            },
            ..text
        };
        assert_eq!(read(&codec::text(&later)), understood);
        later["announcement"]["view"] = serde_json::Value::Null;
        assert_eq!(read(&codec::text(&later)), understood);
    }

    fn shown() -> conman_proto::Node {
        conman_proto::Node {
            state: conman_proto::NodeState::Live,
            ..conman_proto::Node::unannounced("a")
        }
    }
}
