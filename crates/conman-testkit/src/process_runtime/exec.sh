# Runs inside the container's namespaces: joins its cgroups and becomes the command.
#
# $1: number of cgroup.procs files to join, then they. Then the working directory. The rest is the
# command line to become.
joins=$1
shift
while [ "$joins" -gt 0 ]; do
    echo 0 >"$1" || exit 125
    shift
    joins=$((joins - 1))
done
cd "$1" || exit 126
shift
exec "$@"
