//! What a newcomer types: the README's commands as they stand there, and what conman advises, each in the
//! state in which it is shown.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::process::{Command, Output, Stdio};

use conman_e2e::{CliOutput, Conman, PYTHON, ROOT, binary, docker_shared, native};

use super::images::Registry;

pub(crate) const README: &str = include_str!("../../../../README.md");
const API_PAGE: &str = include_str!("../../../../proto/README.md");

/// The image that the README pulls, and that stands for a public one here.
const IMAGE: &str = "python:3.12-slim";

/// The indented lines of `page` after `begin` and before `end`.
pub(crate) fn block(page: &str, begin: &str, end: &str) -> String {
    let (_, rest) = page.split_once(begin).expect("the page has the beginning");
    let (block, _) = rest.split_once(end).expect("the page has the end");
    let lines = block.lines().filter_map(|line| line.strip_prefix("    "));
    let text = lines.collect::<Vec<_>>().join("\n");
    assert!(!text.is_empty(), "no command between {begin} and {end}");
    text
}

/// Runs a script as root would type it, with this daemon's addresses instead of the default ones.
pub(crate) fn typed(conman: &Conman, script: &str) -> Output {
    let tools = conman.directory().join("bin");
    if !tools.exists() {
        fs::create_dir(&tools).expect("made");
        symlink(binary(), tools.join("conman")).expect("linked");
    }
    let path = std::env::var("PATH").unwrap_or_default();
    let directory = conman.directory().display().to_string();
    let script = script
        .replace("127.0.0.1:7700", &conman.api_address().to_string())
        .replace("127.0.0.1:7701", &conman.sessions_address().to_string())
        .replace("/run/conman", &directory)
        // The test has no terminal.
        .replace("exec -it", "exec -i");
    Command::new("bash")
        .args(["-euo", "pipefail", "-c", &script])
        .env("PATH", format!("{}:{path}", tools.display()))
        .env("CONMAN_SOCKET", conman.socket_path())
        .env_remove("CONMAN_URL")
        .current_dir(conman.directory())
        .stdin(Stdio::null())
        .output()
        .expect("bash runs")
}

pub(crate) fn succeeded(output: &Output) -> String {
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{}: {stdout}\n{stderr}",
        output.status
    );
    stdout
}

#[tokio::test]
async fn what_the_readme_says_to_try_works_as_it_stands_there() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let Some(native) = native() else { return };
    let directory = tempfile::tempdir().expect("a directory");
    let Some(registry) = Registry::start(directory.path()).await else {
        return;
    };
    registry.push_as(&docker, PYTHON, IMAGE).await;
    let (_, toml) = README
        .split_once("```toml\n")
        .expect("the README has a template");
    let (template, _) = toml.split_once("```").expect("the block has an end");
    let images = format!(
        "[images]\ndefault_registry = \"{}\"\n{template}",
        registry.address
    );
    let conman = Conman::builder()
        .set("auth", "loopback = \"token\"")
        .toml(&images)
        .start_native(&native)
        .await;
    let sessions = block(
        README,
        "Commands, over the admin socket",
        "Without a registry",
    );
    let printed = succeeded(&typed(&conman, &sessions));
    assert!(
        printed.lines().any(|line| line == "1"),
        "the program's output: {printed}"
    );
    for over_http in [
        block(README, "The same over HTTP", "A browser uses"),
        "conman run alice --template python\n\
         curl -sS --fail -H 'Host: alice.localhost' http://127.0.0.1:7701/\nconman rm alice"
            .to_owned(),
    ] {
        let printed = succeeded(&typed(&conman, &over_http));
        assert!(printed.contains("Directory listing"), "{printed}");
    }
    docker.run(&["tag", PYTHON, IMAGE]).await;
    let save = block(README, "Without a registry", "The same over HTTP");
    let save = save.lines().next().expect("a line");
    assert!(save.starts_with("docker save"), "{save}");
    let imported = typed(&conman, save);
    docker.run(&["rmi", IMAGE]).await;
    succeeded(&imported);
}

#[tokio::test]
async fn the_requests_of_the_apis_page_are_accepted_as_they_stand_there() {
    let Some(native) = native() else { return };
    let template =
        format!("[templates.python]\nimage = \"{ROOT}\"\ncommand = [\"sleep\", \"1000000\"]\n");
    let conman = Conman::builder()
        .set("auth", "loopback = \"token\"")
        .toml(&template)
        .start_native(&native)
        .await;
    let directory = conman.directory();
    fs::write(directory.join("data.csv"), "1,2\n").expect("written");
    let mut script = block(API_PAGE, "next to its admin socket:", "## Sessions");
    let mut requests = 0;
    for line in API_PAGE
        .lines()
        .skip_while(|line| !line.starts_with("## Sessions"))
    {
        let Some(line) = line.strip_prefix("    ") else {
            continue;
        };
        let begins = line.starts_with("curl ") || line.contains("| curl ");
        if begins {
            requests += 1;
        }
        let continues = script.ends_with("\\");
        if begins || continues {
            // No make in the image; whatever the command prints, the request is accepted.
            script.push('\n');
            script.push_str(
                &line
                    .replace("curl ", "curl -sS --fail-with-body ")
                    .replace("make", "true"),
            );
        }
    }
    assert!(requests >= 5, "{script}");
    // The page's commands run in /work, and its archive is of the directory that it is typed in.
    let script = script
        .replace(" tar -c . ", " tar -c data.csv ")
        .replace("tar -c .", "tar -c data.csv");
    let (first, rest) = script.split_once("\ncurl").expect("requests");
    let script = format!(
        "{first}\nconman run alice --template python\nconman exec alice -- mkdir -p /work\ncurl{rest}"
    );
    succeeded(&typed(&conman, &script));
}

/// The commands between backquotes that begin with `conman `.
fn advised(text: &str) -> BTreeSet<String> {
    text.split('`')
        .skip(1)
        .step_by(2)
        .filter(|code| code.starts_with("conman "))
        .map(str::to_owned)
        .collect()
}

/// A daemon whose advice is followed.
struct Adviser {
    conman: Conman,
    /// An image's archive.
    archive: String,
    followed: usize,
    failures: Vec<String>,
}

impl Adviser {
    async fn run(&self, line: &str) -> CliOutput {
        let words: Vec<&str> = line.split_whitespace().skip(1).collect();
        self.conman.cli(&words).await
    }

    /// Follows each advice that a command ends with; `before` makes the state again, for each.
    async fn follow(&mut self, before: &[&str], shown: &str) {
        let mut advice = BTreeSet::new();
        for (index, line) in before.iter().chain([&shown]).enumerate() {
            let output = self.run(line).await;
            if index == before.len() {
                let text = output.stdout + &output.stderr;
                advice = advised(&text);
                if advice.is_empty() {
                    self.failures
                        .push(format!("{shown} advises nothing: {text}"));
                }
            }
        }
        for line in advice {
            for state in before {
                self.run(state).await;
            }
            let typed = line
                .replace("TEMPLATE", "idle")
                .replace("NAME:TAG", ROOT)
                .replace(" FILE ", &format!(" {} ", self.archive))
                .replace("exec -it", "exec -i")
                .replace(" N ", " 10 ");
            let mut output = self.run(&typed).await;
            let words = typed.split_whitespace().count();
            if words == 2 && output.code != Some(0) || words <= 4 && output.code == Some(2) {
                // It names a command whose arguments only the reader knows.
                output = self.run(&format!("{typed} --help")).await;
            }
            if output.code == Some(0) {
                self.followed += 1;
            } else {
                self.failures
                    .push(format!("{shown} advises {line}: {output:?}"));
            }
        }
    }
}

#[tokio::test]
async fn every_advice_works_when_it_is_typed() {
    let Some(native) = native() else { return };
    let conman = Conman::builder()
        .set("auth", "loopback = \"token\"")
        .start_native(&native)
        .await;
    let mut adviser = Adviser {
        archive: conman.directory().join("root.tar").display().to_string(),
        conman,
        followed: 0,
        failures: Vec::new(),
    };
    let running = "conman run bob --template idle";
    for (before, shown) in [
        // Unknown.
        (&["conman rm --forget nobody"][..], "conman inspect nobody"),
        (&["conman rm --forget nobody"], "conman exec nobody -- true"),
        // Stopped.
        (&[running, "conman rm bob"], "conman exec bob -- true"),
        (&[running, "conman rm bob"], "conman why bob"),
        (&[running, "conman rm bob"], "conman rm bob"),
        // Running, paused.
        (&[running], "conman why bob"),
        (&[running], "conman forward bob 9999"),
        (&[running], "conman run bob --template web"),
        // Started and failed.
        (&[], "conman run ended --template web -- true"),
        (&[], "conman run imageless --image conman-test/none:1"),
        // Images.
        (&[], "conman image inspect none:1"),
        (&[running], "conman image rm conman-test/root:1"),
        // The node.
        (&["conman cordon"], "conman run cordoned --template idle"),
        (
            &["conman undrain", "conman drain"],
            "conman run drained --template idle",
        ),
        (
            &["conman preempt --yes"],
            "conman run preempted --template idle",
        ),
        (
            &["conman readmit", running, "conman preempt --yes"],
            "conman why bob",
        ),
        (
            &["conman readmit", running, "conman rm bob", "conman cordon"],
            "conman why bob",
        ),
        (&["conman readmit"], "conman nodes rm nowhere"),
    ] {
        for undo in ["conman readmit", "conman undrain", "conman uncordon"] {
            adviser.run(undo).await;
        }
        adviser.follow(before, shown).await;
        let image = adviser.conman.cli(&["image", "inspect", ROOT]).await;
        if image.code != Some(0) {
            let archive = adviser.archive.clone();
            adviser
                .conman
                .cli(&["image", "import", &archive, ROOT])
                .await
                .success();
        }
    }
    assert!(
        adviser.failures.is_empty(),
        "{}",
        adviser.failures.join("\n")
    );
    assert!(adviser.followed >= 20, "{} were followed", adviser.followed);
}

/// Mistakes that people make, each with what the answer has to name: the thing and the remedy.
const MISTAKES: &[(&str, i32, &[&str])] = &[
    ("run nobody", 4, &["image", "template", "idle"]),
    (
        "run x --template idel",
        4,
        &["template", "idel", "did you mean `idle`"],
    ),
    ("run X --template idle", 2, &["X"]),
    ("run x --image Foo", 4, &["image", "Foo"]),
    ("run x --template idle --memory 1", 4, &["memory"]),
    ("run x --template idle --network bridge", 4, &["network"]),
    ("run x --template idle --bind /etc:/etc", 4, &["bind"]),
    (
        "run x --template idle --node-label pool=gpu",
        5,
        &["pool=gpu", "[fleet] labels"],
    ),
    (
        "run -p 80:80 x --template idle",
        2,
        &["-p", "conman forward"],
    ),
    ("image pull Foo", 4, &["pull", "Foo"]),
    (
        "image pull 127.0.0.1:9/none:1",
        1,
        &["127.0.0.1:9", "registry"],
    ),
    ("image inspect none:1", 3, &["none:1", "conman image ls"]),
    ("exec nobody -- true", 125, &["nobody", "conman run nobody"]),
    ("exec there -- no-such-program", 127, &["no-such-program"]),
    ("logs nobody", 3, &["nobody"]),
    (
        "token nobody",
        0,
        &["no session has the name nobody", "template"],
    ),
    ("why nobody", 3, &["nobody"]),
    ("forward there 9999", 4, &["9999", "conman port there"]),
    ("forward nobody 80", 3, &["nobody"]),
    ("cp there:/no/such/file .", 3, &["/no/such/file"]),
    ("cp nobody:/etc .", 3, &["nobody"]),
    ("ls there:/no/such", 3, &["/no/such"]),
    ("kill --signal NONE there", 4, &["NONE", "SIGTERM"]),
    ("attach there", 125, &["there", "terminal"]),
    ("nodes rm nowhere", 3, &["nowhere", "conman nodes"]),
    ("drain nowhere", 3, &["nowhere", "conman nodes"]),
    ("preempt", 2, &["--yes"]),
    ("rm --all", 2, &["--yes"]),
    ("rm nobody", 3, &["nobody"]),
    ("update there", 2, &["--label"]),
    ("stats nobody", 3, &["nobody"]),
    ("ps --state runing", 2, &["runing", "running"]),
    ("login registry.example.org", 2, &["login", "images.logins"]),
    ("build .", 2, &["build", "docker save"]),
    ("inspect --format x there", 2, &["--format", "jq"]),
    ("--url http://API ps", 4, &["admin.token", "--token-file"]),
    ("--url ftp://x ps", 2, &["ftp://x", "http://127.0.0.1:7700"]),
    (
        "--socket /no/such.sock ps",
        5,
        &["/no/such.sock", "conman serve"],
    ),
    (
        "--url http://127.0.0.1:9 ps",
        5,
        &["127.0.0.1:9", "conman serve"],
    ),
    ("image import /no/such.tar a:1", 1, &["/no/such.tar"]),
];

#[tokio::test]
async fn the_answer_to_a_mistake_names_the_thing_and_the_remedy() {
    let Some(native) = native() else { return };
    let conman = Conman::builder()
        .set("auth", "loopback = \"token\"")
        .start_native(&native)
        .await;
    conman
        .cli(&["run", "there", "--template", "idle"])
        .await
        .success();
    let mut wrong = Vec::new();
    for (line, code, parts) in MISTAKES {
        let line = line.replace("http://API", &format!("http://{}", conman.api_address()));
        let words: Vec<&str> = line.split_whitespace().collect();
        let output = match line.starts_with("--socket") || line.starts_with("--url") {
            true => {
                let plain = Command::new(binary())
                    .args(&words)
                    .output()
                    .expect("it runs");
                CliOutput {
                    code: plain.status.code(),
                    stdout: String::from_utf8_lossy(&plain.stdout).into_owned(),
                    stderr: String::from_utf8_lossy(&plain.stderr).into_owned(),
                }
            }
            false => conman.cli(&words).await,
        };
        let missing: Vec<_> = parts
            .iter()
            .filter(|part| !output.stderr.contains(**part))
            .collect();
        if output.code != Some(*code) || !missing.is_empty() {
            wrong.push(format!(
                "conman {line}: {missing:?} missing, code {code} expected: {output:?}"
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
