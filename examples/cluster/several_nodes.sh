#!/usr/bin/env bash
# Train on several machines that share a file system at $SHARED.
#
# On the first machine:      examples/cluster/several_nodes.sh head
# On every other machine:    examples/cluster/several_nodes.sh join HEAD_ADDRESS
# Then, on the first:        examples/cluster/several_nodes.sh train GPUS [KEY=VALUE]...
# Afterwards, everywhere:    ray stop
set -euo pipefail

port=6379
shared="${SHARED:-$PWD}"
# What a rank of NCCL looks for other ranks on; `ip -brief address` lists the names.
export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-eth0}"
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$NCCL_SOCKET_IFNAME}"

case "${1:-}" in
  head)
    ray start --head --port="$port" --disable-usage-stats
    ;;
  join)
    ray start --address="$2:$port" --disable-usage-stats
    ;;
  train)
    gpus="$2"
    shift 2
    cd "$shared"
    # One rollout worker for each rank; shards within a node, copies across nodes (HSDP) where a
    # node has 8 GPUs: actor.shard_size=8.
    exec agentrl train --env code_sandbox cluster=ray cluster.address=auto \
      cluster.gpus="$gpus" rollout.workers="$gpus" \
      model.path=Qwen/Qwen3-0.6B trainer.run_dir="$shared/runs/several-nodes" "$@"
    ;;
  *)
    echo "usage: $0 head | join HEAD_ADDRESS | train GPUS [KEY=VALUE]..." >&2
    exit 2
    ;;
esac
