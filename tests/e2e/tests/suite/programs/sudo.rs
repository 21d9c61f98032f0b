//! sudo, in a session whose template lets programs gain privileges and in one whose template does not.

use conman_proto::ExecResult;
use http::StatusCode;
use serde_json::json;

use super::Programs;

/// `no_new_privs` is `true` in the other one.
const TEMPLATES: [(&str, &str); 2] = [
    (
        "may",
        "command = [\"sleep\", \"infinity\"]\nno_new_privs = false",
    ),
    ("may-not", "command = [\"sleep\", \"infinity\"]"),
];

/// The image lacks what the package's scripts write, among it the settings of PAM.
const SET_UP: &str = "
for kind in auth account session; do echo $kind required pam_permit.so; done | tee /etc/pam.d/other >/etc/pam.d/sudo
echo 'user:x:1000:1000::/tmp:/bin/sh' >>/etc/passwd
echo 'user:x:1000:' >>/etc/group
echo 'user ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/user
chmod 440 /etc/sudoers.d/user
";

#[tokio::test]
async fn sudo_makes_a_user_root_of_its_session_only_where_the_template_allows_it() {
    let Some(programs) = Programs::start("shells", &TEMPLATES).await else {
        return;
    };
    let sudo = async |id: &str| -> ExecResult {
        programs.shell(id, SET_UP).await;
        let command = [
            "sudo",
            "-n",
            "sh",
            "-c",
            "id -u; touch /etc/mine; stat -c %u /etc/mine",
        ];
        let request = json!({"command": command, "user": "user"});
        let path = format!("/v1/sessions/{id}/exec");
        let answer = programs.api().post(&path, &request).await;
        answer.expect(StatusCode::OK)
    };
    let may = sudo("may").await;
    assert_eq!((may.exit_code, &*may.stdout), (0, "0\n0\n"), "{may:?}");
    let may_not = sudo("may-not").await;
    assert_eq!(
        (may_not.exit_code, &*may_not.stdout),
        (1, ""),
        "{may_not:?}"
    );
    assert!(may_not.stderr.contains("no new privileges"), "{may_not:?}");
}
