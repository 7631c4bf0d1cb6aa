"""Tells whether a run may go on under the settings it is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.errors import CheckpointError


def changed_settings(
    saved: Mapping[str, Any], current: Mapping[str, Any], *, free: tuple[str, ...] = ()
) -> dict[str, tuple[Any, Any]]:
    """Compare two configurations.

    Args:
        free: dotted keys, or prefixes that end in a dot, that may differ.

    Returns:
        Dotted key -> (saved value, current value) where they differ; None for an absent key.
    """
    before, after = dict(_flatten(saved)), dict(_flatten(current))
    for flat, other in ((before, after), (after, before)):
        for key in [key for key, value in flat.items() if value == {}]:
            if any(name.startswith(f"{key}.") for name in other):
                del flat[key]  # what the other one has in it is compared one by one
    return {
        key: (before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if not _same(before.get(key), after.get(key)) and not is_among(key, free)
    }


def is_among(key: str, names: tuple[str, ...]) -> bool:
    """Whether a dotted key is one of ``names``, or begins with one of them that ends in a dot."""
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in names)


def refuse_changed_settings(
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    *,
    free: tuple[str, ...] = (),
    why: Mapping[str, str] | None = None,
) -> None:
    """Refuse to resume with settings that would train something else.

    Args:
        why: dotted key -> what makes a setting change the training, where nobody would guess.

    Raises:
        CheckpointError: names every setting with both values.
    """
    changed = changed_settings(saved, current, free=free)
    if not changed:
        return
    reasons = dict.fromkeys((why or {})[key] for key in changed if key in (why or {}))
    listed = "; ".join(
        f"{key} was {old!r} and is now {new!r}" for key, (old, new) in changed.items()
    )
    because = "".join(f" ({reason})" for reason in reasons)
    raise CheckpointError(
        f"the checkpoint was made with other settings: {listed}{because}. Use the old values, "
        "start a new run, or set trainer.force_resume=true to go on all the same"
    )


def _same(one: Any, other: Any) -> bool:
    """Compare two values; unlike ``==``, NaN is the same as NaN, within lists too."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    both_nan = isinstance(one, float) and isinstance(other, float) and one != one != other != other
    return both_nan or bool(one == other)


def _flatten(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        return [
            item
            for key, inner in value.items()
            for item in _flatten(inner, f"{prefix}.{key}" if prefix else str(key))
        ]
    return [(prefix, value)]
