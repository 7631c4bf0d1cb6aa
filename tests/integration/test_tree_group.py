"""A group that branches, from a real model to advantages: every token where it was sampled."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agentrl.agent.limits import LoopLimits
from agentrl.agent.loop import AgentLoop
from agentrl.agent.renderer import Renderer
from agentrl.algo.config import CreditConfig
from agentrl.algo.credit import get_estimator
from agentrl.env.config import EnvConfig
from agentrl.env.entries import EnvEntry
from agentrl.env.host import EnvHosts
from agentrl.rollout.config import FailureConfig, TreeConfig
from agentrl.rollout.engines.config import HFEngineConfig
from agentrl.rollout.engines.hf import HFEngine
from agentrl.rollout.groups import GroupPlan, GroupRunner
from agentrl.rollout.stage import Stage
from agentrl.rollout.tasks import Dispatch
from agentrl.testing import FakeSandboxes, make_tokenizer
from agentrl.tool.binding import Toolbox
from agentrl.train.assemble import assemble
from agentrl.types import Task, TrajectoryGroup

ENV = "guess_number"
TASK = Task(id="40-49-47", data={"low": 40, "high": 49, "secret": 47})


def _model(vocab_size: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 512,
    }
    return LlamaForCausalLM(LlamaConfig(**config, tie_word_embeddings=False)).eval()


def _sample(model: LlamaForCausalLM, tokenizer: Any) -> TrajectoryGroup:
    async def scenario() -> TrajectoryGroup:
        engine = HFEngine(model, HFEngineConfig(num_slots=8, max_context=400))
        await engine.start()
        config = EnvConfig(id=ENV, kwargs={"turn_reward": 1.0}, process=True)
        hosts = EnvHosts(config)
        loop = AgentLoop(
            generate=engine.generate,
            renderer=Renderer(tokenizer),
            toolbox=Toolbox(),
            sandboxes=FakeSandboxes(),
            limits=LoopLimits(max_turn_tokens=12, max_response_tokens=60, max_context_tokens=400),
            end_session=engine.end_session,
            strict=True,
        )
        stage = Stage(entry=EnvEntry(name=ENV, config=config), hosts=hosts, loop=loop)
        runner = GroupRunner(
            stage.play,
            GroupPlan(
                purpose="train",
                num_samples=8,
                temperature=1.0,
                greedy_baseline=True,
                tree=TreeConfig(rounds=2, trunks=2),
            ),
            env_id=ENV,
            failure=FailureConfig(),
            seed=0,
            concurrency=asyncio.Semaphore(8),
            policy_version=lambda: engine.policy_version,
        )
        try:
            return await runner.run(Dispatch(index=0, epoch=0, task=TASK))
        finally:
            await hosts.close()
            await engine.close()

    return asyncio.run(asyncio.wait_for(scenario(), 120))


def test_a_tree_of_a_real_model_is_recorded_and_credited_token_for_token() -> None:
    tokenizer = make_tokenizer()
    model = _model(len(tokenizer))
    group = _sample(model, tokenizer)
    assert not any(member.failed for member in group.recorded)
    assert any(member.branch_turn > 0 for member in group.trajectories)

    # What is recorded of a branch is what the model gives at its tokens, prefix and all.
    for member in group.trajectories:
        segment = member.segments[0]
        ids = torch.from_numpy(segment.ids)
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1].float()
        expected = torch.log_softmax(logits, -1).gather(1, ids[1:, None]).squeeze(1).numpy()
        mask = segment.loss_mask[1:]
        np.testing.assert_allclose(segment.logprobs[1:][mask], expected[mask], atol=1e-4)

    # The greedy episode says the most likely token everywhere.
    greedy = group.baseline
    assert greedy is not None
    segment = greedy.segments[0]
    with torch.no_grad():
        best = model(torch.from_numpy(segment.ids)[None]).logits[0, :-1].argmax(-1).numpy()
    assert (segment.ids[1:][segment.loss_mask[1:]] == best[segment.loss_mask[1:]]).all()

    batch = assemble([group], {ENV: CreditConfig(advantage="tree")})
    sampled = sum(member.num_sampled_tokens for member in group.trajectories)
    assert batch.credit.num_tokens == sampled
    returns = [member.total_reward for member in group.trajectories]
    np.testing.assert_allclose(batch.credit.returns.numpy(), returns, atol=1e-9)
    advantages = get_estimator("tree")(batch.credit).advantages
    assert advantages.shape == (sampled,) and bool(advantages.isfinite().all())
