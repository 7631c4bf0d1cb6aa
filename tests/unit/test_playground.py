"""Where a replica that was started again gets the policy from, and what an update does to turns."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentrl.config.load import load
from agentrl.errors import EngineError
from agentrl.playground import PolicySource, _announce_engines, _replicas
from agentrl.rollout.serving.config import ServingConfig
from agentrl.rollout.serving.replica_set import ReplicaSet
from agentrl.testing.fake_replica import FakeReplica
from agentrl.types import GenerateRequest, SamplingParams
from agentrl.weights.checksum import checksums

pytestmark = pytest.mark.timeout(60)
SETTINGS = ServingConfig(restart_pause_s=0.0, health_interval_s=3600.0)
DECOUPLED = ["algo.old_logprobs=recompute", "algo.correction.weight=token"]
INTERRUPT = "rollout.serving.interrupt_updates"

REQUEST = GenerateRequest(
    prompt_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=5, seed=1), session_id="s"
)


async def settle() -> None:
    for _ in range(60):
        await asyncio.sleep(0)


def weights(value: float) -> list[tuple[str, torch.Tensor]]:
    return [("weight", torch.full((4,), value))]


def restarted(policy: PolicySource) -> tuple[FakeReplica, float]:
    """Publish version 3, kill the replica, and return the next one and how many serve then."""
    spawned: list[FakeReplica] = []

    def spawn(number: int) -> FakeReplica:
        spawned.append(FakeReplica(number, version=-1))
        return spawned[-1]

    async def main() -> float:
        replicas = ReplicaSet(spawn, 1, SETTINGS, republish=policy.give)
        await replicas.start()
        await replicas.update_weights(weights(7.0), 3)
        turn = asyncio.create_task(replicas.generate(REQUEST))
        await settle()
        spawned[0].kill()  # under a turn, so that the set hears of it
        async with asyncio.timeout(30):
            while len(spawned) < 2 or not spawned[1].started:
                await asyncio.sleep(0)
        await settle()
        serving = replicas.metrics()["serving/replicas"]
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        await replicas.close()
        return serving

    serving = asyncio.run(main())
    return spawned[1], serving


def test_a_restarted_replica_gets_the_weights_as_they_are_now() -> None:
    policy = PolicySource(export=lambda: weights(7.0), version=3)
    replica, serving = restarted(policy)
    assert serving == 1 and replica.policy_version == 3


def test_weights_that_training_has_changed_since_are_not_sampled_from() -> None:
    _, serving = restarted(PolicySource(export=lambda: weights(8.0), version=3))
    assert serving == 0


def test_without_weights_in_this_process_a_replica_waits_for_the_next_update() -> None:
    _, serving = restarted(PolicySource())
    assert serving == 0
    with pytest.raises(EngineError, match="not in this process"):
        asyncio.run(PolicySource().give(FakeReplica(0)))


def test_what_is_given_is_the_policy_and_its_version() -> None:
    replica = FakeReplica(0, version=-1)

    async def main() -> None:
        await replica.start()
        served = await PolicySource(export=lambda: weights(7.0), version=5).give(replica)
        assert served.sums == checksums(weights(7.0)) and served.version == 5

    asyncio.run(main())
    assert replica.policy_version == 5


@pytest.mark.parametrize(
    ("given", "interrupts"),
    [
        ([], False),
        (["rollout.stragglers=cut", "rollout.oversubscribe=2"], True),
        (["rollout.stragglers=cut", "rollout.oversubscribe=2", f"{INTERRUPT}=false"], False),
        ([*DECOUPLED, "rollout.max_staleness=1"], True),
        ([*DECOUPLED, "rollout.max_staleness=1", "rollout.oversubscribe=0"], False),
    ],
)
def test_updates_interrupt_turns_where_any_can_be_under_way(
    given: list[str], interrupts: bool
) -> None:
    config = load(["env.id=guess_number", *given])
    nothing: Any = SimpleNamespace(model=None)  # spawns nothing before its start
    replicas = _replicas(config, nothing, PolicySource(), owned=True)
    assert replicas.config.interrupt_updates is interrupts


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["rollout=vllm"], "opening 1 engine of vllm\n"),
        (["rollout=vllm", "rollout.replicas_per_gpu=2"], "opening 2 engines of vllm\n"),
        (["rollout=vllm", "telemetry.quiet=true"], ""),
        ([], ""),  # that of this process is there at once
    ],
)
def test_engines_that_take_long_to_open_are_announced(
    capsys: pytest.CaptureFixture[str], settings: list[str], said: str
) -> None:
    _announce_engines(load(["env.id=guess_number", *settings]))
    assert capsys.readouterr() == ("", said)
