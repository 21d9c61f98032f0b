//! Locations of sessions, and what is cached of them.

use super::{World, claim, forget, join, locate, nobodys, read, release, remembered};
use crate::registry_conformance::id;

pub(super) async fn what_nobody_owns_is_asked_for_anew_each_time(world: &dyn World) {
    let [a, b] = join(world, ["a", "b"]).await;
    let id = id("nobodys");
    for member in [&a, &b] {
        for fresh in [false, true, false] {
            assert_eq!(locate(member, &id, fresh).await, nobodys());
        }
    }
    let generation = claim(&a, &id).await;
    for member in [&a, &b] {
        let found = locate(member, &id, false).await;
        assert_eq!(found, read("a", generation, false), "nothing was known");
    }
}

pub(super) async fn a_session_is_found_by_everybody_and_remembered(world: &dyn World) {
    let [a, b] = join(world, ["a", "b"]).await;
    let id = id("owned");
    let generation = claim(&a, &id).await;
    let [c] = join(world, ["c"]).await;
    for member in [&a, &b, &c] {
        for wanted in [read, remembered, remembered] {
            let found = locate(member, &id, false).await;
            assert_eq!(found, wanted("a", generation, false), "{}", member.me());
        }
        let found = locate(member, &id, true).await;
        assert_eq!(found, read("a", generation, false), "{}", member.me());
    }
}

pub(super) async fn what_is_remembered_stays_until_it_is_denied_or_read_afresh(world: &dyn World) {
    let [a, b, c] = join(world, ["a", "b", "c"]).await;
    let id = id("moved");
    let earlier = claim(&a, &id).await;
    release(&a, &id, earlier).await;
    let before = claim(&a, &id).await;
    for member in [&a, &b, &c] {
        let found = locate(member, &id, false).await;
        assert_eq!(found, read("a", before, false));
    }
    release(&a, &id, before).await;
    let present = claim(&b, &id).await;
    assert!(present > before && before > earlier, "generations grow");

    let at_b = locate(&b, &id, false).await;
    let wanted = read("b", present, false);
    assert_eq!(at_b, wanted, "by its claim it knows better");
    for member in [&a, &c] {
        let found = locate(member, &id, false).await;
        assert_eq!(found, remembered("a", before, false), "as it was known");
    }
    c.forget_location(&id, earlier);
    let found = locate(&c, &id, false).await;
    let wanted = remembered("a", before, false);
    assert_eq!(found, wanted, "that was said of an earlier one");
    c.forget_location(&id, before);
    assert_eq!(locate(&c, &id, false).await, read("b", present, false));
    c.forget_location(&id, before);
    let found = locate(&c, &id, false).await;
    let wanted = remembered("b", present, false);
    assert_eq!(found, wanted, "the cached location is later");

    assert_eq!(locate(&a, &id, true).await, read("b", present, false));
    let found = locate(&a, &id, false).await;
    let wanted = remembered("b", present, false);
    assert_eq!(found, wanted, "what was read is remembered");
    release(&b, &id, present).await;
    let later = claim(&c, &id).await;
    a.forget_location(&id, later);
    let found = locate(&a, &id, false).await;
    assert_eq!(found, read("c", later, false), "it knew an earlier one");

    let never = crate::registry_conformance::id("never");
    a.forget_location(&never, later);
    assert_eq!(locate(&a, &never, false).await, nobodys());
}

pub(super) async fn what_was_given_up_is_told_as_that_and_what_was_forgotten_as_nobodys(
    world: &dyn World,
) {
    let [a, b] = join(world, ["a", "b"]).await;
    let id = id("over");
    let generation = claim(&a, &id).await;
    release(&a, &id, generation).await;
    for member in [&a, &b] {
        for wanted in [read, remembered] {
            let found = locate(member, &id, false).await;
            assert_eq!(found, wanted("a", generation, true), "{}", member.me());
        }
    }
    forget(&a, &id, generation).await;
    assert_eq!(
        locate(&a, &id, false).await,
        nobodys(),
        "it has forgotten it"
    );
    let found = locate(&b, &id, false).await;
    assert_eq!(found, remembered("a", generation, true), "still cached");
    assert_eq!(locate(&b, &id, true).await, nobodys());
    assert_eq!(locate(&b, &id, false).await, nobodys(), "no longer known");
}
