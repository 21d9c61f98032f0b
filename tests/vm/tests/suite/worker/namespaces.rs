//! Row 27 of the fault matrix: no more namespaces. On a machine, since the limit is the whole kernel's.

use conman_vm::Machine;

const LIMIT: &str = "user.max_net_namespaces";

const LEFT: &str = "find /sys/fs/cgroup -name '*row27*'; ip -o link | grep -c .; ls /var/lib/conman/native/containers 2>/dev/null | grep row27 || true";

pub(crate) fn row_27_a_start_is_refused_by_the_limits_name(machine: &Machine) {
    let before = machine.run(LEFT).ok();
    let usual = machine.run(&format!("sysctl -n {LIMIT}")).ok();
    let _ = machine.run(&format!("sysctl -qw {LIMIT}=0")).ok();
    let refused = machine.run("conman run row27 --template web 2>&1; test $? != 0");
    let refused = refused.ok();
    assert!(refused.contains(LIMIT), "{refused}");
    let _ = machine
        .run(&format!("sysctl -qw {LIMIT}={}", usual.trim()))
        .ok();
    let _ = machine.run("conman rm row27 || true").ok();
    assert_eq!(machine.run(LEFT).ok(), before);
}
