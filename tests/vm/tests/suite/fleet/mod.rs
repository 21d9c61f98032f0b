//! A fleet under systemd whose machine's clock is set: two nodes, the first by the units as they are
//! deployed, and etcd's one member. No namespace has a real-time clock of its own, so this takes a
//! machine.

mod clock;

use std::collections::BTreeMap;
use std::time::Duration;

use conman_e2e::{NATIVE_TEMPLATES, ROOT, native};
use conman_vm::{INSTALL, Kernel, MOUNT, Machine, etcd, in_full_length, installation, say, worker};
use serde_json::Value;

/// The machine may share its processors with the tests of a whole workspace being built.
const PATIENCE: Duration = Duration::from_secs(600);

/// How long the nodes' fences let them be without etcd: an emulated machine, with a host that has other
/// work, takes seconds for a renewal.
const FENCE_S: u64 = 30;

/// Longer than anything takes that nodes do here.
const TAKEOVER_S: u64 = 600;

/// It writes down, by a clock that nobody sets, that it runs.
const BEAT: &str = r#"
[templates.beat]
image = "conman-test/root:1"
command = ["sh", "-c", "httpd -p 8080 -h /www; while read up idle </proc/uptime; do echo $up; sleep 0.5; done"]
port = 8080
idle_timeout_s = 7200
max_lifetime_s = 7200
"#;

/// The second node, which starts its shim itself.
const TWO: &str = "[Service]
Type=notify
ExecStart=/usr/bin/conman serve --config /etc/conman/two.toml
Restart=always
WatchdogSec=5min
TimeoutStartSec=15min
KillMode=process
LimitNOFILE=1048576
RuntimeDirectory=conman-two
StateDirectory=conman-two
StateDirectoryMode=0700
[Install]
WantedBy=multi-user.target
";

/// By addresses: the machine has no name for itself. It is patient with itself as well, and has nothing
/// to write to a disk, which would take an emulated machine longer than nodes wait for an answer.
const ETCD: &str = "[Service]
Type=notify
ExecStart=/usr/bin/etcd --data-dir /run/etcd --logger zap --log-level error \\
    --heartbeat-interval 1000 --election-timeout 10000 \\
    --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 \\
    --listen-peer-urls http://127.0.0.1:2380
TimeoutStartSec=15min
";

/// Before conman is installed: what its nodes know each other by, who may ask them, and etcd.
const PREPARE: &str = "set -e
mkdir -p /etc/conman
install /media/etcd /media/etcdctl /usr/bin/
install -m 644 /media/etcd.service /etc/systemd/system/
systemctl start etcd
umask 077
head -c 32 /dev/urandom | base64 >/etc/conman/fleet.key
/media/conman auth new-token --name reader --scope read |
    sed -n '/^\\[\\[token/,$p' >/etc/conman/tokens.toml
install -m 600 /media/two.toml /etc/conman/";

/// How the sessions' nodes are asked on the machine.
const ASK: &str = r#"set -eu
two() { conman --socket /run/conman-two/conman.sock "$@"; }
up() { read -r up rest </proc/uptime; echo "$up"; }
# A start whose record etcd was too slow to take may be asked for again, by the same words.
run() {
    while true; do
        code=0
        conman run "$@" >&2 || code=$?
        [ $code = 5 ] || return $code
        sleep 1
    done
}
renewals() { etcdctl get "/conman/heartbeat/$1" --write-out fields | sed -n 's/^"Version" : //p'; }
# Until each node has renewed its ownership again.
both_renew() {
    for node in one two; do
        enough=$(($(renewals $node) + 2))
        until [ "$(renewals $node)" -ge $enough ]; do sleep 0.2; done
    done
}
"#;

/// What must stay as it is while nothing takes a session's container away.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Life {
    pid: u64,
    generation: u64,
    started_at: String,
}

/// The machine, with two nodes that serve.
#[derive(Debug)]
struct Fleet {
    machine: Machine,
}

impl Fleet {
    /// `None` says on standard error what there is not.
    fn start() -> Option<Self> {
        let (disk, native, etcd) = (worker()?, native()?, etcd()?);
        let files = Kernel::Distribution.files(&disk)?;
        let medium = etcd
            .on(installation(&native, &config("one", "", 7700)))
            .with_text("two.toml", &config("two", "-two", 7710))
            .with_text("conman-two.service", TWO)
            .with_text("etcd.service", ETCD);
        let machine = Machine::boot(&disk, files, medium);
        let fleet = Self { machine };
        fleet.run(MOUNT);
        fleet.run(PREPARE);
        fleet.run(INSTALL);
        fleet.both_serve();
        fleet.ask(&format!(
            "conman image import /media/root.tar {ROOT}; two image import /media/root.tar {ROOT}"
        ));
        Some(fleet)
    }

    fn run(&self, command: &str) -> String {
        self.machine.run(command).ok()
    }

    /// With what [`ASK`] defines.
    fn ask(&self, command: &str) -> String {
        self.run(&format!("{ASK}{command}"))
    }

    /// Until both own what they own, and say so.
    fn both_serve(&self) {
        let ready = "curl -sS -f http://127.0.0.1:7700/readyz http://127.0.0.1:7710/readyz";
        let live = r#"[ "$(conman nodes --json | grep -o '"standing":"live"' | wc -l)" = 2 ]"#;
        self.machine
            .until_ok(&format!("{ready} && {live}"), PATIENCE);
    }

    /// How sessions live, which all run.
    fn lives<'a>(&self, ids: &[&'a str]) -> BTreeMap<&'a str, Life> {
        let shown = format!(
            "for id in {}; do conman inspect $id --json; done",
            ids.join(" ")
        );
        let shown = self.ask(&shown);
        let parsed = serde_json::Deserializer::from_str(&shown).into_iter::<Value>();
        let lives: BTreeMap<&str, Life> = ids.iter().copied().zip(parsed.map(life)).collect();
        assert_eq!(lives.len(), ids.len(), "{shown}");
        lives
    }
}

fn life(session: Result<Value, serde_json::Error>) -> Life {
    let session = session.expect("JSON");
    assert_eq!(session["state"], "running", "{session}");
    let number = |field: &str| session[field].as_u64().expect("a number");
    Life {
        pid: number("pid"),
        generation: number("generation"),
        started_at: session["started_at"].as_str().expect("a time").to_owned(),
    }
}

fn config(name: &str, suffix: &str, port: u16) -> String {
    let first_id = (1_u32 << 31) + (u32::from(port % 100) << 24);
    format!(
        r#"[node]
name = "{name}"
state_dir = "/var/lib/conman{suffix}"
id_range = "{first_id}-{}"
[listen]
api = "127.0.0.1:{port}"
sessions = "127.0.0.1:{}"
peers = "127.0.0.1:{}"
admin = "/run/conman{suffix}/conman.sock"
[auth]
tokens_file = "/etc/conman/tokens.toml"
[registry]
kind = "etcd"
endpoints = ["http://127.0.0.1:2379"]
[fleet]
secret_file = "/etc/conman/fleet.key"
labels = {{ host = "{name}" }}
renew_ms = 3000
fence_ms = {FENCE_S}000
takeover_ms = {TAKEOVER_S}000
freeze_ms = 60000
kill_ms = 60000
{NATIVE_TEMPLATES}{BEAT}"#,
        first_id + (1 << 24) - 1,
        port + 1,
        port + 2
    )
}

#[test]
fn a_fleet_takes_no_notice_of_a_clock_that_is_set() {
    if !in_full_length() {
        say("skipped: a fleet whose clock is set; `cargo xtask acceptance` runs it");
        return;
    }
    let Some(fleet) = Fleet::start() else {
        return;
    };
    clock::no_setting_of_the_clock_ends_pauses_or_moves_anything(&fleet);
}
