"""Low-rank adapters (LoRA) by peft: beside the frozen weights of a model, or merged into them.

Adapters are put into the layers of a model of transformers where they stand, without a wrapper
around it, so that whatever finds its way through the model finds it as before. Outside, tensors go
by the names that the model had: ``layer.base_layer.weight`` inside is ``layer.weight`` outside.

Source of the formula: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021. An
adapted layer computes ``x W^T + (alpha / rank) x A^T B^T``; merged, its weight is
``W + (alpha / rank) B A``.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from agentrl.batch import Batch, RowView
from agentrl.dist.config import LoraConfig
from agentrl.dist.lora_checks import ALL_LINEAR, lora_problems
from agentrl.errors import ConfigError
from agentrl.seeding import derive_seed

_ADAPTER = "default"  # peft's name of the only adapter there is
_BASE = ".base_layer."
_A, _B = "lora_A", "lora_B"
_MAX_NAMES = 12
_Linear: TypeAlias = nn.Linear | Conv1D


class AdaptedEngine(Protocol):
    """A training engine that may have adapters."""

    adapters: Adapters | None

    def infer_batch(
        self, batch: Batch | RowView, *, tokens_per_micro_batch: int, fields: Sequence[str]
    ) -> dict[str, Tensor]:
        """See :meth:`~agentrl.dist.engine.TrainEngine.infer_batch`."""
        ...


class Adapters:
    """The adapters of one model. Made by :func:`attach_adapters`.

    Args:
        model: with adapters in its layers.
        layers: adapted layer -> peft's layer, by the names that the model had.
        peft_config: as peft wants to read it beside the adapters.
    """

    def __init__(self, model: nn.Module, layers: dict[str, Any], peft_config: Any) -> None:
        self.model = model
        self.layers = layers
        self._peft_config = peft_config

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Have the model compute what it did without adapters."""
        self._set_disabled(True)
        try:
            yield
        finally:
            self._set_disabled(False)

    def merged(self, full: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Stream every tensor of the model as it would be without adapters, but trained.

        Neither frozen weights nor adapters are changed. One merged weight exists at a time.

        Args:
            full: makes the whole of a tensor that may be one rank's shard; called in the same order
                on every rank.

        Yields:
            Name before adapters were attached, and tensor in float32; tied ones once.
        """
        seen: set[int] = set()
        for name, value in self.model.state_dict(keep_vars=True).items():
            if id(value) in seen or is_adapter(name):
                continue
            seen.add(id(value))
            layer, _, kind = name.rpartition(_BASE)
            if layer and kind == "weight":
                yield f"{layer}.weight", self._merged_weight(layer, value, full)
            else:
                whole = full(value.detach())
                yield base_name(name), whole.float() if whole.is_floating_point() else whole

    def tensors(self, full: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Stream the adapters' own tensors: ``<layer>.lora_A.weight`` [rank, in], ``lora_B``."""
        for layer, adapted in self.layers.items():
            for side in (_A, _B):
                weight = getattr(adapted, side)[_ADAPTER].weight
                yield f"{layer}.{side}.weight", full(weight.detach())

    def save(self, directory: Path, tensors: dict[str, Tensor]) -> None:
        """Write a directory that ``peft.PeftModel.from_pretrained`` loads.

        Args:
            directory: made where it is not there.
            tensors: all of :meth:`tensors`.
        """
        directory.mkdir(parents=True, exist_ok=True)
        named = {f"base_model.model.{n}": v.cpu().contiguous() for n, v in tensors.items()}
        save_file(named, directory / "adapter_model.safetensors", metadata={"format": "pt"})
        self._peft_config.save_pretrained(str(directory))

    @torch.no_grad()
    def _merged_weight(
        self, layer: str, weight: Tensor, full: Callable[[Tensor], Tensor]
    ) -> Tensor:
        adapted = self.layers[layer]
        a = full(getattr(adapted, _A)[_ADAPTER].weight.detach()).float()
        b = full(getattr(adapted, _B)[_ADAPTER].weight.detach()).float()
        merged = full(weight.detach()).to(torch.float32, copy=True)
        delta = b @ a
        return merged.add_(delta.T if adapted.fan_in_fan_out else delta,
                           alpha=adapted.scaling[_ADAPTER])  # fmt: skip

    def _set_disabled(self, disabled: bool) -> None:
        # Not by peft's enable_adapters(): that turns requires_grad of parameters off and on, which
        # a sharded model may hold elsewhere just then.
        for adapted in self.layers.values():
            adapted._disable_adapters = disabled


class WithoutAdapters:
    """The policy that a run with adapters started from: its actor, with them left out.

    No second copy of the weights: the reference of a KL for nothing but its forward pass.

    Args:
        engine: trains adapters.
    """

    def __init__(self, engine: AdaptedEngine) -> None:
        self._engine = engine

    def infer_batch(
        self,
        batch: Batch | RowView,
        *,
        tokens_per_micro_batch: int,
        fields: Sequence[str] = ("logprobs",),
    ) -> dict[str, Tensor]:
        """Score this rank's rows; see :meth:`~agentrl.dist.engine.TrainEngine.infer_batch`."""
        assert self._engine.adapters is not None, "an engine without adapters is no reference"
        with self._engine.adapters.disabled():
            return self._engine.infer_batch(
                batch, tokens_per_micro_batch=tokens_per_micro_batch, fields=fields
            )

    def offload(self) -> None:
        """Do nothing: the weights are the actor's."""


def attach_adapters(model: Any, config: LoraConfig, *, seed: int, source: str = "") -> Adapters:
    """Put adapters into ``model``, in place: from here on nothing else of it trains.

    ``B`` starts at 0, so that the model computes what it did; ``A`` is drawn by ``seed`` and the
    layer's name, whatever was drawn before.

    Args:
        model: of transformers, not sharded yet. Adapters are float32, whatever its weights are.
        config: rank, scale and layers.
        seed: of the run.
        source: of the model, noted beside exported adapters.

    Raises:
        ConfigError: no layer is chosen, one that cannot be adapted, or a rank beyond all of them;
            the extra ``peft`` is missing.
    """
    problems = list(lora_problems(config))
    if problems:
        raise ConfigError(problems[0])
    chosen = _chosen_layers(model, config)
    _refuse_rank(config, chosen)
    peft_config = _peft_config(config, model, chosen, source)
    from peft import inject_adapter_in_model

    with torch.random.fork_rng(devices=[]):  # peft draws what _initialize replaces
        inject_adapter_in_model(copy.deepcopy(peft_config), model, adapter_name=_ADAPTER)
    layers = {name: model.get_submodule(name) for name in chosen}
    for name, layer in layers.items():
        _initialize(name, layer, seed)
    return Adapters(model, layers, peft_config)


def is_adapter(name: str) -> bool:
    """Whether a parameter's name inside the model is that of an adapter."""
    return f".{_A}." in name or f".{_B}." in name


def base_name(name: str) -> str:
    """Return the name outside of a tensor of an adapted model.

    That is the name before adapters were attached, or of an adapter as peft stores it.
    """
    return name.replace(_BASE, ".").replace(f".{_ADAPTER}.", ".") if _touched(name) else name


def _touched(name: str) -> bool:
    return _BASE in name or is_adapter(name)


def _chosen_layers(model: Any, config: LoraConfig) -> dict[str, _Linear]:
    """Return the layers that get adapters: linear ones, but not the output embedding."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    linear: dict[str, _Linear] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D))
    }
    if config.target_modules == ALL_LINEAR:
        chosen = {name: module for name, module in linear.items() if module is not head}
    else:
        pattern = re.compile(config.target_modules)
        chosen = {name: module for name, module in linear.items() if pattern.fullmatch(name)}
    for name, module in chosen.items():
        if module is head:
            raise ConfigError(
                f"lora.target_modules={config.target_modules!r} matches {name}, the output "
                "embedding, which is read by the vocabulary pass and cannot be adapted; leave it "
                "out"
            )
    if not chosen:
        adaptable = [name for name, module in linear.items() if module is not head]
        kinds = sorted({name.rpartition(".")[2] for name in adaptable})
        example = f", such as {adaptable[0]!r}" if adaptable else ""
        raise ConfigError(
            f"lora.target_modules={config.target_modules!r} matches no linear layer of "
            f"{type(model).__name__}, which has: {', '.join(kinds[:_MAX_NAMES]) or 'none'}. It is "
            f"compared with whole names{example}: write {ALL_LINEAR}, or e.g. "
            rf"'.*\.({'|'.join(kinds[:2]) or 'q_proj'})'"
        )
    return chosen


def _refuse_rank(config: LoraConfig, chosen: dict[str, _Linear]) -> None:
    largest = max(min(module.weight.shape) for module in chosen.values())
    if config.rank > largest:
        raise ConfigError(
            f"lora.rank={config.rank} is above {largest}, the most that a chosen layer can have; "
            f"use at most {largest}, or lora.rank=0 to train all weights"
        )


def _shortest(model: nn.Module, chosen: set[str]) -> list[str]:
    """Return last parts of names where they say the same as the whole ones.

    Programs that serve adapters expect ``q_proj`` in their configuration.
    """
    ends = {name.rpartition(".")[2] for name in chosen}
    meant = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in ends}
    return sorted(ends if meant == chosen else chosen)


def _peft_config(
    config: LoraConfig, model: nn.Module, chosen: dict[str, _Linear], source: str
) -> Any:
    import peft

    return peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]  # floats work as well
        target_modules=_shortest(model, set(chosen)),
        fan_in_fan_out=all(isinstance(module, Conv1D) for module in chosen.values()),
        # Log-probabilities are compared with those of the rollout engine: nothing is dropped.
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        base_model_name_or_path=source,
        inference_mode=True,  # as it is saved: who loads it to train on says so
    )


@torch.no_grad()
def _initialize(name: str, layer: Any, seed: int) -> None:
    """Draw ``A`` as peft and the paper's code do: uniform in +-1/sqrt(in); ``B`` is 0."""
    a, b = getattr(layer, _A)[_ADAPTER].weight, getattr(layer, _B)[_ADAPTER].weight
    generator = torch.Generator().manual_seed(derive_seed(seed, "lora", name))
    drawn = torch.empty(a.shape).uniform_(-1.0, 1.0, generator=generator)
    a.data = (drawn / math.sqrt(a.shape[1])).to(a.device)
    b.data = torch.zeros(b.shape, device=b.device)
    a.requires_grad_(True)
    b.requires_grad_(True)
