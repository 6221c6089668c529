#!/usr/bin/env bash
# Joins Ray as a node of this container, and serves on it:
#
#     serve-on-ray CONFIG [option of `dataservice serve` ...]
#
# The command that joins comes in KUBERAY_GEN_RAY_START_CMD, which KubeRay sets, with --block; Ray's
# token in its own variables. The coordinator lives on the node of `serve`, so both are one container.
# SIGTERM, SIGINT: the service ends in order, then the node. The exit code is that of the service; when
# Ray's node ends first, the service says so and ends with 2.
# shellcheck disable=SC2317 # traps call the functions
set -euo pipefail

START_S=120 # the node may take to join
STOP_S=90   # the service may take to end, 60 s by its own word; the node gets as long

say() { printf 'serve-on-ray: %s\n' "$*" >&2; }

case ${1:-} in
  '' | -*)
    say "usage: serve-on-ray CONFIG [option of 'dataservice serve' ...]"
    exit 2
    ;;
esac
if [ -z "${KUBERAY_GEN_RAY_START_CMD:-}" ]; then
  say "KUBERAY_GEN_RAY_START_CMD is not set: it holds the 'ray start --address=... --block' that joins"
  exit 2
fi

export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token} # without a token Ray does not join

node=
service=
asked=

ask() { # the service when it runs; what else there is ends on the way out
  asked=$1
  if [ -n "$service" ]; then kill -TERM "$service" 2>/dev/null || true; else exit "$1"; fi
}

# ended PID: waits for a process of ours, and kills what runs in its session when it does not end.
ended() {
  local left=$((STOP_S * 10))
  while kill -0 "$1" 2>/dev/null && [ $((left -= 1)) -gt 0 ]; do sleep 0.1; done
  if kill -KILL -- "-$1" 2>/dev/null; then say "process group $1 had to be killed"; fi
  wait "$1" 2>/dev/null || true
}

stop() {
  trap '' HUP INT TERM
  if [ -n "$service" ]; then ended "$service"; fi
  if [ -n "$node" ]; then
    kill -TERM "$node" 2>/dev/null || true
    ended "$node"
  fi
  rm -f "$log"
}

log=$(mktemp)
trap stop EXIT
trap 'ask 129' HUP
trap 'ask 130' INT
trap 'ask 143' TERM

ulimit -n 65536 2>/dev/null || say "open files stay at $(ulimit -n)"
setsid bash -c "exec $KUBERAY_GEN_RAY_START_CMD" > >(tee "$log") 2>&1 &
node=$!
left=$((START_S * 5))
until grep -qs 'Ray runtime started' "$log"; do
  if ! kill -0 "$node" 2>/dev/null; then
    say "ray start has ended; its output is above"
    exit 1
  fi
  if [ $((left -= 1)) -eq 0 ]; then
    say "Ray's node did not join within $START_S s"
    exit 1
  fi
  sleep 0.2
done

setsid dataservice serve "$@" --address "${RAY_ADDRESS:-auto}" &
service=$!
while kill -0 "$service" 2>/dev/null; do
  code=0
  wait "$service" || code=$? # a signal ends the wait before the service has ended
done
exit "${asked:-$code}"
