//! Tests of which node starts a session.

use proptest::prelude::*;

use super::*;

fn node(name: &str) -> NodeView {
    NodeView {
        name: name.to_owned(),
        standing: NodeStanding::Live,
        draining: false,
        reachable: true,
        cut_off: false,
        announced_ago_ms: 1_000,
        labels: [("pool".to_owned(), "cpu".to_owned())].into(),
        templates: vec!["python".to_owned()],
        max_sessions: 100,
        runtime: Some(RuntimeKind::Native),
        runtimes: Some([RuntimeKind::Native, RuntimeKind::Docker].into()),
        ailing: BTreeSet::new(),
        load: NodeBusy {
            sessions: 10,
            starting: 0,
            cpu_pressure_percent: 5.0,
            memory_available_bytes: 90 << 30,
            memory_total_bytes: 100 << 30,
        },
    }
}

fn id(text: &str) -> SessionId {
    text.parse().expect(text)
}

fn placed(me: &str, nodes: &[NodeView], session: &str) -> Placement {
    let demand = Demand {
        session: &id(session),
        template: Some("python"),
        runtime: None,
        labels: &BTreeMap::new(),
        memory_bytes: 1 << 30,
        anywhere: false,
    };
    place(me, nodes, demand, &PlacementLimits::default())
}

fn fleet(size: usize) -> Vec<NodeView> {
    (0..size)
        .map(|number| node(&format!("n{number}")))
        .collect()
}

#[test]
fn every_reason_against_a_node_is_told_in_words() {
    let change = |name: &str, change: &dyn Fn(&mut NodeView)| {
        let mut node = node(name);
        change(&mut node);
        node
    };
    let nodes = [
        change("draining", &|node| node.draining = true),
        change("joining", &|node| node.standing = NodeStanding::Joining),
        change("late", &|node| node.standing = NodeStanding::Late),
        change("silent", &|node| node.standing = NodeStanding::Silent),
        change("fenced", &|node| node.standing = NodeStanding::Fenced),
        change("hidden", &|node| node.reachable = false),
        change("apart", &|node| node.cut_off = true),
        change("stale", &|node| node.announced_ago_ms = 20_000),
        change("full", &|node| node.load.sessions = 100),
        change("bare", &|node| node.templates.clear()),
        change("tight", &|node| node.load.memory_available_bytes = 5 << 30),
        change("busy", &|node| node.load.cpu_pressure_percent = 95.0),
        change("broken", &|node| node.ailing = [RuntimeKind::Native].into()),
        change("good", &|_| {}),
    ];
    let placement = placed("other", &nodes, "alice");
    assert_eq!(placement.candidates, ["good"]);
    let told: Vec<String> = placement
        .refused
        .iter()
        .map(|refused| format!("{} {}", refused.node, refused.why))
        .collect();
    assert_eq!(
        told,
        [
            "draining is draining",
            "joining has not joined the fleet yet",
            "late is late to renew its ownership",
            "silent has not been heard from for a while",
            "fenced is fenced",
            "hidden has announced no `listen.peers`",
            "apart does not reach most of the other nodes",
            "stale announced itself 20 s ago",
            "full has its 100 sessions (limits.max_sessions)",
            "bare has no template `python`",
            "tight has only 5120 MiB of memory left",
            "busy has tasks that wait for a CPU 95 % of the time",
            "broken has a native runtime that failed its last check",
        ]
    );
}

#[test]
fn a_node_whose_runtime_ails_is_asked_for_what_needs_that_one_when_no_other_is_left() {
    let mut broken = node("broken");
    broken.ailing = [RuntimeKind::Native].into();
    broken.load.sessions = 0;
    let mut pressed = node("pressed");
    pressed.load.cpu_pressure_percent = 95.0;
    let asked = |nodes: &[NodeView], runtime| {
        let demand = Demand {
            session: &id("alice"),
            template: None,
            runtime,
            labels: &BTreeMap::new(),
            memory_bytes: 0,
            anywhere: false,
        };
        place("broken", nodes, demand, &PlacementLimits::default()).candidates
    };
    let both = [broken, pressed];
    for runtime in [None, Some(RuntimeKind::Native)] {
        assert_eq!(asked(&both, runtime), ["pressed"]);
        assert_eq!(asked(&both[..1], runtime), ["broken"]);
    }
    assert_eq!(asked(&both, Some(RuntimeKind::Docker)), ["broken"]);
}

#[test]
fn a_node_without_the_runtime_is_asked_only_when_no_other_is_left() {
    let mut without = node("without");
    without.runtimes = Some([RuntimeKind::Docker].into());
    without.load.sessions = 0;
    let mut full = node("full");
    full.load.sessions = 100;
    let mut older = node("older");
    older.runtimes = None;
    older.load.sessions = 50;
    let mut ailing = node("ailing");
    ailing.ailing = [RuntimeKind::Native].into();
    let asked = |nodes: &[&NodeView], runtime| {
        let demand = Demand {
            session: &id("alice"),
            template: None,
            runtime,
            labels: &BTreeMap::new(),
            memory_bytes: 0,
            anywhere: false,
        };
        let nodes: Vec<NodeView> = nodes.iter().map(|node| (*node).clone()).collect();
        place("without", &nodes, demand, &PlacementLimits::default())
    };
    let native = Some(RuntimeKind::Native);
    // A node that does not announce it may have it.
    let placement = asked(&[&without, &older], native);
    assert_eq!(placement.candidates, ["older"]);
    assert_eq!(placement.second, ["without"]);
    let placement = asked(&[&without, &ailing, &full], native);
    assert_eq!(placement.candidates, ["ailing"]);
    // Whether waiting may help.
    for (others, elsewhere) in [(&[&without, &full][..], true), (&[&without], false)] {
        let placement = asked(others, native);
        assert_eq!(placement.candidates, ["without"]);
        assert_eq!(placement.runtime_elsewhere, elsewhere);
        assert_eq!(
            placement.refused[0].why.to_string(),
            "has no native runtime, only docker"
        );
    }
    full.runtimes = Some([RuntimeKind::Docker].into());
    assert!(!asked(&[&without, &full], native).runtime_elsewhere);
    for runtime in [None, Some(RuntimeKind::Docker)] {
        let placement = asked(&[&without, &older], runtime);
        assert_eq!(placement.candidates, ["without", "older"]);
    }
}

#[test]
fn a_node_must_have_every_label_that_is_asked_for() {
    let mut gpu = node("gpu");
    gpu.labels.insert("pool".to_owned(), "gpu".to_owned());
    gpu.labels.insert("zone".to_owned(), "a".to_owned());
    let labels = [("pool", "gpu"), ("zone", "a")]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into();
    let demand = Demand {
        session: &id("alice"),
        template: None,
        runtime: None,
        labels: &labels,
        memory_bytes: 0,
        anywhere: false,
    };
    let placement = place(
        "cpu",
        &[node("cpu"), gpu],
        demand,
        &PlacementLimits::default(),
    );
    assert_eq!(placement.candidates, ["gpu"]);
    assert_eq!(
        placement.refused[0].why.to_string(),
        "has `pool = cpu`, not `gpu`"
    );
}

#[test]
fn what_a_node_knows_of_itself_is_never_old_and_needs_no_listener() {
    let mut me = node("me");
    me.announced_ago_ms = u64::MAX;
    me.reachable = false;
    assert_eq!(placed("me", &[me], "alice").candidates, ["me"]);
}

#[test]
fn a_node_under_pressure_is_better_than_none() {
    let mut nodes = fleet(2);
    for node in &mut nodes {
        node.load.cpu_pressure_percent = 99.0;
    }
    nodes[1].draining = true;
    let placement = placed("n1", &nodes, "alice");
    assert_eq!(placement.candidates, ["n0"]);
    assert_eq!(placement.refused.len(), 2);
}

#[test]
fn a_node_of_unknown_memory_is_not_refused_for_it() {
    let mut nodes = fleet(1);
    nodes[0].load.memory_available_bytes = 0;
    nodes[0].load.memory_total_bytes = 0;
    assert_eq!(placed("n1", &nodes, "alice").candidates, ["n0"]);
}

#[test]
fn the_node_that_is_asked_is_preferred_until_it_has_clearly_more_to_do() {
    let mut nodes = fleet(8);
    nodes[3].load.sessions = 15;
    for number in 0..100 {
        let placement = placed("n3", &nodes, &format!("s{number}"));
        assert_eq!(placement.candidates[0], "n3");
    }
    nodes[3].load.sessions = 60;
    for number in 0..100 {
        let placement = placed("n3", &nodes, &format!("s{number}"));
        assert_ne!(placement.candidates[0], "n3");
    }
}

/// Three entry nodes that are full place 3,000 sessions by the same data.
#[test]
fn nodes_that_know_the_same_do_not_all_choose_the_one_with_the_least_to_do() {
    let mut nodes = fleet(8);
    for node in &mut nodes[1..] {
        node.load.sessions = 40;
    }
    let mut chosen = BTreeMap::<String, u32>::new();
    for number in 0..3_000 {
        let placement = placed("entry", &nodes, &format!("s{number}"));
        *chosen.entry(placement.candidates[0].clone()).or_default() += 1;
    }
    // The better of two among eight: the least busy one gets a quarter, the others share the rest.
    assert_eq!(chosen.len(), 8);
    assert!((600..=900).contains(&chosen["n0"]), "{chosen:?}");
    for (node, count) in chosen.iter().filter(|(node, _)| *node != "n0") {
        assert!((200..=450).contains(count), "{node}: {chosen:?}");
    }
}

/// Each entry node has data of a different age, with a different pressure for every node.
#[test]
fn pressure_that_never_stands_still_changes_no_choice_and_does_not_gather_sessions() {
    let nodes = fleet(4);
    let mut chosen = BTreeMap::<String, u32>::new();
    for number in 0..2_000 {
        let session = format!("s{number}");
        let quiet = placed("entry", &nodes, &session);
        for entry in 0..5_usize {
            let mut news = nodes.clone();
            for (place, node) in news.iter_mut().enumerate() {
                // From 2 to 14 percent, for each node at another time.
                let step = (number + 3 * entry + 5 * place) % 7;
                node.load.cpu_pressure_percent = 2.0 * (step + 1) as f64;
            }
            assert_eq!(placed("entry", &news, &session), quiet, "{session}");
        }
        *chosen.entry(quiet.candidates[0].clone()).or_default() += 1;
    }
    for count in chosen.values() {
        assert!((400..=600).contains(count), "{chosen:?}");
    }
}

#[test]
fn a_node_that_clearly_has_more_to_do_is_the_first_of_no_pair() {
    let mut nodes = fleet(2);
    nodes[0].load.cpu_pressure_percent = 60.0;
    for number in 0..100 {
        let placement = placed("entry", &nodes, &format!("s{number}"));
        assert_eq!(placement.candidates, ["n1", "n0"]);
    }
}

#[test]
fn entry_nodes_that_know_the_same_choose_the_same_for_one_session() {
    let nodes = fleet(5);
    for number in 0..100 {
        let session = format!("s{number}");
        let one = placed("entry-1", &nodes, &session);
        assert_eq!(one, placed("entry-2", &nodes, &session));
        let mut turned = nodes.clone();
        turned.reverse();
        assert_eq!(
            one.candidates,
            placed("entry-1", &turned, &session).candidates
        );
    }
}

prop_compose! {
    fn any_node(number: usize)(
        standing in prop_oneof![
            4 => Just(NodeStanding::Live),
            1 => Just(NodeStanding::Late),
            1 => Just(NodeStanding::Fenced),
        ],
        draining in prop::bool::weighted(0.2),
        announced_ago_ms in 0_u64..20_000,
        sessions in 0_u32..120,
        starting in 0_u32..10,
        cpu_pressure_percent in 0.0..100.0_f64,
        memory_available_bytes in 0_u64..100,
        memory_total_bytes in prop_oneof![Just(0_u64), Just(100)],
        runtime_ails in prop::bool::weighted(0.2),
    ) -> NodeView {
        NodeView {
            ailing: runtime_ails.then_some(RuntimeKind::Native).into_iter().collect(),
            standing,
            draining,
            announced_ago_ms,
            load: NodeBusy {
                sessions,
                starting,
                cpu_pressure_percent,
                memory_available_bytes: memory_available_bytes << 30,
                memory_total_bytes: memory_total_bytes << 30,
            },
            ..node(&format!("n{number}"))
        }
    }
}

fn any_fleet() -> impl Strategy<Value = Vec<NodeView>> {
    (0_usize..9).prop_flat_map(|size| (0..size).map(any_node).collect::<Vec<_>>())
}

proptest! {
    #[test]
    fn every_node_is_a_candidate_or_refused_and_no_unfit_one_is_a_candidate(
        nodes in any_fleet(),
        session in "[a-z][a-z0-9]{0,20}",
    ) {
        let placement = placed("n0", &nodes, &session);
        let is = |node: &NodeView, which: fn(&Unfit) -> bool| {
            let mut refused = placement.refused.iter();
            refused.any(|refused| refused.node == node.name && which(&refused.why))
        };
        let only_refused = nodes.iter().all(|node| is(node, |_| true));
        let any_pressed = nodes
            .iter()
            .any(|node| is(node, |why| matches!(why, Unfit::Pressure { .. })));
        for node in &nodes {
            let among = |names: &[String]| names.iter().filter(|name| **name == node.name).count();
            let times = among(&placement.candidates);
            let refused = placement.refused.iter().find(|refused| refused.node == node.name);
            match refused.map(|refused| &refused.why) {
                None => prop_assert_eq!(times, 1),
                Some(Unfit::Pressure { .. }) => prop_assert_eq!(times, usize::from(only_refused)),
                Some(Unfit::Runtime { .. }) => {
                    prop_assert_eq!(times, usize::from(only_refused && !any_pressed));
                }
                Some(_) => prop_assert_eq!(times, 0),
            }
            let may = refused.is_none_or(|refused| {
                matches!(refused.why, Unfit::Pressure { .. } | Unfit::Runtime { .. })
            });
            prop_assert_eq!(times + among(&placement.second), usize::from(may));
        }
    }

    #[test]
    fn the_first_candidate_never_has_the_most_to_do(
        nodes in any_fleet(),
        session in "[a-z][a-z0-9]{0,20}",
    ) {
        let placement = placed("entry", &nodes, &session);
        let busy = |name: &String| {
            let node = nodes.iter().find(|node| node.name == *name);
            node.map(busyness).unwrap_or_default()
        };
        if placement.candidates.len() >= 2 {
            let first = busy(&placement.candidates[0]);
            let most = placement.candidates[1..].iter().map(busy).fold(0.0, f64::max);
            prop_assert!(first <= most + NEAR_TIE);
        }
    }
}

fn sized(name: &str, sessions: u32, max_sessions: u32) -> NodeView {
    let mut sized = node(name);
    sized.max_sessions = max_sessions;
    sized.load.sessions = sessions;
    sized
}

#[test]
fn a_node_that_has_joined_gets_what_is_placed_anywhere_until_it_has_its_share() {
    // All have much room.
    let mut nodes = vec![
        sized("old", 60, 1_000),
        sized("older", 60, 1_000),
        sized("new", 0, 1_000),
    ];
    let first = |nodes: &[NodeView], number: u32, anywhere| {
        let demand = Demand {
            session: &id(&format!("s{number}")),
            template: Some("python"),
            runtime: None,
            labels: &BTreeMap::new(),
            memory_bytes: 1 << 30,
            anywhere,
        };
        let mut placed = place("old", nodes, demand, &PlacementLimits::default());
        placed.candidates.remove(0)
    };
    for number in 0..60 {
        assert_eq!(first(&nodes, number, false), "old", "it was requested");
        let chosen = first(&nodes, number, true);
        let chosen = nodes.iter_mut().find(|node| node.name == chosen);
        chosen.expect("one of them").load.sessions += 1;
    }
    let share = nodes[2].load.sessions;
    assert!((28..=60).contains(&share), "{share} of 60");
    // A node that computes is no better than one with more sessions.
    nodes[2].load.cpu_pressure_percent = 60.0;
    nodes[2].load.sessions = 0;
    assert_eq!(first(&nodes[1..], 0, true), "older");
}

#[test]
fn the_excess_of_a_node_is_beyond_its_share_of_those_that_take_sessions() {
    let mut nodes = [sized("a", 90, 100), sized("b", 30, 100), sized("c", 0, 200)];
    let excess = |nodes: &[NodeView], me| super::excess(me, nodes, &PlacementLimits::default());
    assert_eq!(["a", "b", "c"].map(|me| excess(&nodes, me)), [60, 0, 0]);
    nodes[2].draining = true;
    assert_eq!(excess(&nodes, "a"), 30);
    nodes[1].standing = NodeStanding::Silent;
    assert_eq!(excess(&nodes, "a"), 0, "nobody could take them");
    assert_eq!(excess(&nodes, "nosuch"), 0);
    let odd = [sized("a", 8, 100), sized("b", 7, 100)];
    assert_eq!(excess(&odd, "a"), 0, "a half is nothing to move");
}
