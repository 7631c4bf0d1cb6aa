#!/usr/bin/env bash
# Trains on all GPUs of this machine; Ray starts and ends with the run.
set -euo pipefail
num_gpus=$(nvidia-smi --list-gpus | wc -l)
agentrl doctor --env code_sandbox model.path="${MODEL:?a model directory or hub id}" cluster=ray cluster.gpus="$num_gpus"
agentrl train --env code_sandbox model.path="$MODEL" actor.precision=bf16 \
  cluster=ray cluster.gpus="$num_gpus" rollout.workers="$num_gpus"
