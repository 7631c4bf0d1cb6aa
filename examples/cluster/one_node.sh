#!/usr/bin/env bash
# Train on the GPUs of one machine; Ray is started for the run and ends with it.
#
#   examples/cluster/one_node.sh [GPUS] [KEY=VALUE]...
#
# With 0 GPUs two CPU ranks train the embedded model, to try it out.
set -euo pipefail

gpus="${1:-0}"
shift || true

if [ "$gpus" -gt 0 ]; then
  # A rollout worker shares each GPU with a rank.
  ranks=(cluster.gpus="$gpus" rollout.workers="$gpus" model.path=Qwen/Qwen3-0.6B)
else
  ranks=(placement.pools.train.ranks=2 rollout.workers=2)
fi

exec agentrl train --env guess_number cluster=ray "${ranks[@]}" "$@"
