//! Templates that are read again at SIGHUP.

use std::fs;
use std::time::Duration;

use conman_e2e::{Conman, ROOT, eventually, native};
use conman_linux::Signal;
use conman_proto::TemplateList;
use http::StatusCode;
use serde_json::json;

const PATIENCE: Duration = Duration::from_secs(60);

async fn says_after_hangup(conman: &Conman, words: &str) {
    let before = conman.log().matches(words).count();
    conman.signal(Signal::SIGHUP);
    eventually(words, PATIENCE, async || {
        conman.log().matches(words).count() > before
    })
    .await;
}

#[tokio::test]
async fn templates_are_read_again_and_what_is_not_is_reported() {
    let Some(native) = native() else { return };
    let conman = Conman::builder().start_native(&native).await;
    let api = conman.api();
    let path = conman.config_path();
    let original = fs::read_to_string(&path).expect("readable");
    let unknown = api
        .put("/v1/sessions/s", &json!({"template": "late"}))
        .await;
    assert_eq!(unknown.problem().slug(), "bad-spec");
    api.ensure("before", &json!({"template": "web"})).await;

    let late = format!("[templates.late]\nimage = \"{ROOT}\"\ncommand = [\"sleep\", \"1000\"]\n");
    fs::write(&path, format!("{original}\n{late}")).expect("written");
    says_after_hangup(&conman, "read the templates again").await;
    let started = api.ensure("s", &json!({"template": "late"})).await;
    assert_eq!(started.session.spec.command, ["sleep", "1000"]);
    let list: TemplateList = api.get("/v1/templates").await.expect(StatusCode::OK);
    assert!(
        list.templates
            .iter()
            .any(|template| template.name == "late")
    );

    // A mistake changes nothing.
    fs::write(&path, format!("{original}\n{late}prot = 80\n")).expect("written");
    says_after_hangup(&conman, "keeping the former ones").await;
    api.ensure("t", &json!({"template": "late"})).await;
    let bound = "[templates.late]\nimage = \"x\"\nnetwork = \"routed\"\n";
    fs::write(&path, format!("{original}\n{bound}")).expect("written");
    says_after_hangup(&conman, "keeping the former ones").await;

    // Other settings are not read, and the log says which.
    fs::write(&path, format!("{original}\n[log]\nformat = \"json\"\n")).expect("written");
    says_after_hangup(&conman, "changed settings are read at the next start only").await;
    assert!(conman.log().contains("changed=\"log\""), "{}", conman.log());
    let gone = api
        .put("/v1/sessions/u", &json!({"template": "late"}))
        .await;
    assert_eq!(gone.problem().slug(), "bad-spec");
    let same = api.ensure("before", &json!({"template": "web"})).await;
    assert!(!same.created);
}
