//! The clusters themselves: what they consist of, that faults are faults, and that nothing is left.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use conman_cluster::overlap::DOCKERS;
use conman_cluster::{Cluster, Cut, Host, Node, has_docker, leftovers, people};
use conman_cluster::{requirements, sweep};
use conman_e2e::eventually;
use serde_json::json;

const WITNESS: &str = env!("CARGO_BIN_EXE_witness");
const PATIENCE: Duration = Duration::from_secs(60);

/// Has a session run, on a machine where anything may take its time.
async fn ensured(node: &Node, id: &str, template: &str) {
    let path = format!("/v1/sessions/{id}");
    eventually("it serves", PATIENCE, async || {
        let answer = node.api().put(&path, &json!({"template": template})).await;
        answer.status.is_success()
    })
    .await;
}

#[tokio::test]
async fn a_cluster_serves_sessions_survives_its_members_and_leaves_nothing() {
    let Some(ready) = requirements() else { return };
    let builder = Cluster::builder().nodes(2).members(3);
    let cluster = Cluster::start(&builder, &ready, Path::new(WITNESS)).await;
    let cluster = cluster.expect("a cluster");
    for node in cluster.nodes() {
        let holdings = |node: &Node| node.holdings().expect("what it has");
        let before: Vec<_> = cluster.nodes().iter().map(holdings).collect();
        let id = format!("on-{}", node.name());
        ensured(node, &id, "web").await;
        let page = node.sessions().get(&format!("/s/{id}/")).await;
        assert_eq!(page.text(), "hello\n");
        // The other node, where that one has more processor time to give.
        let session = node.api().get(&format!("/v1/sessions/{id}")).await.json();
        let owns = |one: &Node| session["node"] == one.name();
        let owner = cluster.nodes().iter().position(owns).expect("an owner");
        let beyond = holdings(&cluster.nodes()[owner]).beyond(&before[owner]);
        for of_a_session in ["cgroup", "pidfd"] {
            let is_seen = beyond.iter().any(|one| one.contains(of_a_session));
            assert!(is_seen, "{of_a_session}: {beyond:?}");
        }
    }
    let leader = cluster.leader().await.expect("one leads");
    cluster.members()[leader].kill().expect("killed");
    let next = cluster.leader().await.expect("another leads");
    assert_ne!(next, leader);
    cluster.members()[leader].start().expect("started");

    let layout = cluster.layout().clone();
    assert_ne!(leftovers(&layout), []);
    drop(cluster);
    assert_eq!(leftovers(&layout), []);
}

#[tokio::test]
async fn a_cut_loses_what_one_host_sends_to_another_until_it_is_healed() {
    let Some(ready) = requirements() else { return };
    let builder = Cluster::builder().nodes(1).members(3);
    let cluster = Cluster::start(&builder, &ready, Path::new(WITNESS)).await;
    let cluster = cluster.expect("a cluster");
    let leader = cluster.leader().await.expect("one leads");
    // Votes are lost on the way to it, so that it steps down.
    for (index, member) in cluster.members().iter().enumerate() {
        if index != leader {
            let cut = Cut::OneWay {
                from: member.host().clone(),
                to: cluster.members()[leader].host().clone(),
            };
            cluster.cut(&cut).expect("cut");
        }
    }
    eventually("another one leads", PATIENCE, async || {
        cluster.leader().await.expect("one leads") != leader
    })
    .await;
    cluster.heal().expect("healed");
    let member = &cluster.members()[leader];
    eventually("the old leader follows", PATIENCE, async || {
        member.leads().await == Some(false)
    })
    .await;
}

/// Whether a request of one host to another's etcd is answered.
fn reaches(cluster: &Cluster, from: &Host, to: &Host) -> bool {
    let url = format!("http://{}/health", to.etcd());
    let words = ["curl", "--silent", "--max-time", "1", "--output", "-", &url];
    let curl = people::command(cluster.layout(), &from.name, &words.map(str::to_owned));
    let output = curl.expect("a host").output().expect("curl runs");
    output.status.success()
}

#[tokio::test]
async fn a_cut_that_is_mended_leaves_those_that_overlap_it_and_all_others() {
    let Some(ready) = requirements() else { return };
    let builder = Cluster::builder().nodes(1).members(3);
    let cluster = Cluster::start(&builder, &ready, Path::new(WITNESS)).await;
    let cluster = cluster.expect("a cluster");
    let node = cluster.nodes()[0].host();
    let [one, two] = [0, 1].map(|member| cluster.members()[member].host());
    let cuts = [
        Cut::Between(node.clone(), one.clone()),
        Cut::Between(one.clone(), node.clone()),
        Cut::Between(node.clone(), two.clone()),
    ];
    for cut in &cuts {
        cluster.cut(cut).expect("cut");
    }
    // The first member is cut off twice.
    for (cut, reached) in cuts
        .iter()
        .zip([[false, false], [true, false], [true, true]])
    {
        cluster.mend(cut).expect("mended");
        for (member, reached) in [one, two].into_iter().zip(reached) {
            if reached {
                let what = format!("{} is reached", member.name);
                eventually(&what, PATIENCE, async || reaches(&cluster, node, member)).await;
            } else {
                assert!(!reaches(&cluster, node, member), "{}", member.name);
            }
        }
    }
}

#[tokio::test]
async fn one_answer_can_be_lost_while_what_comes_next_arrives() {
    let Some(ready) = requirements() else { return };
    let builder = Cluster::builder().nodes(1).members(3);
    let cluster = Cluster::start(&builder, &ready, Path::new(WITNESS)).await;
    let cluster = cluster.expect("a cluster");
    // Members ask each other nothing by the port of clients.
    let [from, to] = [0, 1].map(|member| cluster.members()[member].host());
    let cut = Cut::Reply {
        from: from.clone(),
        to: to.clone(),
        port: from.etcd().port(),
    };
    cluster.cut(&cut).expect("cut");
    assert!(!reaches(&cluster, to, from));
    eventually("the next one arrives", PATIENCE, async || {
        reaches(&cluster, to, from)
    })
    .await;
}

#[tokio::test]
async fn a_node_that_is_lost_runs_nothing_and_comes_back() {
    let Some(ready) = requirements() else { return };
    let builder = Cluster::builder().nodes(1);
    let cluster = Cluster::start(&builder, &ready, Path::new(WITNESS)).await;
    let cluster = cluster.expect("a cluster");
    let node = &cluster.nodes()[0];
    ensured(node, "s", "idle").await;
    assert_ne!(node.session_processes(), []);
    node.lose().expect("lost");
    assert_eq!(
        (node.session_processes(), node.shim_pids()),
        (vec![], vec![])
    );
    node.start().expect("started");
    node.wait_ready().await.expect("ready");
    ensured(node, "t", "idle").await;
}

#[tokio::test]
async fn the_cluster_of_a_dead_process_is_swept() {
    let Some(ready) = requirements() else { return };
    let builder = Cluster::builder().nodes(1).members(1);
    let cluster = Cluster::start(&builder, &ready, Path::new(WITNESS)).await;
    let cluster = cluster.expect("a cluster");
    ensured(&cluster.nodes()[0], "s", "idle").await;
    let mut layout = cluster.layout().clone();
    sweep().expect("swept");
    assert_ne!(leftovers(&layout), []);
    // As if another process had made it that is no more.
    let owner = layout.owner.as_mut().expect("a test's has an owner");
    owner.start_time_ticks -= 1;
    layout.save().expect("saved");
    // By two who come at the same time.
    let [one, other] = [(), ()].map(|()| std::thread::spawn(sweep));
    for sweeping in [one, other] {
        sweeping.join().expect("it ends").expect("swept");
    }
    assert_eq!(leftovers(&layout), []);
}

/// A process that looks like a shim of a Docker that is not the cluster's; it ends with this.
struct OtherShim(Child);

impl OtherShim {
    fn start(address: &str) -> Self {
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("containerd-shim-of-another");
        conman_e2e::copy_program(Path::new("/bin/sh"), &program);
        let mut command = Command::new(program);
        // Its input does not come.
        command.args(["-c", "read -r _", "shim", "-address", address]);
        Self(command.stdin(Stdio::piped()).spawn().expect("it runs"))
    }
}

impl Drop for OtherShim {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
#[ignore = "in acceptance: a Docker Engine of its own"]
async fn what_a_clusters_docker_has_lost_sight_of_goes_and_anothers_stays() {
    if !has_docker() {
        return;
    }
    let Some(ready) = requirements() else { return };
    let builder = Cluster::builder().nodes(1).members(1).docker_too();
    let cluster = Cluster::start(&builder, &ready, Path::new(WITNESS)).await;
    let cluster = cluster.expect("a cluster");
    ensured(&cluster.nodes()[0], "s", DOCKERS).await;
    let layout = cluster.layout().clone();
    let elsewhere = format!("{}-too/docker/containerd.sock", layout.directory.display());
    let mut other = OtherShim::start(&elsewhere);
    cluster.kill_docker().expect("killed");
    // So that none is started again, which would know its containers.
    let socket = layout.directory.join("docker/docker.sock");
    std::fs::remove_file(socket).expect("removed");
    let shims = |layout| {
        let all = leftovers(layout).into_iter();
        all.filter(|one| one.0.contains("a shim of Docker's"))
            .count()
    };
    assert_eq!(shims(&layout), 1);
    drop(cluster);
    assert_eq!(leftovers(&layout), []);
    let ended = other.0.try_wait().expect("looked after");
    assert_eq!(ended, None, "it is not the cluster's");
}
