# Process 1 of the container: sets it up, runs the program as its child, passes signals on to it
# and reaps what it leaves, as docker-init does.
#
# $1: host name. $2: directory of the container's own files. $3: "loopback" when the files replace
# those in /etc. Then, each list preceded by its length: cgroup.procs files to join; binds as
# source, target, "ro" or "rw". The rest are operands for env(1): variables and the command.
#
# Descriptors: 3 to report that the program was started, 4 for its exit code, 5 for what it writes
# to its standard error; this script's own goes elsewhere until then.
fail() {
    echo "cannot $1" >&2
    echo 125 >&4
    exit 125
}
session=$1
files=$2
network=$3
joins=$4
shift 4
while [ "$joins" -gt 0 ]; do
    echo 0 >"$1" || fail "join $1"
    shift
    joins=$((joins - 1))
done
ip link set lo up || fail 'bring lo up'
echo "$session" >/proc/sys/kernel/hostname || fail 'set the host name'
if [ "$network" = loopback ]; then
    for name in hosts resolv.conf hostname; do
        mount -n -o bind,ro "$files/$name" "/etc/$name" || fail "mount /etc/$name"
    done
fi
# What will be /run is made elsewhere, because the files and the sources of binds may lie there.
mount -n -t tmpfs -o mode=755 conman /mnt || fail 'make a new /run'
binds=$1
shift
while [ "$binds" -gt 0 ]; do
    case $2 in
    /run/*)
        target=/mnt/${2#/run/}
        mkdir -p "$target"
        ;;
    *) target=$2 ;;
    esac
    mount -n -o "bind,$3" "$1" "$target" || fail "bind $1 to $2"
    shift 3
    binds=$((binds - 1))
done
mount -n --move /mnt /run || fail 'replace /run'
env -i --default-signal=HUP,INT,QUIT "$@" 2>&5 3>&- 4>&- 5>&- &
child=$!
for signal in TERM INT QUIT HUP USR1 USR2; do
    trap "kill -s $signal $child 2>/dev/null" "$signal"
done
# The caller of the start may have gone.
trap '' PIPE
echo ready >&3
exec 3>&-
# A signal interrupts wait; the program has ended only when it can be signalled no more.
while
    wait "$child"
    status=$?
    kill -0 "$child" 2>/dev/null
do :; done
echo "$status" >&4
exit "$status"
