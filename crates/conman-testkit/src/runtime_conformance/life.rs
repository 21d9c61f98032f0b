//! Checks of a container's life.

use conman_linux::{PidFd, Signal};
use conman_observer::pid_namespace;

use super::stage::{PATIENCE, Stage, random_instance, until};
use conman_runtime::RuntimeError;

pub async fn a_created_container_has_no_process(stage: &Stage) {
    let plan = stage.plan("alice", &["sleep", "1000"]);
    let container_id = stage.runtime().create(&plan).await.expect("created");
    assert!(stage.pids(&plan.key).is_empty());
    let found = stage
        .runtime()
        .find(&plan.key)
        .await
        .expect("answered")
        .expect("found");
    assert_eq!(
        (found.container_id, found.pid, found.exit_code),
        (container_id, None, None)
    );
}

pub async fn a_started_container_has_an_init_that_the_kernel_knows_as_its_own(stage: &Stage) {
    let container = stage.run_idle("alice").await;
    let other = stage.run_idle("bob").await;
    assert!(stage.pids(&container.key).contains(&container.pid));
    assert!(!stage.runtime().owns_pid(&container.key, other.pid));
    assert!(
        !stage
            .runtime()
            .owns_pid(&container.key, std::process::id().cast_signed())
    );
    let own = pid_namespace(std::process::id().cast_signed()).expect("readable");
    let its = pid_namespace(container.pid).expect("readable");
    let others = pid_namespace(other.pid).expect("readable");
    assert!(its != own && its != others, "{its} {others} {own}");
}

pub async fn a_second_create_of_a_key_is_refused(stage: &Stage) {
    let container = stage.run_idle("alice").await;
    let plan = stage.plan("alice", &["true"]);
    let error = stage.runtime().create(&plan).await.expect_err("it exists");
    assert!(matches!(error, RuntimeError::Exists { .. }), "{error}");
    assert!(!error.is_ambiguous());
    assert!(plan.files_dir.exists());
    let hostname = stage.sh(&container.key, "cat /etc/hostname").await;
    assert_eq!(
        hostname.stdout, "alice\n",
        "the refused create left the first one's files alone"
    );
    assert!(!container.pidfd.is_dead().expect("poll works"));
}

pub async fn starting_what_runs_changes_nothing(stage: &Stage) {
    let container = stage.run_idle("alice").await;
    let again = stage
        .runtime()
        .start(&container.key)
        .await
        .expect("it runs");
    assert_eq!(
        (again.pid, again.container_id),
        (container.pid, container.container_id)
    );
}

pub async fn starting_what_does_not_exist_is_refused(stage: &Stage) {
    let key = stage.plan("absent", &[]).key;
    let error = stage
        .runtime()
        .start(&key)
        .await
        .expect_err("nothing to start");
    assert!(
        matches!(error, RuntimeError::NoSuchContainer { .. }),
        "{error}"
    );
    assert_eq!(stage.runtime().find(&key).await.expect("answered"), None);
}

pub async fn containers_are_found_in_every_state_and_by_a_new_daemon(stage: &Stage) {
    let created = stage.plan("created", &["sleep", "1000"]);
    stage.runtime().create(&created).await.expect("created");
    let running = stage.run_idle("running").await;
    let dead = stage.run_idle("dead").await;
    dead.kill();
    assert_eq!(
        stage.runtime().exit_code(&dead.key, PATIENCE).await,
        Some(137)
    );

    for runtime in [stage.another_runtime(), stage.another_runtime()] {
        let mut listed = runtime.list().await.expect("listed");
        listed.sort_by(|a, b| a.key.cmp(&b.key));
        let facts: Vec<_> = listed
            .iter()
            .map(|each| (each.key.clone(), each.pid, each.exit_code))
            .collect();
        let expected = [
            (created.key.clone(), None, None),
            (dead.key.clone(), None, Some(137)),
            (running.key.clone(), Some(running.pid), None),
        ];
        assert_eq!(facts, expected);
        for each in listed {
            let found = runtime.find(&each.key).await.expect("answered");
            assert_eq!(found, Some(each));
        }
        assert!(runtime.owns_pid(&running.key, running.pid));
    }
}

pub async fn a_kill_through_the_pidfd_ends_everything_and_is_told_by_the_exit_code(stage: &Stage) {
    // A shell executes its last command in its own process, hence `true`.
    let script = "sleep 1000 & setsid sleep 1000 & sleep 1000; true";
    let container = stage.run(&stage.plan("alice", &["sh", "-c", script])).await;
    until("a shell and three sleeps", || {
        (stage.pids(&container.key).len() >= 4).then_some(())
    })
    .await;
    container.kill();
    assert!(stage.pids(&container.key).is_empty());
    assert_eq!(
        stage.runtime().exit_code(&container.key, PATIENCE).await,
        Some(137)
    );
}

pub async fn the_exit_code_of_the_program_is_told(stage: &Stage) {
    let plan = stage.plan("alice", &["sh", "-c", "read line; exit 7"]);
    stage.runtime().create(&plan).await.expect("created");
    // It may end before or after its start is answered.
    match stage.runtime().start(&plan.key).await {
        Ok(_) => {}
        Err(RuntimeError::EndedAtOnce { reason, .. }) => assert!(reason.contains('7'), "{reason}"),
        Err(error) => panic!("{error}"),
    }
    assert_eq!(
        stage.runtime().exit_code(&plan.key, PATIENCE).await,
        Some(7)
    );
    let idle = stage.run_idle("idle").await;
    let none = stage
        .runtime()
        .exit_code(&idle.key, std::time::Duration::from_millis(50))
        .await;
    assert_eq!(none, None);
}

pub async fn a_start_of_a_program_that_does_not_exist_is_refused(stage: &Stage) {
    for (session, program, expected) in [
        ("missing", "/no/such/program", 127),
        ("directory", "/etc", 126),
    ] {
        let plan = stage.plan(session, &[program, "argument"]);
        stage.runtime().create(&plan).await.expect("created");
        let error = stage.runtime().start(&plan.key).await;
        let error = error.expect_err("there is no such program");
        assert!(!error.is_ambiguous());
        match &error {
            RuntimeError::NoSuchCommand {
                command, exit_code, ..
            } => assert_eq!((command.as_str(), *exit_code), (program, expected)),
            other => panic!("{other}"),
        }
        until("its end", || stage.pids(&plan.key).is_empty().then_some(())).await;
        stage
            .runtime()
            .remove(&[plan.key])
            .await
            .remove(0)
            .expect("removed");
    }
}

pub async fn signals_reach_the_program(stage: &Stage) {
    let script = "trap 'exit 3' TERM; echo trapped; while :; do sleep 0.05; done";
    let container = stage.run(&stage.plan("alice", &["sh", "-c", script])).await;
    super::logs::until_logged(stage, &container.key, "trapped").await;
    let sent = stage
        .runtime()
        .signal(&container.key, &container.pidfd, Signal::SIGTERM.into());
    assert!(sent.await.expect("sent"));
    assert!(container.pidfd.wait_dead(PATIENCE).expect("poll works"));
    assert_eq!(
        stage.runtime().exit_code(&container.key, PATIENCE).await,
        Some(3)
    );
}

pub async fn removal_leaves_nothing_behind_and_may_be_repeated(stage: &Stage) {
    let container = stage.run_idle("alice").await;
    let files_dir = stage.plan("alice", &[]).files_dir;
    let never = stage.plan("absent", &[]).key;
    assert!(files_dir.exists());
    assert!(!stage.cgroups_left(&container.key).is_empty());
    container.kill();
    let keys = [container.key.clone(), never];
    for attempt in 0..2 {
        for result in stage.runtime().remove(&keys).await {
            result.unwrap_or_else(|error| panic!("attempt {attempt}: {error}"));
        }
        assert_eq!(
            stage
                .runtime()
                .find(&container.key)
                .await
                .expect("answered"),
            None
        );
        assert_eq!(stage.runtime().list().await.expect("answered"), []);
        assert!(!files_dir.exists());
        assert_eq!(
            stage.cgroups_left(&container.key),
            Vec::<std::path::PathBuf>::new()
        );
    }
}

pub async fn a_live_container_is_not_removed(stage: &Stage) {
    let live = stage.run_idle("live").await;
    let dead = stage.run_idle("dead").await;
    dead.kill();
    let keys = [live.key.clone(), dead.key.clone()];
    let results = stage.runtime().remove(&keys).await;
    match &results[..] {
        [Err(RuntimeError::StillAlive { pids, .. }), Ok(())] => assert!(pids.contains(&live.pid)),
        other => panic!("{other:?}"),
    }
    assert!(!live.pidfd.is_dead().expect("poll works"));
    let left = stage.runtime().list().await.expect("listed");
    assert_eq!(
        left.iter().map(|each| &each.key).collect::<Vec<_>>(),
        [&live.key]
    );
    assert!(stage.plan("live", &[]).files_dir.exists());
}

pub async fn a_container_that_never_started_is_removed(stage: &Stage) {
    let plan = stage.plan("alice", &["sleep", "1000"]);
    stage.runtime().create(&plan).await.expect("created");
    let results = stage
        .runtime()
        .remove(std::slice::from_ref(&plan.key))
        .await;
    assert!(matches!(results[..], [Ok(())]), "{results:?}");
    assert_eq!(
        stage.runtime().find(&plan.key).await.expect("answered"),
        None
    );
    assert!(!plan.files_dir.exists());
    stage
        .runtime()
        .create(&plan)
        .await
        .expect("the key is free again");
}

pub async fn instances_do_not_see_each_other(stage: &Stage) {
    let container = stage.run_idle("alice").await;
    let other = stage.runtime_of(&random_instance());
    assert_eq!(other.list().await.expect("listed"), []);
    assert_eq!(other.find(&container.key).await.expect("answered"), None);
    assert!(other.pids(&container.key).expect("seen").is_empty());
    assert!(!other.owns_pid(&container.key, container.pid));
    // The other instance owns nothing, so there is nothing to remove.
    let results = other.remove(std::slice::from_ref(&container.key)).await;
    assert!(matches!(results[..], [Ok(())]), "{results:?}");
    assert!(!container.pidfd.is_dead().expect("poll works"));
    let found = stage
        .runtime()
        .find(&container.key)
        .await
        .expect("answered")
        .expect("found");
    assert_eq!(found.pid, Some(container.pid));
    assert!(stage.plan("alice", &[]).files_dir.exists());
}

pub async fn a_start_without_an_answer_is_found_by_its_processes(stage: &Stage) {
    let plan = stage.plan("alice", &["sleep", "1000"]);
    let forgetful = stage.forgetful_runtime();
    forgetful.create(&plan).await.expect("created");
    let error = forgetful.start(&plan.key).await.expect_err("no answer");
    assert!(error.is_ambiguous(), "{error}");
    // A process that only served the start may have ended before the next check.
    until("a process of the lost start", || {
        let runtime = stage.runtime();
        let mut pids = stage.pids(&plan.key).into_iter();
        pids.find(|pid| runtime.owns_pid(&plan.key, *pid))
    })
    .await;
    // Until no process appears any more: the lost start may have been at any point.
    until("the end of the lost start", || {
        for pid in stage.pids(&plan.key) {
            if let Ok(pidfd) = PidFd::open(pid)
                && stage.runtime().owns_pid(&plan.key, pid)
            {
                pidfd.kill().expect("the signal is sent");
            }
        }
        stage.pids(&plan.key).is_empty().then_some(())
    })
    .await;
}
