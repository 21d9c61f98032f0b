//! What a container of Docker's is given, and what is not touched.

use super::*;

#[tokio::test]
async fn a_container_has_the_limits_rights_and_settings_of_its_plan_and_no_others() {
    let Some(stage) = stage() else { return };
    let mut plan = stage.plan("alice", &["sleep", "1000"]);
    plan.spec.memory_bytes = Some(64 << 20);
    plan.spec.cpus = Some(0.25);
    let container = stage.run(&plan).await;
    let seen = inspect(&container.container_id).await;

    let host = seen.host_config.expect("told");
    assert_eq!(
        (host.memory, host.memory_swap),
        (Some(64 << 20), Some(64 << 20))
    );
    assert_eq!(
        (host.nano_cpus, host.pids_limit),
        (Some(250_000_000), Some(64))
    );
    assert_eq!((host.init, host.privileged), (Some(true), Some(false)));
    assert_eq!(
        host.pid_mode.as_deref(),
        Some(""),
        "a PID namespace of its own"
    );
    assert_eq!(host.ipc_mode.as_deref(), Some("private"));
    let policy = host
        .restart_policy
        .and_then(|policy| policy.name)
        .expect("told");
    assert_eq!(policy.to_string(), "no");
    assert_eq!(host.port_bindings.unwrap_or_default().len(), 0);
    let log = host.log_config.expect("told");
    assert_eq!(log.typ.as_deref(), Some("local"));
    assert_eq!(log.config.expect("bounded")["max-size"], "8m");
    assert_eq!(
        host.security_opt,
        Some(vec!["no-new-privileges".to_owned()])
    );

    // Not what dockerd repeats but what the kernel enforces: CHOWN, DAC_OVERRIDE, FOWNER,
    // FSETID, KILL, SETGID, SETUID and NET_BIND_SERVICE are bits 0, 1, 3, 4, 5, 6, 7 and 10.
    assert_eq!(process_status(container.pid, "CapBnd"), "00000000000004fb");
    assert_eq!(process_status(container.pid, "NoNewPrivs"), "1");
    assert_eq!(
        process_status(container.pid, "Seccomp"),
        "2",
        "Docker's own filter"
    );
}

#[tokio::test]
async fn with_networking_off_docker_makes_no_sandbox_that_would_pin_the_namespace() {
    let Some(stage) = stage() else { return };
    let container = stage.run_idle("alice").await;
    let seen = inspect(&container.container_id).await;
    assert_eq!(seen.config.expect("told").network_disabled, Some(true));
    let network = seen.network_settings.expect("told");
    assert_eq!(network.sandbox_id.as_deref(), Some(""));
    assert_eq!(network.sandbox_key.as_deref(), Some(""));
    let namespace =
        |pid: String| std::fs::read_link(format!("/proc/{pid}/ns/net")).expect("readable");
    assert_ne!(
        namespace(container.pid.to_string()),
        namespace("self".to_owned())
    );
}

#[tokio::test]
async fn the_bridge_gives_an_interface_a_way_out_and_dockers_own_files() {
    let Some(stage) = stage() else { return };
    let mut plan = stage.plan("alice", &["sh", "-c", "cat /proc/net/route; sleep 1000"]);
    plan.spec.network = Network::Bridge;
    let container = stage.run(&plan).await;
    let interfaces = std::fs::read_to_string(format!("/proc/{}/net/dev", container.pid));
    assert!(interfaces.expect("readable").contains("eth0:"));
    let routes = std::fs::read_to_string(format!("/proc/{}/net/route", container.pid));
    assert!(
        routes.expect("readable").contains("\t00000000\t"),
        "a default route"
    );
    let targets = inspect(&container.container_id)
        .await
        .mounts
        .unwrap_or_default();
    let targets: Vec<_> = targets
        .into_iter()
        .filter_map(|mount| mount.destination)
        .collect();
    assert!(targets.is_empty(), "nothing of ours: {targets:?}");
    container.kill();
    let removed = stage
        .runtime()
        .remove(std::slice::from_ref(&container.key))
        .await;
    assert!(matches!(removed[..], [Ok(())]), "{removed:?}");
}

#[tokio::test]
async fn a_container_on_the_bridge_does_not_reach_the_hosts_services() {
    let Some(stage) = stage() else { return };
    let mut plan = stage.plan("alice", &["sleep", "1000"]);
    plan.spec.network = Network::Bridge;
    let container = stage.run(&plan).await;
    let inspected = inspect(&container.container_id).await;
    let networks = inspected.network_settings.and_then(|all| all.networks);
    let bridge = networks
        .and_then(|mut all| all.remove("bridge"))
        .expect("told");
    let gateway = bridge.gateway.expect("told");
    let service = std::net::TcpListener::bind("0.0.0.0:0").expect("bound");
    let port = service.local_addr().expect("bound").port();
    let inside = |script: &str| {
        let namespace = format!("--net=/proc/{}/ns/net", container.pid);
        let mut command = std::process::Command::new("nsenter");
        command.args([&namespace, "timeout", "5", "bash", "-c", script]);
        command.output().expect("nsenter runs").status.success()
    };
    let connect = format!("exec 3<>/dev/tcp/{gateway}/{port}");
    assert!(!inside(&connect), "the host's service");
    assert!(inside("nft delete table inet conman"), "its rules");
    assert!(inside(&connect), "without them");
}

#[tokio::test]
async fn an_image_that_is_not_there_is_not_pulled_but_named_with_the_remedy() {
    let Some(stage) = stage() else { return };
    let mut plan = stage.plan("alice", &["sleep", "1000"]);
    plan.spec.image = "conman-test:no-such-tag".to_owned();
    let error = stage.runtime().create(&plan).await.expect_err("not there");
    assert!(matches!(error, RuntimeError::NoSuchImage { .. }), "{error}");
    assert!(
        error
            .to_string()
            .contains("docker pull conman-test:no-such-tag"),
        "{error}"
    );
    assert!(!plan.files_dir.exists(), "a refused create leaves no files");
    assert_eq!(stage.runtime().list().await.expect("answered"), []);
}

#[tokio::test]
async fn a_program_that_ends_at_once_is_told_with_its_exit_code_and_last_words() {
    let Some(stage) = stage() else { return };
    let plan = stage.plan("alice", &["sh", "-c", "echo no luck >&2; exit 9"]);
    stage.runtime().create(&plan).await.expect("created");
    // dockerd may have noticed the end when it is asked right after the start, or not.
    match stage.runtime().start(&plan.key).await {
        Ok(_) => {
            let exit_code = stage.runtime().exit_code(&plan.key, PATIENCE).await;
            assert_eq!(exit_code, Some(9));
        }
        Err(RuntimeError::EndedAtOnce { reason, .. }) => {
            assert!(reason.contains("exit code 9"), "{reason}");
            assert!(reason.contains("no luck"), "{reason}");
        }
        Err(error) => panic!("{error}"),
    }
}

#[tokio::test]
async fn without_a_command_the_images_own_is_run_and_an_image_without_one_is_refused() {
    let Some(stage) = stage() else { return };
    let image = inspect_image().await;
    let plan = stage.plan("alice", &[]);
    let created = stage.runtime().create(&plan).await;
    if image {
        created.expect("the image says what to run");
    } else {
        let error = created.expect_err("nobody says what to run");
        assert!(matches!(error, RuntimeError::Refused { .. }), "{error}");
    }
}

/// Whether the image has a command of its own.
async fn inspect_image() -> bool {
    let image = docker().inspect_image(IMAGE).await.expect("it exists");
    let config = image.config.expect("told");
    let given = |words: Option<Vec<String>>| words.is_some_and(|words| !words.is_empty());
    given(config.cmd) || given(config.entrypoint)
}

#[tokio::test]
async fn a_container_that_only_has_the_name_is_neither_found_nor_removed() {
    let Some(stage) = stage() else { return };
    let key = stage.plan("alice", &[]).key;
    let name = naming::container_name(stage.instance(), &key.session, key.generation);
    let options = CreateContainerOptionsBuilder::default().name(&name).build();
    let body = ContainerCreateBody {
        image: Some(IMAGE.to_owned()),
        cmd: Some(vec!["true".to_owned()]),
        ..ContainerCreateBody::default()
    };
    let made = docker()
        .create_container(Some(options), body)
        .await
        .expect("made");
    let found = stage.runtime().find(&key).await;
    let listed = stage.runtime().list().await;
    let removed = stage.runtime().remove(std::slice::from_ref(&key)).await;
    let refused = stage
        .runtime()
        .create(&stage.plan("alice", &["true"]))
        .await;
    let still_there = docker().inspect_container(&made.id, None).await;
    let force = RemoveContainerOptionsBuilder::default().force(true).build();
    docker()
        .remove_container(&made.id, Some(force))
        .await
        .expect("removed by its maker");

    assert_eq!(found.expect("answered"), None);
    assert_eq!(listed.expect("answered"), []);
    assert!(
        matches!(removed[..], [Ok(())]),
        "nothing of ours to remove: {removed:?}"
    );
    assert!(
        matches!(refused, Err(RuntimeError::Exists { .. })),
        "{refused:?}"
    );
    still_there.expect("left alone");
}

#[tokio::test]
async fn whether_an_image_is_there_is_told_before_a_container_is_made_of_it() {
    let Some(stage) = stage() else { return };
    let runtime = stage.runtime();
    const MISSING: &str = "conman-test:no-such-tag";
    let lacks = runtime.lacks_image(MISSING).await;
    let lacks = lacks.expect("it is not there");
    let mut plan = stage.plan("alice", &["sleep", "1000"]);
    plan.spec.image = MISSING.to_owned();
    let refused = runtime.create(&plan).await.expect_err("not there");
    assert_eq!(lacks.to_string(), refused.to_string());
    for _ in 0..2 {
        assert!(runtime.lacks_image(IMAGE).await.is_none());
    }
}
