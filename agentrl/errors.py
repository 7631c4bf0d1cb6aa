"""The error tree of agentrl.

Every error that a user can cause or see derives from :class:`AgentRLError`, says what went
wrong, what was got, and how to fix it, and survives pickling (its constructor takes one
message, so that it can cross a process boundary).

::

    AgentRLError
    ├── ConfigError            a setting that cannot work, or would train something else than meant
    │   └── MemoryPlanError        what the run needs of a device is more than the device has
    ├── RegistryError          an unknown, duplicate or broken registration
    ├── ModelError             a model, tokenizer or chat template that cannot be used as it is
    ├── CheckpointError        a checkpoint that is missing, damaged, or belongs to another run
    ├── DataError              a task file or dataset that cannot be read as declared
    ├── EnvError               an environment broke its contract (wrong type, exception)
    │   └── EnvTimeout             it did not answer before its deadline
    ├── RewardError            a grader crashed or returned something that is no finite number
    │   └── RewardTimeout          it did not answer before its deadline
    ├── ToolError              the *model's* mistake: the message is shown to the model as text
    ├── ToolSpecError          a tool's YAML cannot be used
    ├── SandboxError           a sandbox could not be created or reached (infrastructure)
    │   └── SandboxUnavailable     the backend cannot work on this machine
    ├── InfrastructureError    a failure that is nobody's decision: server lost, retries spent
    │   └── RewardServiceError     a judge or reward model could not be reached, retries spent
    ├── RenderError            a chat template that the renderer cannot follow exactly
    ├── EngineError            a rollout engine refused or lost a request
    │   ├── EngineLost             its process is gone, and what it was generating with it
    │   └── ChannelOutdated        a replaced engine cannot join the channel of weights there is
    ├── WorkerError            a rank of a worker group failed, with its own traceback
    │   ├── WorkerLost             its process is gone
    │   └── WorkerTimeout          it did not answer before its deadline; with every rank's stack
    ├── Preempted              the run was asked to stop, and did; it can be resumed
    └── TrainingError          training cannot go on (no signal, non-finite gradients in a row)
        ├── ThreadLeakError        too many threads that hang, of environments or graders
        └── ToolUnavailable        a tool has failed on our side for tools.breaker.give_up_s
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.types import Generation


class AgentRLError(Exception):
    """Base of all errors raised on purpose by agentrl."""


class ConfigError(AgentRLError):
    """A setting that cannot work, or would train something else than meant."""


class MemoryPlanError(ConfigError):
    """What a run needs of a device is more than the device has; names what would make it fit."""


class RegistryError(AgentRLError):
    """An unknown, duplicate or broken registration."""


class ModelError(AgentRLError):
    """A model, tokenizer or chat template that cannot be used as it is."""


class CheckpointError(AgentRLError):
    """A checkpoint that is missing, damaged, or belongs to another run."""


class DataError(AgentRLError):
    """A task file or dataset that cannot be read as declared."""


class EnvError(AgentRLError):
    """An environment broke its contract: wrong type, exception, time-out."""


class EnvTimeout(EnvError):
    """An environment did not answer before its deadline."""


class RewardError(AgentRLError):
    """A grader crashed, or returned something that is no finite number."""


class RewardTimeout(RewardError):
    """A grader did not answer before its deadline."""


class ToolError(AgentRLError):
    """The model's mistake in a tool call; the message goes to the model as text."""


class ToolSpecError(AgentRLError):
    """A tool specification that cannot be used."""


class SandboxError(AgentRLError):
    """A sandbox could not be created or reached: infrastructure, never the model's fault."""


class SandboxUnavailable(SandboxError):
    """The sandbox backend cannot work on this machine; the message holds the fix."""


class InfrastructureError(AgentRLError):
    """A failure that is nobody's decision: a server lost, retries spent."""


class RewardServiceError(InfrastructureError):
    """A judge or reward model that could not be reached, retries spent."""


class RenderError(AgentRLError):
    """A chat template that the renderer cannot follow exactly."""


class EngineError(AgentRLError):
    """A rollout engine refused or lost a request."""


class EngineLost(EngineError):
    """The process of a rollout engine is gone; what it was generating is lost."""

    partial: Generation | None = None
    """What of a request had arrived before, where the engine streams."""


class ChannelOutdated(EngineError):
    """Receivers of weights were replaced, and their successors cannot join the channel there is."""


class WorkerError(AgentRLError):
    """A rank of a worker group failed; names rank and method and holds its traceback."""


class WorkerLost(WorkerError):
    """The process of a rank is gone."""


class WorkerTimeout(WorkerError):
    """A rank did not answer before its deadline; holds the stacks of all ranks."""


EXIT_PREEMPTED = 75
"""Exit status of a command that was told to stop and can go on later (``EX_TEMPFAIL``)."""


class Preempted(AgentRLError):
    """The run was asked to stop and did so at a step boundary; says how to go on."""


EXIT_INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended."""


class Interrupted(AgentRLError):
    """Ctrl-C ended the run where it stood; says what is saved, and how to go on."""


class TrainingError(AgentRLError):
    """Training cannot go on: no signal, or non-finite gradients in a row."""


class ThreadLeakError(TrainingError):
    """Too many threads hang for good.

    Of environments more than ``env.max_leaked_threads``, of graders more than
    :data:`agentrl.reward.threads.MAX_LEAKED_THREADS`.
    """


class ToolUnavailable(TrainingError):
    """A tool has failed on our side for ``tools.breaker.give_up_s`` seconds: the run stops."""
