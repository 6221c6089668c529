#!/usr/bin/env bash
# Two Ray data nodes on this machine, started by plain `ray start`, and the service on them.
#
#     deploy/two_nodes.sh CONFIG [option of `dataservice serve` ...]
#
# Everything of Ray's listens on loopback and asks for a token that is made here and lives in the
# environment of these processes only. When the service ends, or on SIGINT, SIGTERM or SIGHUP (exit
# code 128 + signal), what was started here is stopped by its own process ids, the service first;
# other clusters on the machine are left alone. Both nodes share this machine's cores, and each
# claims all of them.
set -euo pipefail

START_S=60 # a node may take to start
STOP_S=60  # a process may take to stop before it is killed

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PATH=$root/.venv/bin:$PATH

say() { printf 'two nodes: %s\n' "$*" >&2; }

case ${1:-} in
  '' | -*)
    say "usage: deploy/two_nodes.sh CONFIG [option of 'dataservice serve' ...]"
    exit 2
    ;;
esac

run= # everything Ray writes goes below it; short, as a socket's path has 107 bytes at most
pids=()

# Waits for a process of ours; kills it, and what runs in its session, when it does not end.
ended() {
  local left=$((STOP_S * 10))
  while kill -0 "$1" 2>/dev/null && [ $((left -= 1)) -gt 0 ]; do sleep 0.1; done
  if kill -KILL "$1" 2>/dev/null; then
    say "process $1 had to be killed"
    pkill -KILL -s "$1" || true
  fi
  wait "$1" 2>/dev/null || true
}

stop() {
  local i
  trap '' HUP INT TERM
  for ((i = ${#pids[@]} - 1; i >= 0; i--)); do # the service, the second node, the head
    kill -TERM "${pids[i]}" 2>/dev/null || continue
    ended "${pids[i]}"
  done
  if [ -n "$run" ]; then rm -rf "$run"; fi
}

trap stop EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

run=$(mktemp -d /tmp/two-nodes.XXXXXX)
read -r RAY_AUTH_TOKEN client_port < <(python3 - <<'PY'
import secrets
import socket

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    print(secrets.token_hex(32), free.getsockname()[1])
PY
)
unset RAY_ADDRESS RAY_AUTH_TOKEN_PATH
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 RAY_DEDUP_LOGS=0

# node NAME [option of `ray start` ...]: starts a node and waits until it is there. In a session of
# its own, as a signal to the whole process group would end it before the service.
node() {
  local log=$run/$1.log left=$((START_S * 5))
  setsid ray start --block --temp-dir="$run/ray" --resources='{"data_node": 1}' --log-color=false \
    --object-store-memory=100000000 "${@:2}" >"$log" 2>&1 &
  pids+=($!)
  until grep -qs 'Ray runtime started' "$log"; do
    if ! kill -0 $! 2>/dev/null || [ $((left -= 1)) -eq 0 ]; then
      say "node $1 did not start within $START_S s; its log:"
      cat "$log" >&2
      exit 1
    fi
    sleep 0.2
  done
}

# With this switch of Ray's own, a process that is told 127.0.0.1 keeps to it. `ray start --address`
# refuses the switch, and without it takes 127.0.0.1 and localhost for the machine's outward address;
# LOCALHOST is the same name to the resolver and not to Ray.
export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0
node head --head --port=0 --ray-client-server-port="$client_port" --include-dashboard=false
address=$(cat "$run/ray/ray_current_cluster")
RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=1 node second --address="LOCALHOST:${address##*:}"
say "Ray of two data nodes at $address"

dataservice serve "$@" --address "$address" &
pids+=($!)
wait $!
