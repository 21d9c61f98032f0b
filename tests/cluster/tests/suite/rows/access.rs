//! An etcd that asks for certificates or a password, which are replaced while a node runs.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use conman_cluster::{Authority, Cluster, etcd_files, trust_for_etcd};
use conman_e2e::eventually;
use tokio::time::sleep;

use super::fleet::{Fleet, PATIENCE};

/// The first second of the year.
const ENDS_2090: &str = "conman_etcd_certificate_expiry_timestamp_seconds 3786912000";
const ENDS_2092: &str = "conman_etcd_certificate_expiry_timestamp_seconds 3849984000";
const RENEWED: &str = "reloaded the credentials for etcd";
const KEPT: &str = "cannot reload the credentials for etcd; keeping the former content";
/// In which a daemon looks at the files again, and once more.
const LOOKS: Duration = Duration::from_secs(12);

#[tokio::test]
#[ignore = "in acceptance: conman-etcd `tls::a_certificate_is_replaced…`"]
async fn certificates_for_etcd_are_replaced_while_a_node_runs_and_half_written_ones_are_left_alone()
{
    let [former, later] = ["former", "later"].map(Authority::new);
    let (former, later) = (Arc::new(former.expect("one")), later.expect("another"));
    let builder = Cluster::builder().nodes(1).members(1);
    let builder = builder.etcd_certified(&former);
    let Some(mut fleet) = Fleet::shared(builder).await else {
        return;
    };
    let layout = fleet.cluster.layout().clone();
    let host = fleet.node(0).host().clone();
    // etcd reads at its start whom it trusts.
    let trust = |fleet: &Fleet, these: &[&Authority]| {
        let member = &fleet.cluster.members()[0];
        trust_for_etcd(&layout, member.host(), these).expect("written");
        member.kill().expect("killed");
        member.start().expect("started");
    };
    trust(&fleet, &[&former, &later]);
    let generation = fleet.ensure(0, "w").await.generation.get();
    fleet.goes_on("w", generation).await;
    shows(&fleet, ENDS_2090).await;

    // The key of a new pair is there in part, and its certificate is not.
    let [_, _, key] = etcd_files(&layout, &host);
    let whole = fs::read_to_string(&key).expect("readable");
    // At once: every mistake that is found there is told.
    let half = key.with_extension("half");
    fs::write(&half, &whole[..whole.len() / 2]).expect("written");
    fs::rename(&half, &key).expect("renamed");
    let kept = |fleet: &Fleet| fleet.node(0).log().matches(KEPT).count();
    eventually("it is told", PATIENCE, async || kept(&fleet) > 0).await;
    sleep(LOOKS).await;
    assert_eq!(kept(&fleet), 1, "{}", fleet.node(0).log());
    fleet.all_ready().await;
    fleet.goes_on("w", generation).await;

    later
        .certify_for_etcd(&layout, &host, 2_092)
        .expect("written");
    shows(&fleet, ENDS_2092).await;
    // The former one is good for nothing any more.
    trust(&fleet, &[&later]);
    fleet.cluster.leader().await.expect("it answers");
    fleet.all_ready().await;
    fleet.goes_on("w", generation).await;
    assert_eq!(fleet.lives("w").len(), 1, "it was restarted");
    fleet.leaves_nothing().await;
}

#[tokio::test]
#[ignore = "in acceptance: conman-etcd `users::`"]
async fn password_for_etcd_is_replaced_while_a_node_runs() {
    let Some(mut fleet) = Fleet::shared(Cluster::builder().nodes(1).members(1)).await else {
        return;
    };
    let own = fleet.cluster.layout().host_directory("n1");
    let (config, file) = (own.join("conman.toml"), own.join("etcd.password"));
    let write = |password: &str| {
        let partial = file.with_extension("new");
        fs::write(&partial, password).expect("written");
        fs::rename(&partial, &file).expect("renamed");
    };
    fleet.node(0).kill_daemon().expect("killed");
    let member = &fleet.cluster.members()[0];
    member.ask_for_password_of_root("first").expect("it asks");
    write("first\n");
    let text = fs::read_to_string(&config).expect("readable");
    let login = format!(
        "[registry]\nuser = \"root\"\npassword_file = {:?}\n",
        file.display().to_string()
    );
    let text = text.replace("[registry]\n", &login);
    fs::write(&config, text).expect("written");
    fleet.node(0).start().expect("started");
    fleet.all_ready().await;
    let generation = fleet.ensure(0, "w").await.generation.get();
    fleet.goes_on("w", generation).await;

    // Here first: it is let in by what it has, until etcd wants the later one.
    write("second\n");
    eventually("it has read it again", PATIENCE, async || {
        fleet.node(0).log().contains(RENEWED)
    })
    .await;
    fleet.ensure(0, "x").await;
    let member = &fleet.cluster.members()[0];
    let replaced = member.replace_password_of_root("first", "second");
    replaced.expect("replaced");
    fleet.ensure(0, "y").await;
    fleet.goes_on("w", generation).await;
    assert_eq!(fleet.lives("w").len(), 1, "it was restarted");
    fleet.leaves_nothing().await;
}

async fn shows(fleet: &Fleet, gauge: &str) {
    eventually(gauge, PATIENCE, async || {
        let metrics = fleet.node(0).admin().get("/metrics").await.text();
        metrics.contains(gauge)
    })
    .await;
}
