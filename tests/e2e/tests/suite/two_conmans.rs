//! Two conmans on one host.

use conman_e2e::{Conman, IdRange, native};

#[tokio::test]
async fn user_ids_that_another_conman_has_are_refused_with_the_next_free_range() {
    let Some(native) = native() else { return };
    let ids = IdRange::claim();
    let line = format!("id_range = {}", ids.value());
    let mut first = Conman::builder()
        .set("node", &line)
        .start_native(&native)
        .await;
    let mut overlapping = Conman::builder().set("node", &line).prepare_native(&native);
    overlapping.spawn();
    let status = overlapping.wait_ended().await;
    assert_eq!(status.code(), Some(2));
    let log = overlapping.log();
    let shim = first.shim_pid();
    for part in [
        &format!(
            "`node.id_range`, {}, overlaps",
            ids.value().trim_matches('"')
        ),
        &format!("process {shim} (`"),
        "The next free range: id_range = \"",
    ] {
        assert!(log.contains(part), "{part}: {log}");
    }
    // The shim refuses them too: its unit may start before the daemon's.
    let (code, said) = overlapping.order_shim("--standby");
    assert!(
        code == Some(2) && said.contains("next free range"),
        "{code:?} {said}"
    );

    // The shim holds them, not the daemon; and a daemon that comes back has them.
    first.crash();
    let (code, _) = overlapping.order_shim("--standby");
    assert_eq!(code, Some(2));
    first.launch().await;
}
