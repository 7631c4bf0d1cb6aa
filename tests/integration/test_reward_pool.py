"""A reward model in a pool on real Ray: what episodes elsewhere get of it, and when it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import ray

from agentrl.agent.failures import classify
from agentrl.dist.config import PoolConfig
from agentrl.dist.ray_service import RewardModelClient, ServicePool
from agentrl.env.base import Episode
from agentrl.errors import ConfigError, RewardServiceError
from agentrl.reward.config import RewardConfig, RewardPartConfig
from agentrl.reward.part import Part
from agentrl.reward.run import make_reward
from agentrl.reward.service import RewardModels, ScoringService
from agentrl.testing import FakeSandboxes
from agentrl.testing.random_classifier import save_classifier
from agentrl.types import StopReason, Task

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> RewardConfig:
    model = save_classifier(tmp_path_factory.mktemp("rm"))
    kwargs = {"model": model, "max_tokens": 256, "device": "cpu", "batch_window_s": 0.5}
    return RewardConfig(parts=[RewardPartConfig(id="hf_classifier", name="rm", kwargs=kwargs)])


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def episodes() -> list[Episode]:
    said = ["yes", "no " * 40, "maybe " * 9, "a guess"]
    return [
        Episode(
            task=Task(id=str(index), data={}),
            messages=[
                {"role": "user", "content": "the question"},
                {"role": "assistant", "content": text},
            ],
            turns=[],
            info={},
            sandboxes=FakeSandboxes(),
        )
        for index, text in enumerate(said)
    ]


def only_part(reward: RewardConfig, service: ScoringService | None = None) -> Part:
    [part] = make_reward(reward, reward_timeout_s=60.0, given={}, service=service).parts
    assert isinstance(part, Part)
    return part


async def grades(part: Part) -> list[float]:
    found = await asyncio.gather(*(part.grade(episode) for episode in episodes()))
    return [grade.value for grade in found]


def test_a_pool_scores_as_the_process_itself_and_its_loss_is_no_reward(
    reward: RewardConfig,
) -> None:
    async def main() -> None:
        in_process = only_part(reward)
        want = await grades(in_process)
        await in_process.close()
        pool = ServicePool("the reward model", partial(RewardModels, reward), PoolConfig(ranks=1))
        try:
            client = await pool.start(timeout_s=120)
            part = only_part(reward, RewardModelClient(client))
            assert await grades(part) == pytest.approx(want, abs=1e-5)
            assert len(set(want)) == len(want)
            ray.kill(client.replicas[0])
            with pytest.raises(RewardServiceError, match="part 'rm': the reward model: replica 0"):
                await part.grade(episodes()[0])
        finally:
            pool.close()

    asyncio.run(asyncio.wait_for(main(), 150))
    assert classify(RewardServiceError("gone")) is StopReason.REWARD_INFRA_ERROR


def test_a_model_that_cannot_score_is_refused_at_the_start(reward: RewardConfig) -> None:
    [part] = reward.parts
    bad = RewardConfig(parts=[replace(part, kwargs=part.kwargs | {"max_tokens": 4096})])
    pool = ServicePool("the reward model", partial(RewardModels, bad), PoolConfig(ranks=1))
    with pytest.raises(ConfigError, match="fewer than max_tokens=4096"):
        asyncio.run(asyncio.wait_for(pool.start(timeout_s=120), 150))
