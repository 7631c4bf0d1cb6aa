"""Settings of the training loop, evaluation and the model."""

from __future__ import annotations

from dataclasses import dataclass, field

TINY = "tiny"
"""The ``model.path`` of the embedded model."""
MAX_STEPS = 10**9
"""Steps of a run at most; more of them, or of epochs, are a slip of the hand."""


@dataclass(slots=True, kw_only=True)
class WarmStartConfig:
    """Supervised start of the embedded model, on the environment's own demonstrations."""

    steps: int = 800
    """Optimizer steps."""
    episodes_per_step: int = 32
    """Demonstrations of one optimizer step."""
    lr: float = 3e-3
    """Peak learning rate; it rises over 20 steps and falls on half a cosine."""
    vocab_size: int = 640
    """Of the byte-level tokenizer that is trained on the demonstrations."""
    seed: int = 0
    """Decides weights, demonstrations and their order. Not ``trainer.seed``: seeds of a run share
    a start."""


@dataclass(slots=True, kw_only=True)
class ModelConfig:
    """Which model."""

    path: str = TINY
    """``tiny`` (embedded), a hub id, a local directory, a ``.gguf`` file, or a run directory."""
    chat_template: str | None = None
    """A jinja file that replaces the tokenizer's template. A run keeps it: to resume, evaluate or
    export it the file is not needed. The embedded model takes none."""
    tool_parser: str | None = None
    """How tool calls are found in a turn: ``hermes``, ``qwen3_coder``, ``llama3_json``,
    ``mistral``, ``harmony``, ``deepseek``, ``glm``, ``kimi_k2``, ``minimax``, or one registered
    under ``agentrl.parsers``. None takes the one that reads what the chat template writes for a
    call."""
    device: str = "auto"
    """``auto`` (CUDA where there is one), ``cpu``, ``cuda`` or ``cuda:N``."""
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    """Read for ``path=tiny`` only."""


@dataclass(slots=True, kw_only=True)
class TrainerConfig:
    """The loop."""

    prompts_per_step: int = 32
    """Tasks of one step; each is sampled ``rollout.n`` times."""
    total_steps: int = 50
    """Steps of the run, those before a resume included. 0 where ``epochs`` decides."""
    epochs: float | None = None
    """Passes over the training tasks, in place of ``total_steps``; the last step is a whole one."""
    eval_every: int = 10
    """Steps between evaluations on the validation split, which is measured before the first step
    and after the last one as well; 0 for none at all."""
    save_every: int = 10
    """Steps between checkpoints; the last step is always saved. 0 for the last only."""
    keep_last: int = 2
    """Newest checkpoints that are kept."""
    keep_best: bool = True
    """Keep also, however old, the checkpoint of the best success on the validation split, of those
    that were saved at a step with an evaluation."""
    grace_s: float = 30.0
    """Seconds that a run has, once it is told to stop by SIGTERM, to save and end."""
    seed: int = 0
    """Decides the order of tasks, environments, sampling and mini-batches."""
    run_dir: str | None = None
    """Default: ``runs/<env>-<date>-<number>``."""
    resume: str | None = None
    """A run directory: go on from its newest complete checkpoint."""
    force_resume: bool = False
    """Resume although settings that change the training differ."""
    deterministic: bool = True
    """Same seed, same bits: fixed batch shapes in the engine, one order of everything."""
    trajectories: str = "all"
    """Which trajectories are written: ``all``, ``sample:N`` a step, or ``none``."""
    num_threads: int = 0
    """Torch threads; 0 takes the number of cores."""


@dataclass(slots=True, kw_only=True)
class EvalConfig:
    """Held-out evaluation."""

    n: int = 1
    """Samples per task."""
    temperature: float | None = None
    """None: as in rollout."""
    val_tasks: int = 256
    """Tasks of the validation split, every ``trainer.eval_every`` steps; 0 takes all."""
    test_tasks: int = 1024
    """Tasks of the test split, before the first and after the last step; 0 takes all."""


@dataclass(slots=True, kw_only=True)
class TelemetryConfig:
    """What is written beside ``metrics.jsonl``."""

    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])
    """Further trackers; ``tensorboard`` needs the extra of that name."""
    report: bool = True
    """Write ``report.html`` and ``curves.png`` at the end."""
    quiet: bool = False
    """No progress on the terminal."""
