"""What a reward configuration comes to, and what cannot work about it. Imports no user code."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator

from agentrl.reward.config import RewardConfig, RewardPartConfig
from agentrl.types import BUILT_IN_REWARDS

SHORTHAND = "score"
"""Name of the part that ``reward.path`` stands for."""
OVERLONG = "overlong"


def part_configs(config: RewardConfig) -> list[tuple[str, RewardPartConfig]]:
    """Return the parts with their keys, shorthands written out.

    ``reward.path`` comes first. With nothing but ``reward.overlong``, the environment's own rubric
    does: a punishment alone is no reward.
    """
    parts: list[tuple[str, RewardPartConfig]] = []
    if config.path:
        kwargs = {
            "path": config.path,
            "kwargs": dict(config.kwargs),
            "solution": str(config.solution),
            "process": config.process,
        }
        shorthand = RewardPartConfig(id="function", name=SHORTHAND, kwargs=kwargs)
        parts.append(("reward", shorthand))
    parts += [(f"reward.parts[{index}]", part) for index, part in enumerate(config.parts)]
    if config.overlong.buffer_tokens:
        if not parts:
            parts.append(("reward", RewardPartConfig(id="env")))
        kwargs = {
            "buffer_tokens": config.overlong.buffer_tokens,
            "penalty": config.overlong.penalty,
        }
        parts.append(("reward.overlong", RewardPartConfig(id=OVERLONG, kwargs=kwargs)))
    return parts


def arguments_key(key: str) -> str:
    """Return where the arguments of the part at ``key`` stand; those of a shorthand beside it."""
    return f"{key}.kwargs" if key.startswith("reward.parts") else key


def reward_problems(config: RewardConfig, *, max_response_tokens: int) -> Iterator[str]:
    """Yield what cannot work, one line each; nothing if all is well."""
    from agentrl.reward.registry import ENV, reward_registry

    parts = part_configs(config)
    names = [part.name or part.id for _, part in parts]
    for name in sorted({name for name in names if names.count(name) > 1}):
        keys = [key for (key, _), other in zip(parts, names, strict=True) if other == name]
        yield f"{' and '.join(keys)}: both are named {name!r}; give one another name"
    for (key, part), name in zip(parts, names, strict=True):
        if name in BUILT_IN_REWARDS:
            yield (
                f"{key}: algo.reward_weights.{name} means something else, so that no part may be "
                f"named {name!r}; set another {'name' if part.name else 'name beside its id'}"
            )
    known = [ENV, *reward_registry.names()]
    for key, part in parts:
        if part.id not in known and ":" not in part.id:
            close = difflib.get_close_matches(part.id, known, n=2)
            hint = f"did you mean {' or '.join(close)}? " if close else ""
            yield f"{key}.id={part.id!r} is unknown; {hint}known: {', '.join(known)}"
        if not math.isfinite(part.weight):
            yield f"{key}.weight={part.weight}: must be a finite number"
        if part.timeout_s is not None and not 0 < part.timeout_s < math.inf:
            yield f"{key}.timeout_s={part.timeout_s}: a deadline must be a finite number above 0"
        if part.id == ENV and (part.kwargs or part.timeout_s is not None):
            yield (
                f"{key}: the environment's own rubric takes neither kwargs nor timeout_s; its "
                "arguments are env.kwargs, its deadline rollout.reward_timeout_s"
            )
    if parts and all(part.weight == 0 for _, part in parts):
        yield "reward: every part has weight 0, so that no episode gets an outcome reward"
    yield from _overlong_problems(config, max_response_tokens)
    yield from _unread(config, names)


def _overlong_problems(config: RewardConfig, max_response_tokens: int) -> Iterator[str]:
    overlong = config.overlong
    if not 0 <= overlong.buffer_tokens <= max_response_tokens:
        yield (
            f"reward.overlong.buffer_tokens={overlong.buffer_tokens}: must be between 0 (off) and "
            f"rollout.max_response_tokens={max_response_tokens}"
        )
    if not (overlong.penalty >= 0 and math.isfinite(overlong.penalty)):
        yield (
            f"reward.overlong.penalty={overlong.penalty}: must be finite and at least 0; it is "
            "what is taken off at the limit"
        )


def _unread(config: RewardConfig, names: list[str]) -> Iterator[str]:
    """Settings that nothing would read."""
    default = RewardConfig()
    if config.path is not None and ":" not in config.path:
        yield (
            f"reward.path={config.path!r}: write './file.py:function' or 'package.module:function'"
        )
    if not config.path:
        for name in ("kwargs", "solution", "process"):
            if getattr(config, name) != getattr(default, name):
                yield f"reward.{name} is for the function of reward.path, which is not set"
    if config.success_part is not None and config.success_part not in names:
        yield (
            f"reward.success_part={config.success_part!r} is no part; the parts are: "
            f"{', '.join(names) or 'none (set reward.path or reward.parts)'}"
        )
    threshold = config.success_threshold
    if threshold is not None and not math.isfinite(threshold):
        yield f"reward.success_threshold={threshold}: must be a finite number"
    elif threshold is not None and not names:
        yield (
            "reward.success_threshold: there is no part to compare; set reward.path or reward.parts"
        )
