"""GRPO on a text game, from the parts: reads top to bottom, runs in about a minute on a CPU.

    python examples/minimal_grpo.py [--steps 20] [--prompts 32] [--samples 8]

`agentrl train` is the same algorithm with retries, deadlines, checkpoints and reports around it.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from agentrl import Task, Trajectory
from agentrl.agent.loop import AgentLoop, EpisodeRequest, LoopLimits
from agentrl.agent.renderer import Renderer
from agentrl.algo.aggregate import denominators, token_weights
from agentrl.algo.credit import CreditBatch
from agentrl.algo.group_baselines import grpo
from agentrl.algo.loss import PolicyLoss
from agentrl.algo.policy_losses import Vanilla
from agentrl.batch import Batch
from agentrl.dist.config import ActorConfig
from agentrl.dist.engines.fsdp import FSDPEngine
from agentrl.dist.ranks import Ranks
from agentrl.dist.weight_sync.inproc import InprocWeightSync
from agentrl.env.config import EnvConfig
from agentrl.env.host import EnvHosts
from agentrl.rollout.engines.config import HFEngineConfig
from agentrl.rollout.engines.hf import HFEngine
from agentrl.seeding import derive_seed
from agentrl.testing import FakeSandboxes
from agentrl.train.config import ModelConfig
from agentrl.train.environments import make_environments
from agentrl.train.open_model import open_model

ENV = EnvConfig(id="guess_number")


async def main(num_steps: int, num_prompts: int, num_samples: int, warm_steps: int) -> None:
    # The environment, and a small model warmed up on its (imperfect) demonstrations.
    (game,) = make_environments(ENV)
    train_tasks, test_tasks = game.env.tasks("train"), game.env.tasks("test")[:256]
    sandboxes = FakeSandboxes()  # the game needs none
    model_config = ModelConfig()
    model_config.warm_start.steps = warm_steps
    model = await open_model(model_config, [game], sandboxes=sandboxes)

    # One engine samples, the other trains; the weights go across after every step.
    sampler = HFEngine(copy.deepcopy(model.model), HFEngineConfig(max_context=256))
    trainer = FSDPEngine(
        model.model, model.tokenizer, ActorConfig(lr=5e-4), ranks=Ranks.single("cpu")
    )
    sync = InprocWeightSync()
    await sampler.start()

    # The loop plays one episode: generate, step the environment, append, until it ends.
    hosts = EnvHosts(ENV)
    loop = AgentLoop(
        generate=sampler.generate,
        renderer=Renderer(model.tokenizer),
        toolbox=game.toolbox,
        sandboxes=sandboxes,
        limits=LoopLimits(max_turns=5, max_turn_tokens=16, max_context_tokens=256),
        end_session=sampler.end_session,
    )

    async def play(task: Task, group: str, sample: int, seed: int) -> Trajectory:
        request = EpisodeRequest(
            env_id=ENV.id, task=task, seed=seed, group_id=group, sample_index=sample
        )
        return await loop.run(await hosts.open(), request)

    async def success_on(tasks: list[Task]) -> float:
        played = await asyncio.gather(
            *(
                play(task, f"test-{i}", 0, derive_seed("test", task.id))
                for i, task in enumerate(tasks)
            )
        )
        return sum(bool(t.score and t.score.success) for t in played) / len(played)

    print(f"before: {await success_on(list(test_tasks)):.3f} of the test tasks")
    for step in range(num_steps):
        # Sample a group of episodes for each prompt.
        tasks = [
            train_tasks[(step * num_prompts + i) % len(train_tasks)] for i in range(num_prompts)
        ]
        episodes = await asyncio.gather(
            *(
                play(task, f"{step}-{i}", sample, derive_seed(step, task.id, sample))
                for i, task in enumerate(tasks)
                for sample in range(num_samples)
            )
        )
        # Advantage: how much better than the rest of its group an episode did.
        earned = rewards_of(episodes, num_samples)
        batch = pack(episodes, grpo(earned).advantages.float())
        # One clipped policy-gradient step on the tokens that the model sampled.
        num_tokens = int(batch.tokens["loss_mask"].sum())
        loss = PolicyLoss(token_loss=Vanilla(clip_high=0.28), num_tokens=num_tokens)
        trainer.train_mini_batch(batch, loss, tokens_per_micro_batch=4096)
        await sync.publish(trainer, sampler, version=step + 1)
        print(f"step {step + 1}: reward {float(earned.returns.mean()):.3f}")
    print(f"after: {await success_on(list(test_tasks)):.3f} of the test tasks")
    await hosts.close()
    await sampler.close()


def rewards_of(episodes: list[Trajectory], num_samples: int) -> CreditBatch:
    """What each episode earned, where, and which episodes answer the same prompt."""
    turns = [turn for episode in episodes for turn in episode.turns]
    scores = [episode.score.reward if episode.score else 0.0 for episode in episodes]
    return CreditBatch(
        group=torch.arange(len(episodes)) // num_samples,
        turns_per_session=torch.tensor([len(episode.turns) for episode in episodes]),
        tokens_per_turn=torch.tensor([turn.end - turn.start for turn in turns]),
        outcome_rewards=torch.tensor(scores, dtype=torch.float64),
        turn_rewards=torch.tensor([turn.reward for turn in turns], dtype=torch.float64),
        truncated=torch.tensor([episode.turns[-1].truncated for episode in episodes]),
    )


def pack(episodes: list[Trajectory], advantages: torch.Tensor) -> Batch:
    """Put all episodes into one ragged batch, with an advantage at every sampled token."""
    segments = [episode.segments[0] for episode in episodes]
    fields = ("ids", "loss_mask", "logprobs")
    batch = Batch.from_rows(
        {name: [torch.from_numpy(getattr(s, name)) for s in segments] for name in fields}
    )
    mask, session = batch.tokens["loss_mask"], batch.row_of_token
    totals = denominators(mask, session)
    batch.tokens["old_logprobs"] = batch.tokens["logprobs"]
    batch.tokens["advantages"] = torch.zeros(len(mask)).masked_scatter(mask, advantages)
    batch.tokens["loss_weights"] = token_weights(mask, session, None, "token-mean", totals)
    return batch


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--warm-steps", type=int, default=800)
    given = parser.parse_args()
    asyncio.run(main(given.steps, given.prompts, given.samples, given.warm_steps))
