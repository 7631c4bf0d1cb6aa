"""What an SGLang server says of the weights that it serves, and what that has to be.

It computes no checksums of ours. It has a fingerprint of each of its tensors (on a GPU), some of
which hold several of ours; that tells which ones changed, not to what. It reads rows of a tensor
back, for Llamas. What it was sent it takes at its word: a name that it does not know is left out
without a refusal, and a projection that is larger than its own is cut to size (a smaller one ends
it), so the two are compared here.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.errors import ConfigError, EngineError
from agentrl.rollout.engines.http import Reply
from agentrl.weights.served import WeightSpec

Ask = Callable[[str, Any], Awaitable[Reply]]
"""Posts a body to a path of the server; the reply may have any status."""
Shapes = Mapping[str, tuple[int, ...]]

_STACKED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
_DTYPES = {"auto": "bfloat16", "half": "float16", "float": "float32"}
"""What the server calls a dtype -> its name in torch, where that is another."""
_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size",
)  # fmt: skip
_PARAMETERS = (".weight", ".bias")
_DRAFT = "draft."
"""Begins the names of a model that only guesses ahead."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Update:
    """What an update left behind."""

    sums: Mapping[str, int]
    """Checksums of what was sent; none where no update has succeeded."""
    prints: Mapping[str, str] | None
    """The server's fingerprints; None where it cannot say."""


def served_specs(shapes: Shapes, info: Mapping[str, Any]) -> list[WeightSpec]:
    """Return what is served of tensors by a server that says ``info`` of itself."""
    dtype = str(info.get("dtype", "auto"))
    dtype = _DTYPES.get(dtype, dtype)
    return [WeightSpec(name=name, shape=shape, dtype=dtype) for name, shape in shapes.items()]


async def served_fingerprints(ask: Ask) -> dict[str, str] | None:
    """Return the server's name of a tensor -> its fingerprint; None where it cannot say.

    Raises:
        EngineError: it cannot be reached, or not in time.
    """
    reply = await ask("/weights_checker", {"action": "checksum"})
    if reply.status != 200:
        return None
    found: dict[str, list[str]] = {}
    try:
        for rank in reply.body["ranks"]:
            for name, value in rank["checksums"].items():
                found.setdefault(name, []).append(str(value))
    except (LookupError, TypeError, AttributeError):
        return None
    return {
        name: " ".join(sorted(values))
        for name, values in found.items()
        if not name.startswith(_DRAFT)
    } or None


async def refuse_other_model(
    ask: Ask, info: Mapping[str, Any], ours: Collection[str], config: Mapping[str, Any]
) -> None:
    """Refuse a server that would cut tensors, leave some out, or keep some that nobody sends.

    Where it cannot say, or stacks tensors in other ways than are known here, nothing is refused.

    Args:
        info: what the server says of itself.
        ours: names of the tensors that will be sent.
        config: of the model that is trained.

    Raises:
        ConfigError: it serves another model than is trained.
        EngineError: it cannot be reached, or not in time.
    """
    _refuse_other_sizes(str(info.get("model_path", "")), config)
    served = await served_fingerprints(ask)
    if served is None or info.get("pp_size", 1) != 1:  # stages have copies of tied tensors
        return
    places = {name: _place(name, served) for name in ours}
    homeless = [name for name, place in places.items() if place is None]
    unfed = sorted(
        name for name in served.keys() - set(places.values()) if name.endswith(_PARAMETERS)
    )
    if bool(homeless) == bool(unfed):
        return
    what = "has no place for" if homeless else "has, and nobody trains,"
    raise ConfigError(
        f"the SGLang server serves another model than is trained: it {what} "
        f"{len(homeless or unfed)} tensors, the first {(homeless or unfed)[0]!r}; give both the "
        "same config.json (its --model-path, and model.path)"
    )


def _refuse_other_sizes(model_path: str, config: Mapping[str, Any]) -> None:
    """Compare sizes where the server's model lies on this machine."""
    path = Path(model_path) / "config.json"
    try:
        served = json.loads(path.read_text()) if model_path else {}
    except (OSError, ValueError):
        return
    found = [name for name in _SIZES if None not in (config.get(name), served.get(name))]
    if wrong := [name for name in found if config[name] != served[name]]:
        raise ConfigError(
            f"the SGLang server serves another model than is trained: {path} has {wrong[0]} = "
            f"{served[wrong[0]]}, and model.path {config[wrong[0]]}; give both the same config.json"
        )


def refuse_unchanged(before: Update, after: Update) -> None:
    """Refuse an update after which a tensor is what it was, though another one was sent.

    Raises:
        EngineError: stale weights, or such as nobody sent; names the server's tensor.
    """
    if not before.sums or before.prints is None or after.prints is None:
        return
    groups: dict[str | None, list[str]] = {}
    for name in after.sums:
        groups.setdefault(_place(name, after.prints), []).append(name)
    others = sorted(after.prints.keys() - groups.keys())
    for place, names in groups.items():
        have = others if place is None else [place]  # several of ours, stacked in ways unknown here
        sent_other = any(before.sums.get(name) != after.sums[name] for name in names)
        has_other = any(before.prints.get(name) != after.prints[name] for name in have)
        if sent_other != has_other:
            did, opposite = ("changed", "was not") if has_other else ("did not change", "was")
            raise EngineError(
                f"stale policy: {have[0] if have else names[0]!r} as SGLang serves it {did} in the "
                f"last update, and what it was sent for it {opposite} another than before"
            )


def readable(shapes: Shapes) -> list[str]:
    """Return the names of tensors whose first rows the server does not mistake for others.

    It takes a head to be as wide as the hidden size over the number of heads, also where
    ``config.head_dim`` says otherwise, and looks for keys and values behind queries of that width.
    """
    return [name for name in shapes if _has_plain_heads(name, shapes)]


def _has_plain_heads(name: str, shapes: Shapes) -> bool:
    before, part, _ = name.rpartition("k_proj" if "k_proj" in name else "v_proj")
    queries = shapes.get(f"{before}q_proj.weight", ())
    return not part or len(set(queries)) == 1


async def read_rows(ask: Ask, name: str, count: int) -> list[float] | None:
    """Return the first rows of a tensor as served, flat; None where the server cannot read it.

    Raises:
        EngineError: it answered something else, cannot be reached, or not in time.
    """
    reply = await ask("/get_weights_by_name", {"name": name, "truncate_size": count})
    if reply.status != 200 or not isinstance(reply.body, list):
        return None
    try:
        flat = np.asarray(reply.body, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError) as error:
        raise EngineError(
            f"SGLang read {name!r} back in another form than numbers: {reply.text}"
        ) from error
    return flat.tolist() or None  # a rank that has no head of its own answers no rows


def _place(name: str, served: Collection[str]) -> str | None:
    """Return the server's name of the tensor that holds ours; None where it is unknown."""
    stacked = (name.replace(part, whole) for part, whole in _STACKED.items() if part in name)
    return next((place for place in (name, *stacked) if place in served), None)
