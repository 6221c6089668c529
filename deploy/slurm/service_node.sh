#!/usr/bin/env bash
# One node of the service's job step: Ray, and on the first node `dataservice serve` besides.
#
#     srun ... --ntasks-per-node=1 deploy/slurm/service_node.sh CONFIG [option of `dataservice serve` ...]
#
# job.sh calls it. It speaks with the batch script, and its nodes with each other, through files in
# DATASERVICE_RUN, a folder that all nodes see:
#
#     cluster    Ray's address                            written by the first node
#     endpoint   the coordinator's, once the service is up                   "
#     up         it has been up                                              "
#     stop       asks the service to end, in order        written by the batch script
#     ended      the service has ended                    written by the first node
#
# The first node ends the service before Ray; the others wait for that, and join again, up to
# REJOINS times, where their own Ray ends.
set -euo pipefail

STOP_S=90    # the service may take to stop
REJOINS=5
REJOIN_S=10  # between two attempts

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
run=${DATASERVICE_RUN:?the folder of the run}
name=$(hostname)
say() { printf '%s: %s\n' "$name" "$*" >&2; }

pids=()
stop() {
  trap '' HUP INT TERM
  local i
  if [ "${SLURM_NODEID:-0}" = 0 ]; then rm -f "$run/endpoint"; fi
  for ((i = ${#pids[@]} - 1; i >= 0; i--)); do # the service before Ray
    kill -TERM "${pids[i]}" 2>/dev/null || true
    ended_within "$STOP_S" "${pids[i]}"
  done
  if [ "${SLURM_NODEID:-0}" = 0 ]; then : >"$run/ended"; fi
}

ended_within() {
  local left=$(($1 * 10))
  while kill -0 "$2" 2>/dev/null && [ $((left -= 1)) -gt 0 ]; do sleep 0.1; done
  if kill -KILL "$2" 2>/dev/null; then say "process $2 had to be killed"; fi
  wait "$2" 2>/dev/null || true
}

trap stop EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

alive() { kill -0 "$1" 2>/dev/null; }

# wait_for FILE PID: until FILE is there; fails when PID ended before, and when all shall stop.
wait_for() {
  until [ -s "$1" ]; do
    if [ -e "$run/stop" ] || [ -e "$run/ended" ]; then return 1; fi
    alive "$2" || return 1
    sleep 0.5
  done
}

first() {
  RAY_NODE_PORT=0 RAY_NODE_FILE=$run/cluster "$here/../vm/ray_node.sh" head &
  pids=($!)
  wait_for "$run/cluster" "${pids[0]}" || exit 1

  local log=$run/serve.log known=$run/port-$name endpoint port=()
  if [ -s "$known" ]; then port=(--port "$(cat "$known")"); fi # trainers have it
  : >"$log"
  dataservice serve "$@" --address "$(cat "$run/cluster")" --host 0.0.0.0 "${port[@]}" >"$log" 2>&1 &
  pids+=($!)
  until endpoint=$(sed -n 's/^serving on //p' "$log") && [ -n "$endpoint" ]; do
    if [ -e "$run/stop" ]; then exit 0; fi
    if ! alive "${pids[1]}"; then
      say "the service did not start: see $log"
      exit 1
    fi
    sleep 0.5
  done
  printf '%s\n' "${endpoint##*:}" >"$known"
  printf '%s\n' "$endpoint" >"$run/endpoint.new"
  mv "$run/endpoint.new" "$run/endpoint"
  : >"$run/up"
  say "the service is at $endpoint"

  while alive "${pids[1]}"; do
    if [ -e "$run/stop" ]; then exit 0; fi
    sleep 1
  done
  say "the service has ended; the end of its output:"
  tail -n 20 "$log" >&2
  exit 1
}

other() {
  local times=0
  while [ ! -e "$run/ended" ]; do
    wait_for "$run/cluster" $$ || exit 0
    "$here/../vm/ray_node.sh" "$(cat "$run/cluster")" &
    pids=($!)
    while alive "${pids[0]}" && [ ! -e "$run/ended" ]; do sleep 1; done
    if [ -e "$run/ended" ]; then exit 0; fi
    if [ $((times += 1)) -gt "$REJOINS" ]; then
      say "Ray ended for the ${times}th time; the service goes on without this node"
      exit 1
    fi
    sleep "$REJOIN_S"
  done
}

mkdir -p "$run/log"
exec 2>>"$run/log/$name.log"
if [ "${SLURM_NODEID:-0}" = 0 ]; then first "$@"; else other; fi
