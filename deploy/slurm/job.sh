#!/usr/bin/env bash
# What the batch scripts beside this file share; they source it.
#
# A run has a folder that all nodes see and nobody else reads, DATASERVICE_RUN (default: one of the
# job's own beside where it was submitted), with the tokens and the certificate of this run and the
# files by which its parts find each other (service_node.sh). The environment of `sbatch` is the
# nodes': activate the Python environment before. Also from it:
#
#     DATASERVICE_DEPLOY     this folder's parent; default: deploy/ below where it was submitted
#     DATASERVICE_INSECURE   1: no TLS and no token, in a network that you trust
#     TRAIN_RANKS_PER_NODE   default: the node's GPUs
#     TRAIN_ATTEMPTS         times that the trainer is started, each from its checkpoint; default 3
#     SERVICE_ATTEMPTS       likewise, from its journal; default 5
#
# Either side may end and be started again while the other goes on: trainers wait for the service
# (PackStream's timeout_s, 300 s) at the endpoint that they know.
set -euo pipefail

DEPLOY=${DATASERVICE_DEPLOY:-$SLURM_SUBMIT_DIR/deploy}
export DATASERVICE_RUN=${DATASERVICE_RUN:-$SLURM_SUBMIT_DIR/dataservice-$SLURM_JOB_ID}
export TRAIN_STOP=$DATASERVICE_RUN/train.stop-$SLURM_JOB_ID # asks the trainer to end
STABLE_S=600 # an attempt that lived so long does not count
ENDPOINT_S=${ENDPOINT_S:-1800} # a service may take to come up
TRAIN_END_S=60 # a trainer may take to end

say() { printf '%s %s\n' "$(date +%H:%M:%S)" "$*" >&2; }

# Tokens, a certificate and what the two sides are told of them. `serving` of the config has to name
# the same files (see deploy/slurm/serving.yaml).
prepare_run() {
  local before
  before=$(umask)
  umask 077
  mkdir -p "$DATASERVICE_RUN/log"
  chmod 700 "$DATASERVICE_RUN"
  local name
  for name in token ray.token; do
    if [ ! -s "$DATASERVICE_RUN/$name" ]; then openssl rand -hex 32 >"$DATASERVICE_RUN/$name"; fi
  done
  if [ ! -s "$DATASERVICE_RUN/tls.crt" ]; then
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 90 \
      -subj /CN=dataservice -addext subjectAltName=DNS:dataservice \
      -keyout "$DATASERVICE_RUN/tls.key" -out "$DATASERVICE_RUN/tls.crt" 2>/dev/null
  fi
  umask "$before"
  unset RAY_ADDRESS RAY_AUTH_TOKEN RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER
  export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$DATASERVICE_RUN/ray.token
  if [ "${DATASERVICE_INSECURE:-0}" = 0 ]; then
    export DATASERVICE_TLS_CA=$DATASERVICE_RUN/tls.crt DATASERVICE_TLS_SERVER_NAME=dataservice
    export DATASERVICE_TOKEN_FILE=$DATASERVICE_RUN/token
  fi
}

# serve_step CONFIG [option of srun ...]: the service, until it is told to stop; started again.
serve_step() {
  local config=$1 attempt=0 began code options=()
  if [ "${DATASERVICE_INSECURE:-0}" != 0 ]; then options=(--insecure); fi
  while :; do
    rm -f "$DATASERVICE_RUN"/{cluster,endpoint,up,ended,serve.log}
    if [ -e "$DATASERVICE_RUN/stop" ]; then return 0; fi
    began=$SECONDS code=0
    srun --job-name=service --ntasks-per-node=1 --kill-on-bad-exit=0 --no-kill "${@:2}" \
      "$DEPLOY/slurm/service_node.sh" "$config" "${options[@]}" || code=$?
    if [ -e "$DATASERVICE_RUN/stop" ]; then return 0; fi
    if [ ! -e "$DATASERVICE_RUN/up" ]; then
      tail -n 20 "$DATASERVICE_RUN"/log/*.log "$DATASERVICE_RUN/serve.log" >&2 || true
      say "the service did not come up (exit code $code)"
      return 1
    fi
    if [ $((SECONDS - began)) -ge "$STABLE_S" ]; then attempt=0; fi
    if [ $((attempt += 1)) -ge "${SERVICE_ATTEMPTS:-5}" ]; then
      say "the service ended (exit code $code), for the ${attempt}th time: given up"
      return 1
    fi
    say "the service ended (exit code $code); it is started again"
  done
}

# Prints where the service is.
await_endpoint() {
  local end=$((SECONDS + ENDPOINT_S))
  until [ -s "$DATASERVICE_RUN/endpoint" ]; do
    if [ $SECONDS -ge $end ]; then
      say "no service in $DATASERVICE_RUN within $ENDPOINT_S s"
      return 1
    fi
    sleep 1
  done
  cat "$DATASERVICE_RUN/endpoint"
}

# train_step SRUN_OPTION ... -- ARGUMENT ...: torchrun on every node, `--endpoint` added to what it
# gets; started again while TRAIN_ATTEMPTS last.
train_step() {
  local attempt=0 code endpoint options=()
  while [ "$1" != -- ]; do options+=("$1"); shift; done
  shift
  export MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
  while :; do
    endpoint=$(await_endpoint) || return 1
    code=0
    rm -f "$TRAIN_STOP"
    srun --job-name=train --ntasks-per-node=1 --kill-on-bad-exit=1 "${options[@]}" \
      "$DEPLOY/slurm/train_node.sh" "$@" --endpoint "$endpoint" || code=$?
    if [ "$code" = 0 ] || [ $((attempt += 1)) -ge "${TRAIN_ATTEMPTS:-3}" ]; then return "$code"; fi
    say "the trainer ended with exit code $code; it is started again from its checkpoint"
  done
}

# Ends train_step in the background, and what it runs. On SIGTERM srun itself would kill at once.
end_train() {
  local child children left=$((TRAIN_END_S * 5))
  children=$(pgrep -P "$train_pid") || true
  kill -TERM "$train_pid" 2>/dev/null || true # first, as it would start the trainer again
  for child in $children; do
    if [ "$(ps -o comm= -p "$child")" = srun ]; then
      : >"$TRAIN_STOP"
      while kill -0 "$child" 2>/dev/null && [ $((left -= 1)) -gt 0 ]; do sleep 0.2; done
    fi
    kill -TERM "$child" 2>/dev/null || true
  done
}

# Stops the trainer, then the service, in order. For SIGTERM: of `--signal=B:TERM@...` before the time
# is up, or of `scancel --batch --signal=TERM JOB`.
service_pid='' train_pid=''
stop_all() {
  trap '' TERM INT
  if [ -n "$train_pid" ]; then
    end_train
  fi
  if [ -n "$service_pid" ]; then
    : >"$DATASERVICE_RUN/stop"
    wait "$service_pid" 2>/dev/null || true
  fi
}

# Both beside each other, until the trainer is done or the service cannot be had any more. The exit
# code of the job is the trainer's, or 1.
run_both() {
  local code=0 ended=''
  trap stop_all EXIT
  trap 'say "SIGTERM: stopping"; exit 143' TERM INT
  wait -n -p ended "$service_pid" "$train_pid" || code=$?
  if [ "$ended" = "$service_pid" ]; then
    say "no service any more; the trainer is stopped"
    exit 1
  fi
  train_pid=''
  say "the trainer ended with exit code $code"
  exit "$code"
}
