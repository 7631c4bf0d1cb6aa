"""What only the Docker backend has: owners and their orphans, hardening, an engine with others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from agentrl_sandboxes.docker import DockerBackend, container, engine, reaper, rootfs
from agentrl_sandboxes.docker.image import build_local_image
from agentrl_sandboxes.docker.reaper import this_process
from click.testing import CliRunner
from sandbox_arms import ArmUnavailable, cannot_run, docker_engine

from agentrl.cli.sandbox import command
from agentrl.errors import ConfigError, SandboxError, SandboxUnavailable
from agentrl.sandbox.base import SandboxLimits, SandboxStatus
from agentrl.sandbox.pool import SandboxPool

pytestmark = pytest.mark.timeout(240)
LIMITS = SandboxLimits(wall_s=5.0, memory_mb=128, max_processes=16, disk_mb=16)
KILLS = 50 if os.environ.get("AGENTRL_SOAK") else 5


@pytest.fixture(scope="module")
def address() -> str:
    """An engine that has an image."""
    try:
        found = docker_engine()
    except ArmUnavailable as reason:
        cannot_run("a Docker engine", reason)
    build_local_image(base_url=found)
    return found


@pytest.fixture
def api(address: str) -> Iterator[Any]:
    """A client of the test's own, that sees what the backend does."""
    client = engine.connect(address)
    yield client
    client.close()


@asynccontextmanager
async def started(address: str, **kwargs: Any) -> AsyncIterator[DockerBackend]:
    kwargs = {"idle_boxes": 0, "run_id": uuid.uuid4().hex, **kwargs}
    backend = DockerBackend(base_url=address, **kwargs)
    async with asyncio.timeout(90):
        await backend.start()
        try:
            yield backend
        finally:
            await backend.close()


async def reserve_is_full(backend: DockerBackend) -> None:
    assert backend._idle is not None and backend._idle._refill is not None
    await backend._idle._refill


def containers_of(api: Any, run_id: str) -> list[dict[str, Any]]:
    return api.containers(all=True, filters={"label": f"agentrl.run={run_id}"})


_OWNER = """
import asyncio, sys
from agentrl.sandbox.base import SandboxLimits
from agentrl_sandboxes.docker import DockerBackend

async def main(address, run_id, marker):
    backend = DockerBackend(base_url=address, run_id=run_id, idle_boxes=1)
    await backend.start()
    box = await backend.create(SandboxLimits())
    call = asyncio.create_task(box.exec(["sleep", marker], timeout_s=900))
    await asyncio.sleep(0.3)
    print("running", flush=True)
    await call

asyncio.run(main(*sys.argv[1:]))
"""


@contextlib.contextmanager
def owner(address: str, run_id: str, marker: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has a box with a running command, killed at the end at the latest."""
    process = subprocess.Popen(
        [sys.executable, "-c", _OWNER, address, run_id, marker], stdout=subprocess.PIPE
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def is_running(marker: str) -> bool:
    """Whether any process of this machine has this word in its command."""
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit():
                words = (folder / "cmdline").read_bytes().split(b"\0")
                if words[0] == b"sleep" and marker.encode() in words:
                    return True
    return False


def test_nothing_is_left_of_owners_that_were_killed(address, api):
    run_id, markers = uuid.uuid4().hex, [f"{5000 + random.random():.9f}" for _ in range(KILLS)]

    for batch in range(0, KILLS, 5):
        with contextlib.ExitStack() as stack:
            owners = [
                stack.enter_context(owner(address, run_id, marker))
                for marker in markers[batch : batch + 5]
            ]
            for process in owners:
                assert process.stdout is not None and process.stdout.readline() == b"running\n"
            assert all(is_running(marker) for marker in markers[batch : batch + 5])
            for process in owners:
                process.send_signal(signal.SIGKILL)
        # Those of the batch before went with the start of this one's owners.
        assert len(containers_of(api, run_id)) >= len(owners), "a killed owner cleans nothing up"

    async def next_owner() -> int:
        async with started(address) as backend:
            return backend.reaped

    assert asyncio.run(next_owner()) >= 5
    assert containers_of(api, run_id) == []
    assert not any(is_running(marker) for marker in markers)


def test_the_sweep_takes_running_orphans_and_leaves_what_is_owned(address, api):
    """A container may outlive its owner where the engine is remote: what its labels say decides."""
    run_id, me = uuid.uuid4().hex, this_process()
    dead = reaper.Owner(pid=me.pid, start_ticks=1, boot=me.boot, pid_namespace=me.pid_namespace)
    elsewhere = reaper.Owner(pid=1, start_ticks=1, boot="another", pid_namespace="another")
    labels = {
        "dead": reaper.labels(dead, run_id, ttl_s=3600),
        "over": reaper.labels(elsewhere, run_id, ttl_s=-3600),
        "elsewhere": reaper.labels(elsewhere, run_id, ttl_s=3600),
        "alive": reaper.labels(me, run_id, ttl_s=3600),
    }
    names = {kind: f"agentrl-test-{run_id}-{kind}" for kind in labels}
    stranger = f"agentrl-test-{run_id}-stranger"
    try:
        for kind, name in names.items():
            container.create(
                api,
                name=name,
                image="agentrl/sandbox:local",
                runtime=None,
                labels=labels[kind],
                limits=LIMITS,
            )
            api.start(name)  # it waits for its first words
        api.create_container("agentrl/sandbox:local", ["true"], name=stranger)

        async def next_owner() -> int:
            async with started(address) as backend:
                return backend.reaped

        asyncio.run(next_owner())
        left = {name[1:] for entry in api.containers(all=True) for name in entry["Names"]}
        assert left & {*names.values()} == {names["elsewhere"], names["alive"]}
        assert stranger in left, "containers of others are none of our business"
    finally:
        for name in (*names.values(), stranger):
            reaper.remove(api, name)


def test_a_box_ends_by_itself_when_its_time_is_over(address, api):
    async def scenario() -> tuple[str, list[dict[str, Any]]]:
        async with started(address, ttl_s=2.0) as backend:
            box = await backend.create(LIMITS)
            # The program inside cannot ring the bell early.
            early = await box.run_code("import os, signal; os.kill(1, signal.SIGALRM); 'alive'")
            assert early.result == "'alive'"
            with pytest.raises(SandboxError, match="outlived its 2 s; raise .*ttl_s") as error:
                await box.run_code("import time; time.sleep(30)", timeout_s=60)
            await box.close()
            return str(error.value), containers_of(api, backend._recipe.run_id)

    assert asyncio.run(scenario())[1] == []


def test_what_others_do_to_a_container_is_no_fault_of_the_program(address, api):
    async def scenario() -> None:
        async with started(address) as backend:
            for hurt in (api.kill, reaper_remove):
                box = await backend.create(LIMITS)
                (entry,) = containers_of(api, backend._recipe.run_id)
                call = asyncio.create_task(box.run_code("while True: pass", timeout_s=30))
                await asyncio.sleep(0.2)
                await asyncio.to_thread(hurt, entry["Id"])
                with pytest.raises(SandboxError, match="somebody else"):
                    await call
                await box.close()
                await box.close()
            assert containers_of(api, backend._recipe.run_id) == []

    def reaper_remove(name: str) -> None:
        reaper.remove(api, name)

    asyncio.run(scenario())


def test_the_engine_is_asked_for_every_restriction(address, api):
    async def scenario() -> tuple[dict[str, Any], Any, Any]:
        async with started(address) as backend:
            box = await backend.create(LIMITS)
            (entry,) = containers_of(api, backend._recipe.run_id)
            inside = await box.run_code(
                "import os, resource\n"
                "fields = dict(l.split(':\\t') for l in open('/proc/1/status') if ':\\t' in l)\n"
                "mounts = {l.split()[1]: l.split()[3] for l in open('/proc/self/mounts')}\n"
                "(os.getuid(), os.getgid(), os.getgroups(), fields['CapBnd'].strip('0\\n'), "
                "fields['NoNewPrivs'].strip(), int(fields['Seccomp_filters']) >= 2, "
                "'ro' in mounts['/'].split(','), os.listdir('/sys/kernel'), "
                "open('/proc/meminfo').read(), sorted(os.listdir('/proc/self/fd'))[:3])"
            )
            return api.inspect_container(entry["Id"]), inside.result, backend.report()

    seen, inside, report = asyncio.run(scenario())
    host, config = seen["HostConfig"], seen["Config"]
    assert inside == ("(65534, 65534, [65534], '', '1', True, True, [], '', ['0', '1', '2'])"), (
        "what the box sees of itself"
    )
    assert host["NetworkMode"] == "none" and host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"] == ["no-new-privileges"] and not host["Privileged"]
    assert host["Memory"] == host["MemorySwap"] == container.memory_bytes(LIMITS)
    assert host["PidsLimit"] == container.max_tasks(LIMITS) and host["IpcMode"] == "private"
    assert host["LogConfig"]["Type"] == "none" and not host["Binds"] and not host["Devices"]
    assert config["User"] == "65534:65534" and config["StdinOnce"]
    assert {"no network", "read-only root", "seccomp filter", "no capabilities"} <= {
        *report.isolation
    }
    assert "cgroup" in report.limits["memory"] and "cgroup" in report.limits["processes"]


def test_a_program_that_fills_memory_by_files_dies_by_the_control_group(address):
    """The pages of a tmpfs are no process's: only the control group counts them."""
    limits = SandboxLimits(wall_s=20, memory_mb=64, disk_mb=64)
    code = (
        "import os\nfor folder in ('/box', '/tmp', '/dev/shm'):\n"
        "    try: open(folder + '/f', 'wb').write(bytes(1 << 20) * 60)\n"
        "    except OSError: pass\n"
        "    else: continue\n"
        "kept = []\n"
        "for _ in range(12):\n    if os.fork() == 0:\n        kept = b'x' * (40 << 20)\n"
        "        os.pause() if hasattr(os, 'pause') else __import__('time').sleep(60)\n"
        "__import__('time').sleep(60)"
    )

    async def scenario() -> tuple[SandboxStatus, str | None]:
        async with started(address) as backend:
            box = await backend.create(limits)
            hog = await box.run_code(code)
            after = await box.run_code("1 + 1")
            return hog.status, after.result

    assert asyncio.run(scenario()) == (SandboxStatus.OOM, "2")


def test_a_cancelled_creation_leaves_no_container(address, api):
    async def scenario() -> list[dict[str, Any]]:
        async with started(address) as backend:
            for delay_s in (0.0, 0.02, 0.05, 0.1, 0.2):
                creation = asyncio.create_task(backend.create(LIMITS))
                await asyncio.sleep(delay_s)
                creation.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await (await creation).close()
            run_id = backend._recipe.run_id
        return containers_of(api, run_id)

    assert asyncio.run(scenario()) == []


def test_the_reserve_is_used_once_refilled_and_made_for_the_limits_asked_for(address, api):
    async def scenario() -> None:
        async with started(address, idle_boxes=2) as backend:
            run_id = backend._recipe.run_id
            first = await backend.create(LIMITS)
            await first.run_code("open('/box/trace', 'w').write('here')")
            await reserve_is_full(backend)
            assert len(containers_of(api, run_id)) == 3
            second = await backend.create(LIMITS)
            listed = await second.run_code("import os; os.listdir('/box')")
            other = await backend.create(SandboxLimits(memory_mb=300))
            limit = await other.run_code(
                "import resource; resource.getrlimit(resource.RLIMIT_AS)[0] >> 20"
            )
            assert (listed.result, limit.result) == ("[]", "300")
            await asyncio.gather(first.close(), second.close(), other.close())
        assert containers_of(api, run_id) == []

    asyncio.run(scenario())


def test_an_idle_box_that_died_is_not_handed_out(address, api):
    async def scenario() -> str | None:
        async with started(address, idle_boxes=1) as backend:
            first = await backend.create(LIMITS)
            await reserve_is_full(backend)
            for entry in containers_of(api, backend._recipe.run_id):
                api.kill(entry["Id"])
            await asyncio.sleep(0.3)
            await first.close()
            fresh = await backend.create(LIMITS)
            return (await fresh.run_code("'fresh'")).result

    assert asyncio.run(scenario()) == "'fresh'"


def test_a_pool_counts_what_the_engine_did_not_remove(address):
    async def scenario() -> tuple[int, int, int]:
        async with started(address) as backend:
            pool = SandboxPool(backend, max_open=2)
            box = await pool.acquire(LIMITS)
            assert backend._fleet is not None
            backend._fleet.engine.close()  # as if it were gone
            await box.close()
            return pool.counts.closed, pool.counts.leaked, backend.leaked

    assert asyncio.run(scenario()) == (0, 1, 1)


def test_the_command_line_builds_checks_runs_and_reaps(address, tmp_path):
    def agentrl(*words: str) -> str:
        done = CliRunner().invoke(command, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    kwargs = json.dumps({"base_url": address, "idle_boxes": 0})
    docker = ("--backend", "docker", "--backend-kwargs", kwargs)
    assert agentrl("image", "--base-url", address).startswith("agentrl/sandbox:local-")
    report = json.loads(agentrl("check", *docker, "--json"))
    assert report["backend"] == "docker" and "no network" in report["isolation"]
    (tmp_path / "cell.py").write_text("print(6 * 7)")
    assert agentrl("run", *docker, str(tmp_path / "cell.py")) == "42\n"
    assert agentrl("reap", *docker).startswith("removed ")


def test_an_image_built_from_the_dockerfile_holds_a_box(address, api):
    """With the base image replaced by what is here: registries are none of a test's business."""
    built = api.build(
        path=str(Path(__file__).parents[2] / "sandboxes"),
        dockerfile="box.Dockerfile",
        tag="agentrl/test:dockerfile",
        buildargs={"BASE": "agentrl/sandbox:local"},
        rm=True,
        forcerm=True,
    )
    assert b"Successfully built" in b"".join(built)

    async def scenario() -> str | None:
        async with started(address, image="agentrl/test:dockerfile") as backend:
            box = await backend.create(LIMITS)
            return (await box.run_code("import sys; sys.version_info[:2] >= (3, 9)")).result

    try:
        assert asyncio.run(scenario()) == "True"
    finally:
        api.remove_image("agentrl/test:dockerfile", force=True)


# Refusals


def test_without_an_engine_the_refusal_says_what_to_do(tmp_path):
    backend = DockerBackend(base_url=f"unix://{tmp_path}/docker.sock")
    with pytest.raises(SandboxUnavailable, match=r"systemctl start docker.*DOCKER_HOST"):
        asyncio.run(backend.start())
    with pytest.raises(SandboxError, match="not started"):
        asyncio.run(backend.create(LIMITS))
    asyncio.run(backend.close())


def test_without_an_image_the_refusal_says_how_to_build_one(address):
    backend = DockerBackend(base_url=address, image="agentrl/no-such-image")
    with pytest.raises(SandboxUnavailable, match="docker build"):
        asyncio.run(backend.start())
    asyncio.run(backend.close())


def test_a_runtime_that_the_engine_lacks_is_refused_in_its_own_words(address, api):
    backend = DockerBackend(base_url=address, runtime="no-such-runtime", run_id="no-runtime")
    with pytest.raises(SandboxUnavailable, match="no-such-runtime"):
        asyncio.run(backend.start())
    asyncio.run(backend.close())
    assert containers_of(api, "no-runtime") == []


def test_an_image_without_python_is_refused_and_leaves_nothing(address, api):
    import docker.errors

    api.import_image_from_data(b"\0" * 10240, repository="agentrl/test", tag="empty")
    try:
        backend = DockerBackend(base_url=address, image="agentrl/test:empty", run_id="no-python")
        with pytest.raises(SandboxUnavailable):
            asyncio.run(backend.start())
        asyncio.run(backend.close())
        assert containers_of(api, "no-python") == []
    finally:
        with contextlib.suppress(docker.errors.APIError):
            api.remove_image("agentrl/test:empty", force=True)


@pytest.mark.parametrize("base_url", ["ssh://host", "npipe:////./pipe/docker", "docker.sock"])
def test_ways_to_an_engine_that_cannot_carry_a_box_are_refused(base_url):
    with pytest.raises(SandboxUnavailable, match="ssh -nNT -L"):
        asyncio.run(DockerBackend(base_url=base_url).start())


@pytest.mark.parametrize(
    "kwargs",
    [{"ttl_s": 0}, {"ttl_s": float("nan")}, {"create_timeout_s": -1}, {"idle_boxes": -1}]
    + [{"max_creating": 0}],
)
def test_settings_that_cannot_work_are_refused(kwargs):
    with pytest.raises(ConfigError):
        DockerBackend(**kwargs)


def test_the_image_is_the_same_bytes_each_time_and_is_built_once(address, api, tmp_path):
    content = rootfs.collect()
    content.write(tmp_path / "first.tar")
    content.write(tmp_path / "second.tar")
    assert (tmp_path / "first.tar").read_bytes() == (tmp_path / "second.tar").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"first.tar", "second.tar"}
    name = build_local_image(base_url=address)
    before = api.inspect_image(name)["Id"]
    assert build_local_image(base_url=address) == name
    assert (
        api.inspect_image(name)["Id"] == before == api.inspect_image("agentrl/sandbox:local")["Id"]
    )
