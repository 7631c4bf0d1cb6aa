"""What runs inside an actor: opened and closed whole, and names mean there what they mean here."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agentrl.dist.rollout_worker import OpenHost, ProcessSetup, RolloutWorker
from agentrl.dist.weight_sync.shipment import ship
from agentrl.errors import ConfigError, EngineError, TrainingError
from agentrl.rollout.engines.config import HFEngineConfig
from agentrl.rollout.engines.hf import HFEngine
from agentrl.rollout.tasks import Dispatch
from agentrl.testing.random_models import build
from agentrl.types import Task, TrajectoryGroup
from agentrl.weights.served import refuse_other_weights

pytestmark = pytest.mark.timeout(60)
DISPATCH = Dispatch(index=0, epoch=0, task=Task(id="t", data={}))


@dataclass
class Host:
    engine: Any
    play: Callable[[], Any] = lambda: None
    events: list[str] = field(default_factory=list)

    async def run_group(self, purpose: str, dispatch: Dispatch) -> TrajectoryGroup:
        self.play()
        return TrajectoryGroup(
            id=purpose, task=dispatch.task, env_id="e", trajectories=[], policy_version=0
        )

    async def cut(self, purpose: str, dispatch: Dispatch) -> None:
        self.events.append(f"cut {purpose} {dispatch.index}")

    def metrics(self) -> dict[str, float]:
        return {}


def opener(host: Host) -> OpenHost:
    @asynccontextmanager
    async def open_host(index: int) -> AsyncIterator[Host]:
        host.events.append("opened")
        await host.engine.start()
        try:
            yield host
        finally:
            await host.engine.close()
            host.events.append("closed")

    return open_host


def here() -> ProcessSetup:
    return ProcessSetup.of_this_process()


def make_engine(seed: int) -> HFEngine:
    return HFEngine(build("qwen3", seed), HFEngineConfig(num_slots=4, max_context=64))


def test_a_worker_serves_what_it_was_sent_bit_for_bit() -> None:
    params = [(n, p.detach()) for n, p in build("qwen3", seed=1).named_parameters()]

    async def main() -> None:
        worker = RolloutWorker(opener(host := Host(make_engine(seed=2))), here())
        dtypes = await worker.start()
        assert dtypes == {name: "float32" for name, _ in params}
        with pytest.raises(EngineError, match="before it had any weights"):
            await worker.run_group("train", DISPATCH)
        sent = ship(params, version=7, bucket_bytes=4096, dtypes=dtypes, put=lambda b: b)
        assert len(sent.buckets) > 3
        refuse_other_weights(sent, await worker.load(7, *sent.buckets), where="it")
        assert (await worker.run_group("train", DISPATCH)).id == "train"
        await worker.close()
        await worker.close()
        assert host.events == ["opened", "closed"]

    asyncio.run(main())


@pytest.mark.parametrize("spoil", ["flip", "swap", "drop", "rename"])
def test_spoilt_weights_are_noticed(spoil: str) -> None:
    params = [(n, p.detach()) for n, p in build("qwen3", seed=1).named_parameters()]

    async def main() -> None:
        worker = RolloutWorker(opener(Host(make_engine(seed=2))), here())
        dtypes = await worker.start()
        sent = ship(params, version=1, bucket_bytes=1 << 20, dtypes=dtypes, put=lambda b: b)
        bucket = sent.buckets[0]
        first = bucket.slices[0]
        if spoil == "flip":
            bucket.data[first.offset + first.num_bytes // 2] ^= 1
        elif spoil == "swap":
            view = bucket.data[first.offset : first.offset + 8].view("int32")
            view[:] = view[::-1].copy()
        elif spoil == "drop":
            object.__setattr__(bucket, "slices", bucket.slices[1:])
        else:
            object.__setattr__(first, "name", "model.unheard_of.weight")
        with pytest.raises(EngineError, match=first.name if spoil != "drop" else "missing"):
            refuse_other_weights(sent, await worker.load(1, *sent.buckets), where="it")
        await worker.close()

    asyncio.run(main())


def exits() -> None:
    sys.exit(3)


def cancels() -> None:
    raise asyncio.CancelledError("by the environment")


def groups() -> None:
    raise ExceptionGroup("of a task group", [TrainingError("fail_fast"), ValueError("other")])


@pytest.mark.parametrize(
    ("play", "message"),
    [(exits, r"SystemExit\(3\)"), (cancels, "CancelledError"), (groups, "fail_fast")],
)
def test_what_ends_a_group_never_takes_the_process_along(
    play: Callable[[], None], message: str
) -> None:
    async def main() -> None:
        worker = RolloutWorker(opener(Host(make_engine(seed=1), play)), here())
        worker_dtypes = await worker.start()
        assert worker_dtypes
        model = build("qwen3", seed=1)
        params = [(n, p.detach()) for n, p in model.named_parameters()]
        sent = ship(params, version=0, bucket_bytes=1 << 20, dtypes={}, put=lambda b: b)
        await worker.load(0, *sent.buckets)
        with pytest.raises(TrainingError, match=message):
            await worker.run_group("train", DISPATCH)
        await worker.close()

    asyncio.run(main())


def test_an_error_while_opening_comes_out_of_start() -> None:
    @asynccontextmanager
    async def broken(index: int) -> AsyncIterator[Host]:
        raise ConfigError("no such environment")
        yield

    async def main() -> None:
        worker = RolloutWorker(broken, here())
        with pytest.raises(ConfigError, match="no such environment"):
            await worker.start()
        await worker.close()

    asyncio.run(main())


def test_relative_names_mean_the_same_in_a_process_that_starts_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "lib").mkdir()
    (tmp_path / "work" / "data.txt").write_text("found")
    (tmp_path / "lib" / "only_there.py").write_text("VALUE = 5")
    setup = ProcessSetup(
        working_dir=str(tmp_path / "work"),
        import_paths=(str(tmp_path / "lib"),),
        num_threads=1,
        environment={"AGENTRL_X": "7"},
    )
    code = (
        "import sys, pickle; setup = pickle.loads(sys.stdin.buffer.read()); setup.apply()\n"
        "import os, only_there, torch\n"
        "print(open('data.txt').read(), only_there.VALUE, torch.get_num_threads())\n"
        "print(os.environ['AGENTRL_X'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(setup),
        capture_output=True,
        cwd="/",
        check=True,
        timeout=50,
    )
    assert done.stdout.decode().split() == ["found", "5", "1", "7"]


def test_a_working_directory_that_is_not_here_is_named(tmp_path: Path) -> None:
    setup = ProcessSetup(working_dir=str(tmp_path / "gone"), import_paths=())
    with pytest.raises(ConfigError, match="gone.*does not exist.*cluster.runtime_env.working_dir"):
        setup.apply()
    setup.apply(may_stay=True)
