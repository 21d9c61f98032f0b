//! Tests of the netlink messages for interfaces of the host.

use std::fs::File;
use std::thread;

use conman_linux::{Namespaces, unshare_namespaces};
use netlink_packet_core::{NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NetlinkHeader, NetlinkMessage};

use super::*;
use crate::netlink::open_netlink;

fn new_link(to: &str) -> NewLink {
    NewLink {
        to: to.parse().expect("a link"),
        name: None,
        addresses: vec!["192.168.7.2/24".parse().expect("an address")],
        routes: vec![NewRoute {
            destination: "10.9.0.0/16".parse().expect("a network"),
            gateway: Some("192.168.7.1".parse().expect("an address")),
        }],
        sole: Some(Ipv4Addr::new(1, 2, 3, 4)),
        bandwidth: Bandwidth::default(),
    }
}

fn parent() -> FoundLink {
    FoundLink {
        index: 3,
        mtu: 1_500,
        ..FoundLink::default()
    }
}

/// Message and header but for the sequence number, which the kernel does not look into.
fn bytes(message: RouteNetlinkMessage) -> Vec<u8> {
    let mut header = NetlinkHeader::default();
    header.flags = 1 | NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL;
    let mut message = NetlinkMessage::new(header, message.into());
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}

/// Captured with `strace -e write=3 ip link add link IB0 name eth7 netns NAME group 1128464384 type ipoib`
/// (iproute2 6.1), where IB0 is interface 3 and the namespace file 4; likewise with `address
/// 02:63:01:02:03:04 type macvlan mode private`.
#[test]
fn the_messages_for_links_are_those_of_ip_link() {
    #[rustfmt::skip]
    let common = [
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        8, 0, 0x1c, 0, 4, 0, 0, 0, 8, 0, 0x1b, 0, 0, 0, 0x43, 0x43,
    ];
    let beginning = |length: u8| [length, 0, 0, 0, 0x10, 0, 5, 6, 0, 0, 0, 0, 0, 0, 0, 0];
    let link_and_name = *b"\x08\0\x05\0\x03\0\0\0\x09\0\x03\0eth7\0\0\0\0";
    let ipoib = [
        &beginning(0x54)[..],
        &common,
        &link_and_name,
        b"\x10\0\x12\0\x09\0\x01\0ipoib\0\0\0",
    ];
    // The crate counts the zero behind the kind, which `ip` leaves to the padding.
    let captured = |parts: &[&[u8]], kind: usize| {
        let mut captured = parts.concat();
        captured[kind] += 1;
        captured
    };
    let sent = bytes(new_link("ipoib:ib0").creation("eth7", &parent(), 4));
    assert_eq!(sent, captured(&ipoib, 0x48));
    let macvlan = [
        &beginning(0x6c)[..],
        &common,
        b"\x0a\0\x01\0\x02\x63\x01\x02\x03\x04\0\0",
        &link_and_name,
        b"\x1c\0\x12\0\x0b\0\x01\0macvlan\0\x0c\0\x02\0\x08\0\x01\0\x01\0\0\0",
    ];
    let sent = bytes(new_link("macvlan:eth1").creation("eth7", &parent(), 4));
    assert_eq!(sent, captured(&macvlan, 0x54));
}

fn in_new_namespace<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> T {
    let thread = thread::spawn(|| {
        unshare_namespaces(Namespaces::NEWNET).expect("a namespace; this needs root");
        run()
    });
    thread.join().expect("no panic in the namespace")
}

fn session() -> impl Fn() -> Namespace {
    let namespace = in_new_namespace(|| Namespace {
        file: File::open("/proc/thread-self/ns/net")
            .expect("opened")
            .into(),
        socket: open_netlink(None, 0).expect("a socket"),
    });
    move || Namespace {
        file: namespace.file.try_clone().expect("cloned"),
        socket: namespace.socket.try_clone().expect("cloned"),
    }
}

#[test]
fn a_crash_between_any_two_messages_leaves_nothing_after_a_sweep() {
    in_new_namespace(|| {
        let script = "ip link add eth1 type veth peer name eth2 && ip link set eth1 up && \
                      ip link set eth2 up && ip link add br0 type bridge && ip link set br0 up";
        let made = std::process::Command::new("sh")
            .args(["-c", script])
            .status();
        assert!(made.expect("it runs").success());
        for to in ["macvlan:eth1", "bridge:br0"] {
            let link = new_link(to);
            let finished = link.configuration(0).len();
            let host = HostNetlink::default();
            for sent in 0..=finished {
                let session = session();
                let parent = host.wait(host.find(link.to.interface().as_str()));
                let parent = parent.expect("answered").expect("it exists");
                let namespace = session();
                let created = link.creation("eth7", &parent, namespace.file.as_raw_fd());
                host.wait(host.change_all(vec![Change::Create(created)]))
                    .expect("created");
                let mut inside = RouteSocket::from_fd(session().socket).expect("a socket");
                let index = find(&mut inside, "eth7")
                    .expect("answered")
                    .expect("there")
                    .index;
                inside
                    .change_all(&link.configuration(index)[..sent])
                    .expect("configured");
                let whole = usize::from(sent == finished);
                assert_eq!(sweep(session()).expect("swept"), 1 - whole, "{to} {sent}");
                let left = find(&mut inside, "eth7").expect("answered");
                assert_eq!(usize::from(left.is_some()), whole, "{to} {sent}");
                let listed = list(session()).expect("listed");
                assert_eq!(listed.len(), whole, "{to} {sent}: {listed:?}");
                let ports = host.wait(host.dump(all_links())).expect("listed");
                let ports = ports.into_iter().filter_map(FoundLink::of);
                let ports = ports.filter(|link| link.name.starts_with("cmlink")).count();
                assert_eq!(
                    ports,
                    usize::from(to == "bridge:br0") * whole,
                    "{to} {sent}"
                );
                if whole == 1 {
                    delete("eth7", session()).expect("deleted");
                }
            }
        }
    });
}

#[test]
fn a_request_is_read_or_refused_with_the_field() {
    let request = |addresses: &[&str], routes: &[&str]| {
        let owned = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect();
        NewLink::parse(&LinkRequest {
            to: "bridge:br0".parse().expect("a link"),
            name: None,
            addresses: owned(addresses),
            routes: owned(routes),
        })
    };
    let link = request(
        &["192.168.7.5/24", "fd00::5/64"],
        &[
            "default via fd00::1",
            "10.0.0.0/8",
            "10.0.0.1 via 192.168.7.1",
        ],
    );
    let routes = link.expect("valid").routes;
    let shown = routes.iter().map(|route| route.destination.to_string());
    assert_eq!(
        shown.collect::<Vec<_>>(),
        ["::/0", "10.0.0.0/8", "10.0.0.1/32"]
    );
    let gateways = routes.iter().map(|route| route.gateway.is_some());
    assert_eq!(gateways.collect::<Vec<_>>(), [true, false, true]);
    let refused = request(&["192.168.7.5"], &[]).expect_err("no prefix");
    assert_eq!(refused.field, "addresses[0]");
    let refused = request(&[], &["10.0.0.0/8", "10.0.0.0/8 dev eth1"]).expect_err("no route");
    assert_eq!(refused.field, "routes[1]");
    let refused = request(&["10.0.0.1/8"; MAX_ENTRIES + 1], &[]).expect_err("too many");
    assert_eq!(refused.field, "addresses");
}
