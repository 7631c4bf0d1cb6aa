"""The E2B backend: one micro-VM per box, through the official SDK."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from agentrl.errors import AgentRLError, SandboxError, SandboxUnavailable
from agentrl.extras import missing_extra
from agentrl.references import cleared
from agentrl.sandbox.base import SandboxLimits, SandboxReport, SandboxStatus
from agentrl.sandbox.secrets import check_reference, resolve
from agentrl_sandboxes.e2b import machine
from agentrl_sandboxes.e2b.channel import ProcessChannel
from agentrl_sandboxes.supervised.bootstrap import first_words
from agentrl_sandboxes.supervised.box import SupervisedSandbox
from agentrl_sandboxes.supervised.limits import check_limits, check_seconds

if TYPE_CHECKING:
    from e2b_code_interpreter import AsyncSandbox

_API_KEY = "${env:E2B_API_KEY}"
_HELLO_S = 30.0
_KILL_S = 10.0
_LONGEST_LIFE_S = 86_400.0


class E2BBackend:
    """Sandboxes of E2B. Needs the extra ``e2b`` and a key.

    Args:
        api_key: reference to the key.
        template: of the sandboxes; must have Python 3.9 or newer, bash, and the programs
            ``unshare``, ``setpriv`` and ``mount`` of util-linux. The SDK's own if None.
        domain: of an installation other than E2B's own.
        api_url, sandbox_url: where its two planes are reached, if not below the domain.
        ttl_s: how long E2B keeps a sandbox after its owner was last heard of.
        create_timeout_s: for the start of one sandbox.
    """

    def __init__(
        self,
        *,
        api_key: str = _API_KEY,
        template: str | None = None,
        domain: str | None = None,
        api_url: str | None = None,
        sandbox_url: str | None = None,
        ttl_s: float = 300.0,
        create_timeout_s: float = 60.0,
    ) -> None:
        check_seconds(ttl_s=ttl_s, create_timeout_s=create_timeout_s)
        self._api_key = check_reference("api_key", api_key)
        self._template = template
        self._domain = domain
        self._api_url = api_url
        self._sandbox_url = sandbox_url
        self._ttl_s = ttl_s
        self._create_timeout_s = create_timeout_s
        self._boxes: dict[str, tuple[SupervisedSandbox, AsyncSandbox]] = {}
        self._kills: set[asyncio.Task[None]] = set()
        self._facts: dict[str, Any] = {}
        self._keeping: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Start a first sandbox and read back, from inside, what holds there."""
        try:
            import e2b_code_interpreter  # noqa: F401
        except ImportError:
            raise SandboxUnavailable(missing_extra("e2b", "sandbox.id=e2b")) from None
        try:
            box = await self.create(SandboxLimits())
        except SandboxUnavailable:
            raise
        except SandboxError as error:
            raise SandboxUnavailable(f"E2B cannot be used: {error}") from None
        await box.close()
        self._keeping = asyncio.create_task(self._keep_alive())

    async def create(self, limits: SandboxLimits) -> SupervisedSandbox:
        """Return a box in a fresh micro-VM."""
        from e2b_code_interpreter import AsyncSandbox

        check_limits(limits)
        if self._closed:
            raise SandboxError("the sandbox backend is closed")
        try:
            async with asyncio.timeout(self._create_timeout_s):
                with sdk_errors("create a sandbox", self._api_key):
                    vm = await AsyncSandbox.create(
                        template=self._template,
                        timeout=int(self._ttl_s),
                        metadata={"created-by": "agentrl"},
                        allow_internet_access=False,
                        api_key=resolve("api_key", self._api_key),
                        domain=self._domain,
                        api_url=self._api_url,
                        sandbox_url=self._sandbox_url,
                    )
                return await self._enter(vm, limits)
        except TimeoutError:
            raise SandboxError(f"E2B gave no sandbox within {self._create_timeout_s:g} s") from None

    async def close(self) -> None:
        """Close every box. Idempotent."""
        self._closed = True
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        await asyncio.gather(*(box.close() for box, _ in list(self._boxes.values())))
        await asyncio.gather(*self._kills, return_exceptions=True)

    def report(self) -> SandboxReport:
        """What the first box read back about itself, and what its VM leaves open."""
        if not self._facts:
            raise SandboxError("the report is read back from a box: start the backend first")
        facts = self._facts
        held = ["a micro-VM of E2B per box"]
        if facts["pid"] == 1:
            held.append("pid namespace")
        if set(facts["interfaces"]) <= {"lo"}:
            held.append("net namespace")
        if facts["seccomp"] == "2":
            held.append("seccomp filter")
        if facts["no_new_privs"] == "1":
            held.append("no new privileges")
        if int(facts["capabilities"], 16) == 0 and int(facts["bounding"], 16) == 0:
            held.append("no capabilities")
        return SandboxReport(
            backend="e2b",
            isolation=tuple(held),
            limits={
                "wall": "supervisor: interrupt, then kill",
                "cpu": "RLIMIT_CPU per process; cores as the template has them",
                "memory": "summed by the supervisor; RLIMIT_AS per process; the VM's own",
                "processes": "counted by the supervisor; RLIMIT_NPROC",
                "disk": "tmpfs size: " + facts["mounts"].get("/box", ["", "not mounted"])[1],
                "output": "supervisor: truncate, then kill",
            },
            warnings=(
                "no control group: between two counts, 50 ms apart, memory is bounded by the VM",
            ),
        )

    async def _enter(self, vm: AsyncSandbox, limits: SandboxLimits) -> SupervisedSandbox:
        """Start the supervisor in a VM; the VM is killed if that fails."""
        channel = ProcessChannel()

        def kill() -> None:
            task = asyncio.ensure_future(self._kill(vm, channel))
            self._kills.add(task)
            task.add_done_callback(self._kills.discard)

        async def release() -> None:
            self._boxes.pop(vm.sandbox_id, None)

        async def autopsy() -> tuple[SandboxStatus, str]:
            with sdk_errors("look after a sandbox", self._api_key):
                lives = await vm.is_running(request_timeout=_KILL_S)
            if not lives:
                raise SandboxError(f"the E2B sandbox is gone: {channel.last_words()}")
            return SandboxStatus.SANDBOX_DEAD, "The sandbox died during this call."

        box = SupervisedSandbox(
            channel, limits, kill=kill, release=release, has_witness=False, autopsy=autopsy
        )
        self._boxes[vm.sandbox_id] = (box, vm)
        try:
            with sdk_errors("start the supervisor", self._api_key):
                handle = await vm.commands.run(
                    machine.command(limits),
                    background=True,
                    user="root",
                    stdin=True,
                    timeout=0,  # as long as the box lives
                    on_stdout=channel.on_stdout,
                    on_stderr=channel.on_stderr,
                    retain_output=False,
                )
            channel.attach(vm, handle)
            await channel.send(first_words(limits, _LONGEST_LIFE_S))
            self._facts = await box.hello(_HELLO_S) or self._facts
        except BaseException as error:
            await box.close()
            if isinstance(error, (SandboxError, OSError)):
                raise SandboxError(f"{error} ({channel.last_words()})") from None
            raise
        return box

    async def _kill(self, vm: AsyncSandbox, channel: ProcessChannel) -> None:
        """End a VM; one that cannot be reached ends when its time is over."""
        try:
            with sdk_errors("kill a sandbox", self._api_key):
                await vm.kill(request_timeout=_KILL_S)
        except SandboxError:
            pass
        finally:
            channel.close()

    async def _keep_alive(self) -> None:
        """Extend the time of all open boxes; a failure shows again at their next call."""
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            extensions = [
                vm.set_timeout(int(self._ttl_s), request_timeout=_KILL_S)
                for _, vm in self._boxes.values()
            ]
            await asyncio.gather(*extensions, return_exceptions=True)


@contextmanager
def sdk_errors(purpose: str, api_key: str = _API_KEY) -> Iterator[None]:
    """Turn whatever the SDK raises into errors of ours, without the key that it may repeat.

    Raises:
        SandboxUnavailable: the key is missing or wrong.
        SandboxError: anything else. Its errors have several roots, and those of two HTTP clients
            come through as they are.
    """
    from e2b import AuthenticationException

    try:
        yield
    except (AgentRLError, TimeoutError):
        raise
    except AuthenticationException as error:
        raise SandboxUnavailable(
            f"E2B refuses the key ({cleared(str(error), [api_key])}); set E2B_API_KEY, or api_key "
            "to a reference to the variable that holds it"
        ) from None
    except Exception as error:
        told = cleared(f"{type(error).__name__}: {error}", [api_key])
        raise SandboxError(f"E2B could not {purpose}: {told}") from None
