"""What becomes of a connection to Ray that is late, or is refused."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from agentrl.dist.ray_cluster import ray_cluster
from agentrl.errors import ConfigError

pytestmark = pytest.mark.timeout(60)
LATE = "The current node timed out during startup."


@pytest.fixture
def init(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Replace ``ray.init``; nothing of Ray is started."""
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "nodes", lambda: [])

    def replace(does: Callable[[], Any]) -> None:
        monkeypatch.setattr(ray, "init", lambda **options: does())

    return replace


def test_a_node_that_was_late_is_started_again(init: Callable[..., None]) -> None:
    threads: list[threading.Thread] = []

    def late_once() -> None:
        threads.append(threading.current_thread())
        if len(threads) == 1:
            raise Exception(LATE)

    init(late_once)
    with ray_cluster(timeout_s=50) as nodes:
        assert nodes == []
        threads[0].join(timeout=20)
        assert not threads[0].is_alive()  # with which the kernel ends what it had started
        assert threads[1].is_alive()
    threads[1].join(timeout=20)
    assert not threads[1].is_alive()


@pytest.mark.parametrize("error", [Exception("no idea"), AssertionError(), KeyError("x")])
def test_whatever_ray_raises_is_told(init: Callable[..., None], error: Exception) -> None:
    def fail() -> None:
        raise error

    init(fail)
    told = str(error) or "AssertionError"
    with (
        pytest.raises(ConfigError, match=f"no connection to Ray: {told}; end what else runs"),
        ray_cluster(),
    ):
        pass


def test_ray_s_advice_for_programs_of_its_own_is_left_out(init: Callable[..., None]) -> None:
    def fail() -> None:
        raise ConnectionError(
            "Could not find any running Ray instance. Please specify the one to connect to by "
            "setting `--address` flag or `RAY_ADDRESS` environment variable."
        )

    init(fail)
    with (
        pytest.raises(ConfigError, match="belongs to no Ray cluster; look whether") as caught,
        ray_cluster("auto"),
    ):
        pass
    assert "--address" not in str(caught.value)


@pytest.mark.parametrize(
    ("runtime_env", "message"),
    [
        ({"env_vars": 5}, r"env_vars=5: write .*env_vars.NAME=VALUE"),
        ({"env_vars": {"A": 1}}, "cluster.runtime_env: .*the value 1 is of type"),
        ({"evn_vars": {"A": "1"}}, "runtime_env.evn_vars: Ray knows no such field.*env_vars"),
        ({"working_dir": "/no/such/folder"}, "cluster.runtime_env: /no/such/folder"),
    ],
)
def test_what_ray_cannot_prepare_is_no_failed_connection(
    runtime_env: dict[str, Any], message: str, init: Callable[..., None]
) -> None:
    init(lambda: pytest.fail("a connection was tried"))
    with pytest.raises(ConfigError, match=message), ray_cluster(runtime_env=runtime_env):
        pass


@pytest.fixture
def listener() -> Iterator[str]:
    """An address at which someone listens, and says nothing."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_service_that_is_not_ray_is_given_up_in_time(
    init: Callable[..., None], listener: str
) -> None:
    never = threading.Event()
    init(never.wait)
    with (
        pytest.raises(ConfigError, match=r"did not answer within 0.2 s; .*ray status"),
        ray_cluster(listener, timeout_s=0.2),
    ):
        pass
    (waiting,) = (thread for thread in threading.enumerate() if thread.name == "ray")
    assert waiting.daemon  # the process can end without it
    never.set()
    waiting.join(timeout=20)


def test_what_comes_up_after_it_was_given_up_is_ended(
    init: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    comes_up, ended = threading.Event(), threading.Event()
    init(lambda: comes_up.wait(timeout=20))
    monkeypatch.setattr(ray, "shutdown", ended.set)
    with pytest.raises(ConfigError, match="did not answer"), ray_cluster(timeout_s=0.1):
        pass
    assert not ended.is_set()
    comes_up.set()
    assert ended.wait(timeout=20)
