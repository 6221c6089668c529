#!/usr/bin/env bash
# One node of the trainer's job step: torchrun with its share of the ranks; job.sh calls it.
#
#     srun ... --ntasks-per-node=1 deploy/slurm/train_node.sh ARGUMENT_OF_TORCHRUN ...
set -euo pipefail

first=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)
torchrun --nnodes="$SLURM_STEP_NUM_NODES" --node-rank="$SLURM_NODEID" \
  --nproc-per-node="${TRAIN_RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}" \
  --master-addr="$first" --master-port="$MASTER_PORT" "$@" &
pid=$!
# job.sh makes this file; srun would kill at once, and scancel does not reach such a step of a
# heterogeneous job.
while kill -0 "$pid" 2>/dev/null; do
  if [ -e "$TRAIN_STOP" ]; then
    kill -TERM "$pid"
    break
  fi
  sleep 0.5
done
wait "$pid"
