//! Stories of sessions that moved from node to node, or whose node is lost.

use conman_proto::EventKind::SessionTakenOver;

use super::*;

fn fleet(ownership: SessionOwnership, node: &str, standing: NodeStanding) -> SessionInFleet {
    SessionInFleet {
        ownership,
        node: Some(node.to_owned()),
        standing: Some(standing),
        generation: None,
        takers: Vec::new(),
        refused: Vec::new(),
        unreachable_nodes: Vec::new(),
        registry_error: None,
    }
}

fn reason(node: &str, why: &str) -> NodeReason {
    NodeReason {
        node: node.to_owned(),
        why: why.to_owned(),
    }
}

const ENDED_BY_DRAIN: &str = "generation 7 on n1: started at 2026-03-01 12:00:00.000 UTC; ended at \
    2026-03-01 12:00:05.000 UTC: drained: room for others\n";

/// `alice` on n1, and then on n2, which has taken it over or not.
fn moved(taken: bool, on_n1: &[(i64, EventKind, &str)]) -> Scene {
    let mut scene = Scene::new()
        .at(0, SessionClaimed, "starting")
        .at(100, SessionReady, "ready");
    for (ms, kind, message) in on_n1 {
        scene = match kind {
            NodeFrozen | NodeThawed => scene.of_node(*ms, *kind, message),
            _ => scene.at(*ms, *kind, message),
        };
    }
    let count = scene.0.events.len();
    if taken {
        let message = "taken over from node n1, which was declared dead";
        scene = scene.event(9, 20_000, SessionTakenOver, message);
    }
    scene =
        scene
            .event(9, 20_001, SessionClaimed, "starting")
            .event(9, 20_100, SessionReady, "ready");
    for event in &mut scene.0.events[count..] {
        "n2".clone_into(&mut event.node);
    }
    scene.0.events.sort_by_key(|event| event.at);
    scene.0.fleet = Some(fleet(SessionOwnership::Owned, "n2", NodeStanding::Live));
    scene
}

fn running_on_n2() -> Session {
    Session {
        node: "n2".to_owned(),
        started_at: Some(at(20_100)),
        created_at: at(20_000),
        ..session(9, SessionState::Running, None)
    }
}

#[test]
fn a_session_that_another_node_took_over_was_not_given_up_whatever_its_node_did_later() {
    // n1 was cut off, came back after the takeover, and ended what was frozen.
    let lapsed = "all sessions are frozen until the node owns them again";
    let back = [
        (5_000, NodeFrozen, lapsed),
        (31_000, SessionKilled, "SIGKILL: its ownership was lost"),
        (31_005, SessionDead, "its PID namespace is empty"),
        (31_010, NodeThawed, "thawed after 26.0 s"),
    ];
    let story = moved(true, &back).text(Some(&running_on_n2()), 40_000);
    for part in [
        "alice is running on n2",
        "2026-03-01 12:00:20.000 UTC session_taken_over taken over from node n1, which was declared \
         dead (on n2)\n",
        "generation 7 on n1: started at 2026-03-01 12:00:00.000 UTC; frozen at 2026-03-01 \
         12:00:05.000 UTC; taken over by n2 at 2026-03-01 12:00:20.000 UTC; what was left of it \
         ended at 2026-03-01 12:00:31.000 UTC: SIGKILL: its ownership was lost\n",
    ] {
        assert!(story.contains(part), "{part}: {story}");
    }
    for never in ["UTC; ended at", "node_frozen", "node_thawed"] {
        assert!(!story.contains(never), "{never}: {story}");
    }

    // n1 is lost for good.
    let story = moved(true, &[]).text(Some(&running_on_n2()), 30_000);
    let part = "generation 7 on n1: started at 2026-03-01 12:00:00.000 UTC; taken over by n2 at \
        2026-03-01 12:00:20.000 UTC\n";
    assert!(story.contains(part), "{story}");
}

#[test]
fn a_session_that_is_frozen_here_and_runs_there_is_shown_as_that() {
    let frozen = Session {
        node: "n1".to_owned(),
        ..session(7, SessionState::Frozen, None)
    };
    let lapsed = [(5_000, NodeFrozen, "lapsed")];
    let story = moved(true, &lapsed).text(Some(&frozen), 30_000);
    let part = "alice is frozen on n1: n2 has taken it over, and has generation 9 since";
    assert!(story.contains(part), "{story}");
}

#[test]
fn a_takeover_from_a_node_without_a_journal_is_no_other_generations() {
    let drained = [(5_000, SessionReleased, "drained: room for others")];
    let mut scene = moved(true, &drained);
    for event in &mut scene.0.events {
        event.message = event.message.replace("node n1,", "node n3,");
    }
    let story = scene.text(Some(&running_on_n2()), 30_000);
    for part in [
        "session_taken_over taken over from node n3,",
        ENDED_BY_DRAIN,
        "What happened to it on n3 is missing: its journal cannot be read\n",
    ] {
        assert!(story.contains(part), "{part}: {story}");
    }
}

#[test]
fn a_session_that_its_node_released_ended_there() {
    let drained = [(5_000, SessionReleased, "drained: room for others")];
    let story = moved(false, &drained).text(Some(&running_on_n2()), 30_000);
    assert!(story.contains(ENDED_BY_DRAIN), "{story}");
    let story = moved(false, &[]).text(Some(&running_on_n2()), 30_000);
    let part =
        "generation 7 on n1: started at 2026-03-01 12:00:00.000 UTC; no journal shows its end\n";
    assert!(story.contains(part), "{story}");
}

#[test]
fn a_session_whose_node_is_lost_says_that_it_runs_nowhere_and_who_would_take_it() {
    let mut scene = started();
    let mut lost = fleet(SessionOwnership::Lost, "n1", NodeStanding::Fenced);
    lost.refused = vec![
        reason("n2", "is draining"),
        reason("n3", "has its 5 sessions"),
    ];
    lost.unreachable_nodes = vec![reason("n1", "it cannot be connected to")];
    scene.0.fleet = Some(lost);
    let shown = session(7, SessionState::Running, None);
    let story = scene.text(Some(&shown), 60_000);
    for part in [
        "alice is not running: its node n1 was declared dead, and no other started it\n",
        "No node would start it now: n2 (is draining), n3 (has its 5 sessions)\n",
        "Events may be missing, of: n1 (it cannot be connected to)\n",
        "\nIt can be started again once a node takes it.\n`conman nodes`",
    ] {
        assert!(story.contains(part), "{part}: {story}");
    }
    if let Some(fleet) = &mut scene.0.fleet {
        fleet.takers.push("n2".to_owned());
    }
    let story = scene.text(Some(&shown), 60_000);
    assert!(!story.contains("No node would"), "{story}");
    assert!(story.contains("it would start on n2"), "{story}");
    let mut restarts = shown;
    restarts.spec.on_node_loss = OnNodeLoss::Restart;
    let story = scene.text(Some(&restarts), 60_000);
    assert!(story.contains("automatically"), "{story}");
    assert!(!story.contains("conman run"), "{story}");
}

#[test]
fn a_session_whose_node_is_silent_is_not_called_forgotten() {
    let mut scene = Scene::new();
    scene.0.fleet = Some(fleet(SessionOwnership::Owned, "n1", NodeStanding::Silent));
    let story = scene.text(None, 1_000);
    for part in [
        "alice is on n1, which has been silent for a while\n",
        "n1 has not renewed its ownership: what runs there is frozen",
        "\nWait: it continues when its node does",
    ] {
        assert!(story.contains(part), "{part}: {story}");
    }
    let mut scene = Scene::new();
    let mut unknown = fleet(SessionOwnership::Unknown, "n1", NodeStanding::Live);
    unknown.registry_error = Some("etcd did not answer.".to_owned());
    scene.0.fleet = Some(unknown);
    let story = scene.text(None, 1_000);
    assert!(
        story.contains("The registry cannot be asked which node owns it: etcd did not answer.\n"),
        "{story}"
    );
}

#[test]
fn a_session_of_a_drained_node_says_so_and_what_to_do() {
    let scene = started().at(9_000, SessionKilled, "drained: room");
    let drained = ended(
        SessionState::Stopped,
        "drained: room",
        EndCause::Drained,
        None,
    );
    let story = scene.text_with(Some(&drained), Some(NodeState::Draining), 60_000);
    for part in [
        "alice is stopped on n1: its node was drained\n",
        "Reason: drained: room\n",
        "`conman undrain`",
    ] {
        assert!(story.contains(part), "{part}: {story}");
    }
}

#[test]
fn of_very_many_nodes_the_others_are_counted() {
    let mut scene = started();
    let mut released = fleet(SessionOwnership::Released, "n1", NodeStanding::Live);
    released.refused = (1..=7)
        .map(|number| reason(&format!("n{number}"), "is full"))
        .collect();
    scene.0.fleet = Some(released);
    let stopped = ended(SessionState::Stopped, "idle", EndCause::Idle, None);
    let story = scene.text(Some(&stopped), 60_000);
    assert!(story.contains("n5 (is full), 2 more\n"), "{story}");
}

#[test]
fn a_start_is_advised_only_where_a_node_would_accept_it() {
    let shown = ended(SessionState::Stopped, "stopped", EndCause::Preempted, None);
    for (node, remedy) in [
        (NodeState::Preempted, "conman readmit"),
        (NodeState::Draining, "conman undrain"),
        (NodeState::Cordoned, "conman uncordon"),
        (NodeState::Stopping, "Wait"),
        (NodeState::Live, "conman run"),
    ] {
        let told = started().text_with(Some(&shown), Some(node), 9_000);
        assert!(told.contains(remedy), "{node:?}: {told}");
        assert_eq!(
            told.contains("conman run"),
            node == NodeState::Live,
            "{told}"
        );
    }
    let mut scene = started();
    scene.0.fleet = Some(SessionInFleet {
        ownership: SessionOwnership::Released,
        node: Some("n1".to_owned()),
        standing: Some(NodeStanding::Live),
        generation: Some(generation(7)),
        takers: Vec::new(),
        refused: vec![NodeReason {
            node: "n1".to_owned(),
            why: "it is cordoned".to_owned(),
        }],
        unreachable_nodes: Vec::new(),
        registry_error: None,
    });
    let told = scene.text(Some(&shown), 9_000);
    assert!(
        told.contains("conman nodes") && !told.contains("conman run"),
        "{told}"
    );
}
