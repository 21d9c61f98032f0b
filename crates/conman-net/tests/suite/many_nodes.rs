//! A fabric of a hundred nodes, on the real kernel: what a join writes.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::Ipv6Addr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use conman_core::ownership::Underlay;
use conman_net::{FabricKind, RemotePart};
use conman_observer::slowness;

use super::fabric::{VXLAN, hosts, open, options, pool};
use super::namespace::Host;

/// A join is routed within this time on a usual machine.
const ROUTED_WITHIN: Duration = Duration::from_secs(1);

/// Nodes besides this one. The last one joins.
const OTHERS: u32 = 100;

/// Prints changes of routes and neighbours of a host.
struct Monitor {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Monitor {
    fn start(host: &Host) -> Self {
        let mut child = host.run(|| {
            let mut command = Command::new("ip");
            command.args(["-o", "monitor", "route", "neigh"]);
            command.stdout(Stdio::piped()).spawn().expect("ip runs")
        });
        let stdout = child.stdout.take().expect("piped");
        // Its socket is listed with the groups that it has joined.
        let path = format!("/proc/{}/net/netlink", child.id());
        let listens = |line: &str| {
            let mut words = line.split_whitespace().skip(2);
            let (owner, groups) = (words.next(), words.next());
            owner == Some(&child.id().to_string())
                && groups.is_some_and(|groups| groups != "00000000")
        };
        while !fs::read_to_string(&path)
            .expect("it lives")
            .lines()
            .any(listens)
        {
            std::thread::yield_now();
        }
        let lines = BufReader::new(stdout).lines();
        Self { child, lines }
    }

    /// What it has printed up to now.
    fn lines(&mut self, host: &Host) -> Vec<String> {
        host.shell("ip route add blackhole 198.51.100.0/24");
        let lines = self.lines.by_ref().map(|line| line.expect("readable"));
        let lines = lines.take_while(|line| !line.contains("198.51.100.0/24"));
        // Whatever else the interfaces need between each other is not the fabric's.
        let of_fabric = |line: &String| {
            ["10.96.", "fd00:96:", "192.0.2.", "PERMANENT"]
                .iter()
                .any(|of| line.contains(of))
        };
        lines.filter(of_fabric).collect()
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn remote(kind: FabricKind, number: u32) -> RemotePart {
    let last = u8::try_from(100 + number).expect("small");
    RemotePart {
        networks: pool().part(number, 24),
        underlay: Underlay {
            v4: Some([192, 0, 2, last].into()),
            v6: Some(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last.into())),
            mac: [0x02, 0x63, 192, 0, 2, last],
            mtu: if kind == FabricKind::HostGateway {
                1_500
            } else {
                1_450
            },
        },
    }
}

async fn a_join_among_many(kind: FabricKind) {
    let [host, _other] = hosts();
    let fabric = open(&host, options(kind, 1)).await.expect("a fabric");
    let parts: Vec<RemotePart> = (2..2 + OTHERS).map(|number| remote(kind, number)).collect();
    let (_, before) = parts.split_last().expect("many");
    let faults = fabric.apply(before).await.expect("applied");
    assert!(faults.is_empty(), "{faults:?}");
    // A process that stands still for a while is late once.
    let mut took = Duration::MAX;
    for _ in 0..3 {
        let begun = Instant::now();
        let faults = fabric.apply(&parts).await.expect("applied");
        took = took.min(begun.elapsed());
        assert!(faults.is_empty(), "{faults:?}");
        fabric.apply(before).await.expect("applied");
    }
    assert!(took < ROUTED_WITHIN * slowness(), "{took:?}");
    let mut monitor = Monitor::start(&host);
    let faults = fabric.apply(&parts).await.expect("applied");
    assert!(faults.is_empty(), "{faults:?}");
    let count = usize::try_from(OTHERS).expect("small");
    for (family, new) in [("-4", "10.96.101.0/24"), ("-6", "fd00:96::6500/120")] {
        let routes = host.shell(&format!("ip {family} route show proto 119"));
        assert_eq!(routes.lines().count(), count + 1, "and the pool: {routes}");
        assert!(routes.contains(new), "{routes}");
    }
    let lines = monitor.lines(&host);
    // Its two networks, and its address.
    let of_new = |line: &String| {
        ["10.96.101.0", "fd00:96::6500", "192.0.2.201"]
            .iter()
            .any(|new| line.contains(new))
    };
    assert!(!lines.is_empty(), "the join is seen");
    assert!(lines.iter().all(of_new), "of the new node alone: {lines:?}");
    // The same parts again, as after any change elsewhere: nothing is written.
    host.shell("ip route delete blackhole 198.51.100.0/24");
    let mut monitor = Monitor::start(&host);
    fabric.apply(&parts).await.expect("applied");
    let lines = monitor.lines(&host);
    assert_eq!(lines, [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn among_a_hundred_nodes_a_join_writes_the_routes_of_the_new_one_alone() {
    a_join_among_many(FabricKind::HostGateway).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn among_a_hundred_nodes_a_join_over_vxlan_writes_the_entries_of_the_new_one_alone() {
    a_join_among_many(VXLAN).await;
}
