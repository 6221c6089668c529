#!/usr/bin/env bash
# Ray on this machine, in the foreground, until SIGINT, SIGTERM or SIGHUP: of a cluster's first
# machine, or of one that joins it.
#
#     deploy/vm/ray_node.sh head [option of `ray start` ...]
#     deploy/vm/ray_node.sh HOST:PORT [option of `ray start` ...]
#
# Nothing of Ray's remains when it ends: no process, nor the folder with its logs and sockets; where
# it is killed itself, the next start on the machine removes that folder. Other clusters on the
# machine are left alone. From the environment:
#
#     RAY_AUTH_TOKEN_PATH   file with the cluster's token (`openssl rand -hex 32`), the same on every
#                           machine; needed
#     RAY_NODE_CPUS         cores that Ray counts; default: those that this process may run on
#     RAY_NODE_RESOURCES    default {"data_node": 1}: a machine that holds data and decodes; {}: not
#     RAY_NODE_INTERFACE    network interface that others reach it by, such as ib0; default: the
#                           address that this machine's name has
#     RAY_NODE_PORT         of the head; default 6379, 0: any free one
#     RAY_NODE_FILE         of the head: the cluster's address is written to it once it is up
set -euo pipefail

START_S=90 # a node may take to start
STOP_S=60  # and to stop, before it is killed

say() { printf 'ray node: %s\n' "$*" >&2; }
fail() { say "$@"; exit 2; }

role=${1:-}
case $role in
  head | *:[0-9]*) shift ;;
  *) fail "usage: deploy/vm/ray_node.sh head|HOST:PORT [option of 'ray start' ...]" ;;
esac
command -v ray >/dev/null || fail "there is no program ray: activate the service's environment first"
token=${RAY_AUTH_TOKEN_PATH:-}
[ -s "$token" ] || fail "RAY_AUTH_TOKEN_PATH is \"$token\": no such file, or empty; make it by" \
  "'umask 077; openssl rand -hex 32 > FILE', the same on every machine"
unset RAY_ADDRESS RAY_AUTH_TOKEN RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER
RAY_AUTH_TOKEN_PATH=$(realpath "$token") # Ray's processes have folders of their own
export RAY_AUTH_TOKEN_PATH RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 RAY_DEDUP_LOGS=0

# As Ray's own choice is the way to the internet, which is not the way between the machines.
own_address() {
  if [ -n "${RAY_NODE_INTERFACE:-}" ]; then
    ip -4 -o address show dev "$RAY_NODE_INTERFACE" scope global | awk '{sub("/.*", "", $4); print $4; exit}'
  else
    getent ahostsv4 "$(hostname)" | awk '$1 !~ /^127\./ {print $1; exit}'
  fi
}

files= # of Ray's; a short path, as a socket's has 107 bytes at most
pid=

# shellcheck disable=SC2317 # the traps call it
stop() {
  local left=$((STOP_S * 10))
  trap '' HUP INT TERM
  if [ -n "$pid" ] && kill -TERM "$pid" 2>/dev/null; then
    while kill -0 "$pid" 2>/dev/null && [ $((left -= 1)) -gt 0 ]; do sleep 0.1; done
  fi
  # Also where Ray was killed: what it had started has its session, and must not outlive it.
  if [ -n "$pid" ] && pkill -KILL -s "$pid" 2>/dev/null; then
    say "Ray had not ended all of its processes: killed"
  fi
  if [ -n "$files" ]; then rm -rf "$files"; fi
}

trap stop EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

# A folder is in use while its lock is held.
for old in /tmp/ray-node.*; do
  if [ -O "$old/lock" ] && flock -n "$old/lock" true; then rm -rf "$old"; fi
done
files=$(mktemp -d /tmp/ray-node.XXXXXX)
exec 9>"$files/lock"
flock 9
log=$files/start.log
options=(--block --log-color=false --num-cpus="${RAY_NODE_CPUS:-$(nproc)}"
  --resources="${RAY_NODE_RESOURCES:-{\"data_node\": 1\}}"
  --object-store-memory=100000000) # pixels never go through it
address=$(own_address) || true
if [ -n "$address" ]; then
  options+=(--node-ip-address="$address")
elif [ -n "${RAY_NODE_INTERFACE:-}" ]; then
  fail "RAY_NODE_INTERFACE is \"$RAY_NODE_INTERFACE\": there is no such interface, or it has no IPv4 address"
fi
if [ "$role" = head ]; then
  options+=(--head --port="${RAY_NODE_PORT:-6379}" --temp-dir="$files/ray" --include-dashboard=false)
else
  options+=(--address="$role" --temp-dir="$files/ray")
fi

# In a session of its own: what is sent to this one's group reaches this script, which stops it.
setsid ray start "${options[@]}" "$@" >"$log" 2>&1 9>&- &
pid=$!
left=$((START_S * 5))
until grep -qs 'Ray runtime started' "$log"; do
  if ! kill -0 "$pid" 2>/dev/null || [ $((left -= 1)) -eq 0 ]; then
    say "it did not start within $START_S s; its log:"
    cat "$log" >&2
    exit 1
  fi
  sleep 0.2
done
if [ "$role" = head ]; then
  role=$(cat "$files/ray/ray_current_cluster")
  if [ -n "${RAY_NODE_FILE:-}" ]; then
    printf '%s\n' "$role" >"$RAY_NODE_FILE.new"
    mv "$RAY_NODE_FILE.new" "$RAY_NODE_FILE"
  fi
fi
say "up, in the cluster at $role"
code=0
wait "$pid" || code=$?
say "Ray has ended (exit code $code)"
exit 1
