# Runs outside of the container and outlives the daemon: waits for the container's init and writes
# down how it ended. Standard output is the pipe on which the init reports that it is ready.
#
# $1: the container's directory. $2: the init's script. The rest is for the init.
dir=$1
init=$2
shift 2
unshare --fork --pid --mount-proc --net --ipc --uts -- sh -c "$init" init "$@" </dev/null \
    3>&1 >>"$dir/stdout" 4>"$dir/exit.new" 5>>"$dir/stderr" 2>"$dir/trouble"
# The init says how it ended unless it was killed; what unshare makes of that differs between its
# versions.
[ -s "$dir/exit.new" ] || echo 137 >"$dir/exit.new"
mv "$dir/exit.new" "$dir/exit"
