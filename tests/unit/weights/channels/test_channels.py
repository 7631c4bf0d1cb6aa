"""Weights arrive in other processes bit for bit; whoever is missing is noticed in time."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from agentrl.errors import EngineError, RegistryError
from agentrl.testing.weight_sink import ProcessSink, process_sinks
from agentrl.weights.channels import open_receiver, open_sender
from agentrl.weights.push import StreamSource, push

from ..some_weights import PLAN, SPECS, as_served, trained

pytestmark = pytest.mark.timeout(120)
CPU_TRANSPORTS = ["shm", "gloo"]


async def connected(sinks: list[ProcessSink], transport: str, timeout_s: float = 60.0):
    sender = open_sender(
        transport, PLAN, device="cpu", num_receivers=len(sinks), timeout_s=timeout_s
    )
    await asyncio.gather(*(sink.connect(PLAN, sender.address) for sink in sinks))
    return sender


@pytest.mark.parametrize("transport", CPU_TRANSPORTS)
def test_two_processes_serve_what_was_trained_update_after_update(transport: str) -> None:
    assert len(PLAN.buckets) >= 4  # slots are used more than once

    async def main(sinks: list[ProcessSink]) -> None:
        sender = await connected(sinks, transport)
        for version in (1, 2, 3):
            source = StreamSource(trained(version), sender)
            served = await push(source, sinks, plan=PLAN, version=version)
            assert [found.version for found in served] == [version, version]
            assert all(found.sums == as_served(trained(version)) for found in served)
        sender.close()

    with process_sinks(SPECS, 2) as sinks:
        asyncio.run(main(sinks))


@pytest.mark.parametrize("transport", CPU_TRANSPORTS)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_receiver_that_dies_or_hangs_ends_the_update_in_time(
    transport: str, how: signal.Signals
) -> None:
    async def main(sinks: list[ProcessSink]) -> None:
        sender = await connected(sinks, transport, timeout_s=20.0)
        await push(StreamSource(trained(1), sender), sinks, plan=PLAN, version=1)
        assert sinks[0].process.pid is not None
        sinks[0].answer_timeout_s = 3.0
        os.kill(sinks[0].process.pid, how)
        with pytest.raises(EngineError, match="gone|hangs|has not|have not arrived"):
            await push(StreamSource(trained(2), sender), sinks, plan=PLAN, version=2, timeout_s=2.0)
        sender.close()

    with process_sinks(SPECS, 1) as sinks:
        asyncio.run(main(sinks))


def test_a_sender_without_receivers_says_so_in_time() -> None:
    sender = open_sender("gloo", PLAN, device="cpu", num_receivers=1, timeout_s=1.0)
    with pytest.raises(EngineError, match="could not join.*within 1 s.*gone or hangs"):
        StreamSource(trained(1), sender).send_now(0)
    sender.close()


def test_memory_of_a_sender_that_is_gone_is_refused() -> None:
    sender = open_sender("shm", PLAN, device="cpu", num_receivers=1)
    sender.close()
    with pytest.raises(EngineError, match="cannot be opened.*gone"):
        open_receiver(sender.address, PLAN, "cpu")


def test_more_receivers_than_were_told_are_refused() -> None:
    sender = open_sender("gloo", PLAN, device="cpu", num_receivers=1, timeout_s=5.0)
    first = open_receiver(sender.address, PLAN, "cpu")
    with pytest.raises(EngineError, match="2 receivers came where the sender expects 1"):
        open_receiver(sender.address, PLAN, "cpu")
    first.close()
    sender.close()


def test_a_receiver_cannot_write_into_what_others_read() -> None:
    sender = open_sender("shm", PLAN, device="cpu", num_receivers=1)
    StreamSource(trained(1), sender).send_now(0)
    flat = open_receiver(sender.address, PLAN, "cpu").receive(0)
    assert len(flat) == PLAN.buckets[0].num_bytes
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= flat.data_ptr() < end:
            assert line.split()[1] == "r--s" and "agentrl-weights" in line
            break
    else:
        raise AssertionError("the bucket lies in no mapping")
    sender.close()


def test_a_transport_of_another_device_or_name_is_refused() -> None:
    for transport, message in [("cuda_ipc", "use shm or gloo"), ("nccl", "use gloo")]:
        with pytest.raises(EngineError, match=message):
            open_sender(transport, PLAN, device="cpu", num_receivers=1)
    with pytest.raises(EngineError, match="use cuda_ipc"):
        open_sender("shm", PLAN, device="cuda:0", num_receivers=1)
    with pytest.raises(RegistryError, match="weight transport 'ncl'; did you mean 'nccl'"):
        open_sender("ncl", PLAN, device="cpu", num_receivers=1)


def test_what_is_no_transport_is_refused_in_words() -> None:
    with pytest.raises(RegistryError, match="json:dumps' is function, no Channel"):
        open_sender("json:dumps", PLAN, device="cpu", num_receivers=1)


def test_memory_that_cannot_be_had_is_told_and_leaves_no_file_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(file: int, size: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(os, "ftruncate", refuse)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(EngineError, match="Cannot allocate memory.*lower weight_sync.bucket_mb"):
        open_sender("shm", PLAN, device="cpu", num_receivers=1)
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_machine_whose_name_leads_elsewhere_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.weights.channels.collective._own_address", lambda: "192.0.2.1")
    with pytest.raises(EngineError, match="could not open a meeting place at 192.0.2.1"):
        open_sender("gloo", PLAN, device="cpu", num_receivers=1, timeout_s=0.5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("on_device", [True, False])
def test_another_process_on_the_same_gpu_serves_what_was_trained(on_device: bool) -> None:
    async def main(sinks: list[ProcessSink]) -> None:
        sender = open_sender("cuda_ipc", PLAN, device="cuda:0", num_receivers=2)
        await asyncio.gather(*(sink.connect(PLAN, sender.address) for sink in sinks))
        for version in (1, 2):
            params = trained(version)
            sent = [(n, v.cuda() if on_device else v) for n, v in params]
            served = await push(StreamSource(sent, sender), sinks, plan=PLAN, version=version)
            assert all(found.sums == as_served(params) for found in served)

    with process_sinks(SPECS, 2, device="cuda:0") as sinks:
        asyncio.run(main(sinks))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_another_gpu_serves_what_was_trained() -> None:
    async def main(sinks: list[ProcessSink]) -> None:
        sender = open_sender("nccl", PLAN, device="cuda:0", num_receivers=1)
        await sinks[0].connect(PLAN, sender.address)
        for version in (1, 2):
            params = trained(version)
            sent = [(name, value.to("cuda:0")) for name, value in params]
            served = await push(StreamSource(sent, sender), sinks, plan=PLAN, version=version)
            assert served[0].sums == as_served(params)
        sender.close()

    with process_sinks(SPECS, 1, device="cuda:1") as sinks:
        asyncio.run(main(sinks))


def test_a_process_whose_receivers_never_came_ends_at_once() -> None:
    program = (
        "from agentrl.weights.channels import open_sender\n"
        "from agentrl.weights.plan import BucketPlan\n"
        "from agentrl.weights.served import WeightSpec\n"
        "specs = [WeightSpec(name='w', shape=(4,), dtype='float32')]\n"
        "plan = BucketPlan.of(specs, bucket_bytes=64)\n"
        "open_sender('gloo', plan, device='cpu', num_receivers=1, timeout_s=300.0).close()\n"
        "print('closed')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout == "closed\n"
