#!/usr/bin/env bash
# One node of the trainer's job step: torchrun with its share of the ranks; job.sh calls it.
#
#     srun ... --ntasks-per-node=1 deploy/slurm/train_node.sh ARGUMENT_OF_TORCHRUN ...
set -euo pipefail

first=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)
if [ "$SLURM_NODEID" = 0 ]; then # by which job.sh ends it
  printf '%s\n' "$SLURM_JOB_ID.$SLURM_STEP_ID" >"$DATASERVICE_RUN/train.step"
fi
exec torchrun --nnodes="$SLURM_STEP_NUM_NODES" --node-rank="$SLURM_NODEID" \
  --nproc-per-node="${TRAIN_RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}" \
  --master-addr="$first" --master-port="$MASTER_PORT" "$@"
