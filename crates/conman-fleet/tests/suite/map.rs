//! What a node knows of the others.

use conman_core::placement::PlacementLimits;
use conman_fleet::{FleetMap, NoAddress, SessionLocation};
use conman_peer::{Dialer, PeerClient};
use conman_registry::RegistryError;
use conman_testkit::ModelFleet;
use futures_util::FutureExt as _;

#[tokio::test]
async fn a_look_up_goes_on_while_the_registry_has_no_leader_for_a_moment() {
    let fleet = ModelFleet::new();
    let (_records, me) = fleet.join("me");
    let client = PeerClient::new(Dialer::new("me", None));
    let map = FleetMap::new(me, client, PlacementLimits::default());
    let id = "alice".parse().expect("an id");
    fleet.cut("me");
    let mut fresh = true;
    let mut looking = Box::pin(map.locate(&id, &mut fresh));
    assert!((&mut looking).now_or_never().is_none(), "it goes on");
    fleet.heal("me");
    assert_eq!(looking.await.expect("answered"), SessionLocation::NoOwner);

    fleet.cut("me");
    let looked = map.locate(&id, &mut fresh).await;
    assert!(
        matches!(looked, Err(RegistryError::Unavailable { .. })),
        "and not for ever: {looked:?}"
    );
}

#[tokio::test]
async fn no_more_requests_wait_for_what_a_node_is_about_to_say_than_there_are_places() {
    let fleet = ModelFleet::new();
    let (_records, me) = fleet.join("me");
    let (_their_records, _other) = fleet.join("other");
    let client = PeerClient::new(Dialer::new("me", None));
    let map = FleetMap::new(me, client, PlacementLimits::default()).waiting(2);
    let not_yet = Err(NoAddress::NotYet {
        node: "other".to_owned(),
    });

    let mut waiting: Vec<_> = (0..2).map(|_| Box::pin(map.announced("other"))).collect();
    for request in &mut waiting {
        assert_eq!(request.now_or_never(), None, "it waits");
    }
    let one_more = map.announced("other").now_or_never();
    assert_eq!(one_more.expect("at once").address, not_yet);

    // A place is free again once a request is given up.
    waiting.pop();
    assert_eq!(map.announced("other").now_or_never(), None, "it waits");

    fleet.announced("other", |told| {
        told.peer_url = Some("http://192.0.2.1:7702".to_owned());
    });
    let told = waiting.pop().expect("one that waits").await.address;
    assert!(told.is_ok(), "{told:?}");
}
