//! The fabric's sets follow their elements while the rules are kept.

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use conman_net::{FabricElements, FabricRules, RuleSet, RulesKeeper};
use conman_observer::slowness;
use ipnet::IpNet;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::fabric::{GROUP, INSTANCE};
use super::namespace::Host;

/// Long for a run of `nft`.
const PATIENCE: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(10);

const PART: &str = "10.96.1.0/24";

/// The table of the instance, in the network namespace of the calling thread.
fn listed() -> String {
    let list = ["list", "table", "inet", &RuleSet::table(INSTANCE)];
    let output = Command::new("nft").args(list).output().expect("nft runs");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_that_no_class_has_gets_sets_while_a_part_has_it() {
    let host = Host::new();
    host.wait(|| async {
        let rules = RuleSet {
            fabric: Some(FabricRules::default()),
            ..RuleSet::default()
        };
        let mut keeper = RulesKeeper::check(INSTANCE, &rules)
            .await
            .expect("accepted");
        let elements = watch::Sender::<Arc<FabricElements>>::default();
        keeper.fill_with(elements.subscribe());
        keeper.apply().await.expect("applied");
        assert!(!listed().contains(PART));
        let part: IpNet = PART.parse().expect("a network");
        elements.send_replace(Arc::new(FabricElements {
            groups: [(GROUP.to_owned(), [part].into())].into(),
            ..FabricElements::default()
        }));
        let filled = async {
            while !listed().contains(PART) {
                sleep(POLL).await;
            }
        };
        tokio::select! {
            () = keeper.keep() => {}
            filled = timeout(PATIENCE * slowness(), filled) => filled.expect("it is listed"),
        }
    });
}
