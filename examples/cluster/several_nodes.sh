#!/usr/bin/env bash
# Trains over the nodes named on the command line; the first one is this machine.
#   bash several_nodes.sh HEAD NODE...
set -euo pipefail
head=$1
shift
port=6379
gpus_per_node=8

ray start --head --port="$port" --disable-usage-stats
trap 'ray stop; for node in "$@"; do ssh "$node" ray stop; done' EXIT
for node in "$@"; do
  ssh "$node" ray start --address="$head:$port" --disable-usage-stats
done

num_gpus=$((gpus_per_node * (1 + $#)))
agentrl train --env code_sandbox model.path="${MODEL:?a directory that all nodes see}" \
  trainer.run_dir="${RUN:?a directory that all nodes see}" actor.precision=bf16 \
  cluster=ray cluster.address=auto cluster.gpus="$num_gpus" rollout.workers="$num_gpus"
