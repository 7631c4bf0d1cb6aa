"""A causal language model over packed rows, with its head, as one module.

Everything runs inside :meth:`PackedModel.forward`, so that a hook on this module (sharding) is a
hook on all of it.

Legend: ``N`` tokens of the buffer, ``B`` rows, ``T`` longest row, ``M`` scored tokens, ``C`` width
of the model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agentrl.dist.attention import IMPLEMENTATION, Packing, packed_masks
from agentrl.dist.config import Recompute
from agentrl.dist.head import POLICY_FIELDS, scores_of_logits, token_scores
from agentrl.dist.layers import prepare_layers
from agentrl.dist.sequence_parallel import SequenceGroup, joined
from agentrl.errors import ModelError

logger = logging.getLogger(__name__)

Head = Literal["language", "value"]
"""What a model answers of a token: log-probabilities and their kin, or values."""

VALUE_FIELDS = ("values", "next_values")
_PROBE_LENGTHS = (5, 3, 9)
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_TOLERANCE_HALF = 0.05


class Share(NamedTuple):
    """What a rank has to do of a buffer that several share."""

    group: SequenceGroup
    tokens: slice
    """Of the buffer."""
    before: tuple[int, int]
    """First and last but one of the scored tokens whose predecessors are this rank's."""
    at: tuple[int, int]
    """The same of those that are this rank's themselves."""


class PackedInputs(NamedTuple):
    """A micro-batch as the model takes it, on its device."""

    ids: Tensor
    """int64 [1, N]"""
    positions: Tensor
    """int64 [1, N]: of each token in its row."""
    packing: Packing
    scored: Tensor
    """int64 [M]: indices into the buffer of the tokens to score, none the first of its row."""
    share: Share | None = None
    """Where other ranks hold parts of the buffer: what is this rank's."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Layout:
    """How a model can be run.

    Found by :func:`find_layout` on real weights; the same for every model of a configuration.
    """

    packed: bool
    """Rows go through it without padding; otherwise they are padded."""
    plain_head: bool
    """Logits are a matrix product with the last hidden state and nothing else."""


class PackedModel(nn.Module):
    """A model of transformers that scores tokens of packed rows.

    Args:
        model: an ``AutoModelForCausalLM``. Its attention function is replaced (which changes
            nothing for whoever runs it by itself), and its layers' ``forward`` where they are
            compiled or recomputed.
        head: ``value`` makes a critic of it: a new ``value_head``, from [C] to one value, starts at
            0, so that the first values are 0; an output embedding of its own is not trained.
        layout: where the weights are not there to find it out.
        recompute: which activations are computed again in the backward pass.
        compile: compile every layer.

    Raises:
        ModelError: the model's scores depend on other rows, or on later tokens.
    """

    def __init__(
        self,
        model: Any,
        *,
        head: Head = "language",
        layout: Layout | None = None,
        recompute: Recompute = Recompute.none,
        compile: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.value_head = _value_head(model) if head == "value" else None
        self.layout = layout or find_layout(model)
        self.compiled = compile
        if self.layout.packed:
            model.set_attn_implementation(IMPLEMENTATION)
        prepare_layers(model, recompute=recompute, compile=compile)

    @property
    def fields(self) -> tuple[str, ...]:
        """What it can be asked for."""
        return POLICY_FIELDS if self.value_head is None else VALUE_FIELDS

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self.model.device

    def forward(
        self, inputs: PackedInputs, *, fields: Sequence[str], temperature: float = 1.0
    ) -> tuple[Tensor, ...]:
        """Return one float32 [M] per field, with gradient.

        Raises:
            ValueError: a field that this model's head does not know.
        """
        unknown = [name for name in fields if name not in self.fields]
        if unknown:
            raise ValueError(f"cannot score {unknown}: this head knows {list(self.fields)}")
        if self.value_head is not None:
            values = self._values(self._states(inputs))
            return tuple(_pick(values, inputs, before=name == "values") for name in fields)
        targets = inputs.ids[0].index_select(0, inputs.scored)
        if inputs.share is not None:
            first, last = inputs.share.before
            targets = targets[first:last] if first < last else targets[:1]
        if not self.layout.plain_head:
            logits = _before_scored(self._run(self.model, inputs, "logits"), inputs)
            found = scores_of_logits(logits, targets, temperature=temperature, fields=fields)
        else:
            head = self.model.get_output_embeddings()
            found = token_scores(
                _before_scored(self._states(inputs), inputs),
                head.weight,
                head.bias,
                targets,
                temperature=temperature,
                fields=fields,
            )
        if inputs.share is None:
            return found
        return tuple(_joined(score, inputs, inputs.share.before) for score in found)

    def _states(self, inputs: PackedInputs) -> Tensor:
        """Return the last hidden states, [N, C], or of this rank's share of the tokens."""
        return self._run(self.model.get_decoder(), inputs, "last_hidden_state")

    def _run(self, module: Any, inputs: PackedInputs, output: str) -> Tensor:
        run = run_packed if self.layout.packed else run_padded
        return run(module, inputs, output)

    def _values(self, states: Tensor) -> Tensor:
        assert self.value_head is not None
        bias = self.value_head.bias
        return F.linear(
            states.float(), self.value_head.weight.float(), None if bias is None else bias.float()
        ).squeeze(1)


def _value_head(model: Any) -> nn.Linear:
    width = model.config.get_text_config().hidden_size
    head = nn.Linear(width, 1, device=model.device, dtype=next(model.parameters()).dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    unused = model.get_output_embeddings()
    if unused is not None and unused.weight is not model.get_input_embeddings().weight:
        unused.requires_grad_(False)
    return head


def _before_scored(states: Tensor, inputs: PackedInputs) -> Tensor:
    """Return the states at the tokens before scored ones, of which a rank may hold some.

    A rank that holds none takes one state, which counts for nothing: it does as the others do.
    """
    if inputs.share is None:
        return states.index_select(0, inputs.scored - 1)
    first, last = inputs.share.before
    if first == last:
        return states[:1]
    return states.index_select(0, inputs.scored[first:last] - 1 - inputs.share.tokens.start)


def _joined(score: Tensor, inputs: PackedInputs, found: tuple[int, int]) -> Tensor:
    assert inputs.share is not None
    total = len(inputs.scored)
    if found[0] == found[1]:
        return joined(score * 0.0, (0, 1), total, inputs.share.group)
    return joined(score, found, total, inputs.share.group)


def _pick(values: Tensor, inputs: PackedInputs, *, before: bool) -> Tensor:
    """Return values [M] of the states before scored tokens, or after them."""
    share, at = inputs.share, inputs.scored - int(before)
    if share is None:
        return values.index_select(0, at)
    first, last = share.before if before else share.at
    own = (
        values[:1] if first == last else values.index_select(0, at[first:last] - share.tokens.start)
    )
    return _joined(own, inputs, (first, last))


def run_packed(module: Any, inputs: PackedInputs, output: str) -> Tensor:
    """Run ``module`` over this rank's part of the buffer; return ``output`` as [N, ...]."""
    token = packed_masks.set(True)
    part = slice(None) if inputs.share is None else inputs.share.tokens
    try:
        found = module(
            input_ids=inputs.ids[:, part],
            position_ids=inputs.positions[:, part],
            packing=inputs.packing,
            use_cache=False,
        )
    finally:
        packed_masks.reset(token)
    return getattr(found, output)[0]


def run_padded(module: Any, inputs: PackedInputs, output: str) -> Tensor:
    """Run ``module`` over rows padded on the right, which a causal model never looks at."""
    packing = inputs.packing
    size = packing.num_rows * packing.max_length
    ids = inputs.ids.new_zeros(size).index_copy_(0, packing.places, inputs.ids[0])
    found = module(input_ids=ids.view(packing.num_rows, -1), use_cache=False)
    return getattr(found, output).flatten(0, 1).index_select(0, packing.places)


def pack(lengths: Tensor, device: torch.device) -> tuple[Tensor, Packing]:
    """Return positions [1, N] and boundaries of rows of ``lengths`` (int64 [B], on the CPU)."""
    ends = lengths.cumsum(0)
    starts = torch.repeat_interleave(ends - lengths, lengths)
    positions = torch.arange(int(ends[-1])) - starts
    longest = int(lengths.max())
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    cu_seqlens = F.pad(ends, (1, 0)).to(torch.int32)
    places = rows * longest + positions
    packing = Packing(to_device(cu_seqlens, device), to_device(places, device), longest)
    return to_device(positions[None], device), packing


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the CPU without waiting for what the device is doing."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@torch.no_grad()
def find_layout(model: Any) -> Layout:
    """Find out by numbers how a model can be run.

    Rows are scored one by one and together. A model whose attention cannot be told where rows
    begin (sliding windows, capped scores) is run on padded rows.

    Raises:
        ModelError: together they differ even when padded: the model is not causal.
    """
    device = next(model.parameters()).device
    vocabulary = model.config.get_text_config().vocab_size
    ids = (torch.arange(sum(_PROBE_LENGTHS)) * 7 + 1).remainder(vocabulary)
    positions, packing = pack(torch.tensor(_PROBE_LENGTHS), device)
    inputs = PackedInputs(ids.to(device)[None], positions, packing, ids[:0].to(device))
    decoder = model.get_decoder()
    alone = torch.cat(
        [
            decoder(input_ids=row[None], use_cache=False).last_hidden_state[0]
            for row in ids.to(device).split(_PROBE_LENGTHS)
        ]
    )
    plain_head = _has_plain_head(model, ids[: _PROBE_LENGTHS[0]].to(device))
    reason = _why_not_packed(model, inputs, alone)
    if reason is None:
        return Layout(packed=True, plain_head=plain_head)
    padded = run_padded(decoder, inputs, "last_hidden_state")
    if not _close(padded, alone):
        raise ModelError(
            f"{_name(model)} gives other hidden states for rows scored together than for each "
            "alone, packed and padded: its layers look across rows or at later tokens; train a "
            "causal language model that transformers runs with attn_implementation='sdpa'"
        )
    logger.warning(
        "%s cannot be run on packed rows (%s): rows are padded to the longest of a micro-batch, "
        "which gives the same results and wastes memory and time",
        _name(model),
        reason,
    )
    return Layout(packed=False, plain_head=plain_head)


def _why_not_packed(model: Any, inputs: PackedInputs, alone: Tensor) -> str | None:
    """Return what keeps a model from being run packed, None if nothing does."""
    text = model.config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    if getattr(text, "sliding_window", None) or kinds - {"full_attention"}:
        return "its attention has windows"
    before = model.config._attn_implementation
    try:
        with _without_warnings():
            model.set_attn_implementation(IMPLEMENTATION)
        found = run_packed(model.get_decoder(), inputs, "last_hidden_state")
    except (ModelError, TypeError, ValueError) as error:
        return str(error)
    finally:
        with _without_warnings():
            model.set_attn_implementation(before)
    return None if _close(found, alone) else "its attention cannot be told where rows begin"


def _close(got: Tensor, want: Tensor) -> bool:
    error = (got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-12)
    return float(error) <= _TOLERANCE.get(want.dtype, _TOLERANCE_HALF)


def _has_plain_head(model: Any, ids: Tensor) -> bool:
    """Some families scale or cap their logits after the head; adapters may sit on it."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return False
    states = model.get_decoder()(input_ids=ids[None], use_cache=False).last_hidden_state
    logits = model(input_ids=ids[None], use_cache=False).logits
    return torch.allclose(head(states), logits, atol=1e-5, rtol=1e-5)


def _name(model: Any) -> str:
    return f"{type(model).__name__} ({model.config.model_type})"


@contextmanager
def _without_warnings() -> Iterator[None]:
    noisy = logging.getLogger("transformers.modeling_utils")
    before, noisy.disabled = noisy.disabled, True
    try:
        yield
    finally:
        noisy.disabled = before
