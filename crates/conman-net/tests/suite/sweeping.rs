//! Removal of links, addresses and rules.

use std::time::{Duration, Instant};

use conman_net::Plane;
use conman_proto::Bandwidth;

use super::connecting::{plane, plane_with};
use super::namespace::Host;

/// Far longer than a namespace takes to die.
const PATIENCE: Duration = Duration::from_secs(20);

async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < PATIENCE, "{what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn connected(plane: &Plane, owner: &str) -> (Host, conman_net::Addresses) {
    let session = Host::new();
    let addresses = plane.take(owner).expect("free");
    plane
        .connect(
            owner,
            addresses,
            7,
            Bandwidth::default(),
            session.namespace(),
        )
        .await
        .expect("connected");
    (session, addresses)
}

#[tokio::test]
async fn an_address_returns_when_the_kernel_has_removed_its_link() {
    let host = Host::new();
    let plane = plane(&host, &["10.88.0.0/30"]);
    let (first, addresses) = connected(&plane, "a").await;
    let (_second, _) = connected(&plane, "b").await;
    plane.leave("a", addresses).await;
    plane
        .take("c")
        .expect_err("the link exists, although its owner has ended");
    drop(first);
    eventually("the address is free", || plane.take("c").is_ok()).await;
}

#[tokio::test]
async fn an_address_whose_link_never_existed_returns_at_once() {
    let host = Host::new();
    let plane = plane(&host, &["10.88.0.0/30"]);
    let addresses = plane.take("a").expect("free");
    plane.take("b").expect("free");
    plane.leave("a", addresses).await;
    assert_eq!(plane.take("c"), Ok(addresses));
}

#[tokio::test]
async fn a_sweep_removes_what_a_crash_left_and_nothing_of_others() {
    let host = Host::new();
    let earlier = plane(&host, &["10.88.0.0/16"]);
    let (_orphan, _) = connected(&earlier, "crashed").await;
    let (_kept, kept) = connected(&earlier, "kept").await;
    drop(earlier);
    host.shell("ip link add c0a1b2c3x type veth peer name c0a1b2c3y");
    // In the group in which sweeps delete.
    host.shell("ip link set c0a1b2c3x group 1279066112");
    let later = plane(&host, &["10.88.0.0/16"]);
    later.adopt("kept", kept);
    let links = || host.links().len();
    assert_eq!(links(), 4);
    tokio::select! {
        () = later.sweep() => {}
        () = eventually("the orphan is gone", || links() == 3) => {}
    }
    let (_new, new) = connected(&later, "new").await;
    assert_ne!(new, kept);
    assert!(host.links().iter().any(|name| name == "c0a1b2c3x"));
}

#[tokio::test]
async fn a_link_that_a_pinned_namespace_keeps_is_swept_after_its_owner() {
    let host = Host::new();
    let plane = plane(&host, &["10.88.0.0/30"]);
    let (pinned, addresses) = connected(&plane, "a").await;
    let (_second, _) = connected(&plane, "b").await;
    plane.leave("a", addresses).await;
    tokio::select! {
        () = plane.sweep() => {}
        () = eventually("the address is free", || plane.take("c").is_ok()) => {}
    }
    assert_eq!((pinned.links().len(), host.links().len()), (0, 1));
}

/// Row 28 of the fault matrix.
#[tokio::test]
async fn row_28_lost_notifications_lose_no_address() {
    let host = Host::new();
    // The kernel's smallest buffer: one notification fits.
    let plane = plane_with(&host, &["10.88.0.0/22"], 1);
    let mut sessions = Vec::new();
    for number in 0..200 {
        sessions.push(connected(&plane, &format!("s{number}")).await);
    }
    for (number, (_, addresses)) in sessions.iter().enumerate() {
        plane.leave(&format!("s{number}"), *addresses).await;
    }
    assert_eq!(plane.leaving(), sessions.len());
    sessions.clear();
    eventually("every link is gone", || host.links().is_empty()).await;
    tokio::select! {
        () = plane.sweep() => {}
        () = eventually("every address is free", || plane.leaving() == 0) => {}
    }
    let drops = host.run(|| {
        let sockets = std::fs::read_to_string("/proc/thread-self/net/netlink").expect("readable");
        let drops = sockets
            .lines()
            .skip(1)
            .filter_map(|line| line.split_whitespace().nth(8));
        drops
            .filter_map(|drops| drops.parse::<u64>().ok())
            .sum::<u64>()
    });
    assert!(drops > 0, "no notification was lost, so nothing was tried");
}
