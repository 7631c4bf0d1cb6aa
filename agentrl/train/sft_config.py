"""Settings of supervised training. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields

from agentrl.dist.config import EngineConfig, OptimizerConfig, Schedule


@dataclass(slots=True, kw_only=True)
class SFTConfig(OptimizerConfig):
    """Supervised training on conversations."""

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.98)
    schedule: Schedule = Schedule.cosine
    warmup_steps: int = 20
    steps: int = 400
    """Optimizer steps."""
    episodes_per_step: int = 32
    """Conversations of one optimizer step."""
    tokens_per_micro_batch: int = 2048
    """Tokens of one forward and backward. Changes memory and speed, never the gradient."""
    max_tokens: int = 1024
    """Longer conversations are left out and counted, never cut."""
    seed: int = 0
    """Decides the order of the conversations."""

    def engine_config(self) -> EngineConfig:
        """Return the settings of the engine that is trained."""
        shared = {item.name: getattr(self, item.name) for item in fields(OptimizerConfig)}
        return EngineConfig(**shared, tokens_per_micro_batch=self.tokens_per_micro_batch)
