//! PostgreSQL, which is stopped by its own signal and finds what it has written.

use super::Programs;

/// The image lacks the user that the package's scripts make.
const POSTGRESQL: &str = r#"
port = 5432
stop_signal = "SIGINT"
stop_grace_ms = 30000
command = ["sh", "-c", """
echo 'postgres:x:999:999::/tmp:/bin/sh' >>/etc/passwd
echo 'postgres:x:999:' >>/etc/group
mkdir -p /work/data
chown postgres:postgres /work/data
cd /usr/lib/postgresql/*/bin
[ -e /work/data/PG_VERSION ] || su postgres -c './initdb --auth=trust --pgdata=/work/data'
exec su postgres -c 'exec ./postgres -D /work/data -h 127.0.0.1 -k /tmp'
"""]
"#;

#[tokio::test]
#[ignore = "`cargo xtask acceptance programs`"]
async fn postgresql_keeps_what_was_committed_after_a_stop_and_a_preemption() {
    let Some(programs) = Programs::start("database", &[("db", POSTGRESQL)]).await else {
        return;
    };
    let query = async |sql: &str| {
        let psql = "/usr/lib/postgresql/*/bin/psql -h /tmp -U postgres -qAt -c";
        // It listens before it has recovered.
        let line = format!("until {psql} '{sql}'; do sleep 0.1; done");
        programs.shell("db", &line).await
    };
    query("create table kept as select sum(n) from generate_series(1, 100000) n").await;
    programs.conman.cli(&["rm", "db"]).await.success();
    let log = programs.conman.cli(&["logs", "db"]).await;
    assert!(
        log.success().contains("database system is shut down"),
        "{log:?}"
    );
    for _ in 0..2 {
        programs
            .conman
            .cli(&["run", "db", "--template", "db"])
            .await
            .success();
        assert_eq!(query("select * from kept").await, "5000050000\n");
        programs.preempt().await;
    }
}
