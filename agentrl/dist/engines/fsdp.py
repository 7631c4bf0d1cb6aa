"""The training engine: a model whole on one process, or in shards over the ranks of a group.

All ranks call the same methods together, each with its own rows; what they compute is what one
process with all rows would.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.batch import Batch, RowView
from agentrl.dist.config import EngineConfig, Offload, Precision
from agentrl.dist.determinism import require_deterministic_kernels
from agentrl.dist.engine import LossFn, PendingSave
from agentrl.dist.exact_scorer import ExactScorer
from agentrl.dist.export import live_tensors, save_pretrained
from agentrl.dist.inference import in_batch_order, infer_batch
from agentrl.dist.lora import Adapters, WithoutAdapters, base_name
from agentrl.dist.metrics import MetricSum
from agentrl.dist.micro_batch import dummy_batch, plan_trained_rows
from agentrl.dist.offload import HostShelf
from agentrl.dist.open_packed import open_packed
from agentrl.dist.optimizer import build_adamw, clip_gradient
from agentrl.dist.packed_model import Head, to_device
from agentrl.dist.ranks import Ranks, group_of_one
from agentrl.dist.schedule import learning_rate
from agentrl.dist.scoring import Scorer, TokenScorer
from agentrl.dist.sharding import ShardedModel, full_tensor
from agentrl.dist.train_state import TrainState
from agentrl.errors import ModelError, TrainingError
from agentrl.rollout.engines.config import HFEngineConfig


class FSDPEngine:
    """A :class:`~agentrl.dist.engine.TrainEngine` over a causal language model of transformers.

    Args:
        model: an ``AutoModelForCausalLM``; float32 where it is trained. Rank 0's weights count:
            other ranks may come with the model on the meta device. Sharded, it stays in use as the
            module that it is.
        tokenizer: saved beside exported weights; None exports weights alone.
        config: optimizer, precision and layout (an ``ActorConfig`` is one).
        ranks: where this process stands among those that hold the model.
        head: ``language`` answers ``logprobs``, ``entropy`` and ``sum_pi_squared``; ``value`` is a
            critic's, which starts at 0 and answers ``values`` and ``next_values``.
        temperature: of the sampled distribution whose log-probabilities are computed.
        total_updates: optimizer steps of the whole run, where the schedule needs them.
        deterministic: same inputs, same bits (on one machine and number of threads and ranks).
        trainable: False only reads: no optimizer, no gradients.
        adapters: of the model, where they are trained in its place.
        exact: settings of the rollout engine whose operations and shapes the model is computed in;
            None computes packed rows.

    Raises:
        ConfigError: the settings do not fit the number of ranks or of attention heads.
        ModelError: the model cannot be run, or not in the way asked for.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: EngineConfig,
        *,
        ranks: Ranks,
        head: Head = "language",
        temperature: float = 1.0,
        total_updates: int | None = None,
        deterministic: bool = True,
        trainable: bool = True,
        adapters: Adapters | None = None,
        exact: HFEngineConfig | None = None,
    ) -> None:
        if deterministic:
            require_deterministic_kernels()
        # Dropout must be off: log-probabilities are compared with those of the rollout engine.
        model.eval()
        self.model = model
        self.tokenizer = tokenizer
        self.adapters = adapters
        self._config = config
        self._total_updates = total_updates
        is_mixed = config.precision is Precision.bf16
        if is_mixed and ranks.world_size == 1:
            group_of_one(ranks.device)
        self.ranks = ranks.arranged(
            shard_size=config.shard_size, sequence_parallel=config.sequence_parallel
        )
        self._packed = open_packed(model, config, self.ranks, head=head)
        if not trainable:
            self._packed.requires_grad_(False)
        # Alone and in float32 there is nothing to shard and nothing to cast.
        self._sharded = (
            ShardedModel(self._packed, self.ranks, config.precision)
            if is_mixed or self.ranks.world_size > 1
            else None
        )
        self._scorer: Scorer
        if exact is None:
            group = self.ranks.sequence_group
            self._scorer = TokenScorer(self._packed, temperature=temperature, group=group)
        else:
            assert self._sharded is None and adapters is None, "refused when settings are checked"
            self._scorer = ExactScorer(model, exact, temperature=temperature)
        self._optimizer = build_adamw(self._packed, config) if trainable else None
        self._weights_shelf = HostShelf(self.ranks.device)
        self._moments_shelf = HostShelf(self.ranks.device)
        self.num_updates = 0
        """Optimizer steps taken."""
        self.num_skipped = 0
        """Optimizer steps left out because the gradient was not finite."""
        if trainable:
            _ = self.learning_rate  # refuses a schedule that cannot work before it is needed

    @property
    def learning_rate(self) -> float:
        """Rate of the next optimizer step."""
        return learning_rate(
            self._config, num_updates=self.num_updates, total_updates=self._total_updates
        )

    def train_mini_batch(
        self,
        batch: Batch | RowView,
        loss_fn: LossFn,
        *,
        tokens_per_micro_batch: int,
        keep: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Accumulate gradients over micro-batches and ranks, clip, step.

        Args:
            batch: this rank's rows, maybe none.
            keep: scores that come along, of these rows; see ``TrainEngine.train_mini_batch``.

        Returns:
            The metrics of ``loss_fn`` over this rank's rows (sums; of ``*_max`` the maximum), and
            the same on all ranks: ``grad_norm`` (before clipping), ``lr``, ``micro_batches``,
            ``skipped``. A gradient that is not finite leaves weights, optimizer and schedule as
            they were, with ``skipped`` = 1. A mini-batch without any trained token on any rank
            changes nothing (``micro_batches`` = 0).
        """
        self._trained("nothing to train")
        self._onload_weights()
        plan = plan_trained_rows(batch, tokens_per_micro_batch)
        num_passes = self.ranks.largest(len(plan))
        metrics = MetricSum()
        kept: list[dict[str, Tensor]] = []
        for index in range(num_passes):
            if self._sharded is not None:
                self._sharded.begin_micro_batch(is_last=index == num_passes - 1)
            if index < len(plan):
                part = batch.select(plan[index])
                scores = self._scorer(part, fields=loss_fn.fields)
                loss, found = loss_fn(scores, part.on_device(self._to_device))
                metrics.add(found)
                kept.append({name: scores[name].detach() for name in keep})
            else:
                # Out of rows before others are: takes part in what all ranks do together.
                scores = self._scorer(dummy_batch(), fields=loss_fn.fields)
                loss = torch.stack([score.sum() for score in scores.values()]).sum() * 0.0
            loss.backward()
        total = metrics.result() | {"micro_batches": num_passes}
        scored = in_batch_order(batch, plan, kept, fields=keep)
        total |= {f"{name}/tokens": value for name, value in scored.items()}
        return total | self._apply_gradient() if num_passes else total

    def infer_batch(
        self,
        batch: Batch | RowView,
        *,
        tokens_per_micro_batch: int,
        fields: Sequence[str] = ("logprobs",),
    ) -> dict[str, Tensor]:
        """Score this rank's rows; see :meth:`~agentrl.dist.engine.TrainEngine.infer_batch`."""
        self._onload_weights()
        found = infer_batch(
            self._scorer,
            batch,
            tokens_per_micro_batch=tokens_per_micro_batch,
            fields=fields,
            num_passes=self.ranks.largest,
        )
        self._release()
        return found

    def export_params(self) -> Iterator[tuple[str, Tensor]]:
        """Stream parameters and persistent buffers by the names that transformers saves them under.

        Tied tensors come once, under the first of their names. Of a sharded model one whole tensor
        exists at a time, on every rank's device; ranks go through the stream together. Tensors of a
        model on one process are the live ones: a receiver that keeps them must copy. Adapters are
        merged, which leaves weights as they are.
        """
        self._release()

        def whole(value: Tensor) -> Tensor:
            self._onload_weights()  # another phase may have had the device since the last tensor
            return full_tensor(value)

        if self.adapters is not None:
            yield from self.adapters.merged(whole)
            return
        for name, value in live_tensors(self._packed):
            yield name, whole(value.detach())

    def without_adapters(self) -> WithoutAdapters:
        """Return the policy that adapters were attached to: of these weights, not a copy."""
        return WithoutAdapters(self)

    def save(self, directory: Path) -> PendingSave:
        """Begin to write all that resuming needs; see ``TrainEngine.save``.

        Raises:
            TrainingError: the engine only reads, so there is nothing of it to resume.
        """
        counters = {"num_updates": self.num_updates, "num_skipped": self.num_skipped}
        return self._state().save(directory, counters)

    def load(self, directory: Path) -> None:
        """Undo :meth:`save`, bit for bit; see ``TrainEngine.load``.

        Raises:
            CheckpointError: the state belongs to another model, or is not complete.
            TrainingError: the engine only reads.
        """
        counters = self._state().load(directory)
        self.num_updates, self.num_skipped = counters["num_updates"], counters["num_skipped"]

    def export_pretrained(self, directory: Path) -> None:
        """Write weights, configuration and tokenizer as transformers loads them, from rank 0.

        Raises:
            ModelError: it is a critic, whose head has no place there.
        """
        if self._packed.value_head is not None:
            raise ModelError(
                "a critic cannot be exported as transformers loads models: its value head would be "
                "lost; what it learned stands in the checkpoints of the run, under critic/"
            )
        is_live = self._sharded is None and self.adapters is None
        whole = None if is_live else self._whole_on_host()
        if self.ranks.rank == 0:
            self._onload_weights()
            save_pretrained(self.model, self.tokenizer, directory, whole)

    def onload(self) -> None:
        """Bring weights back to the device; the optimizer's moments follow when a step needs them.

        Every method that finds something offloaded does so by itself.
        """
        self._onload_weights()

    def offload(self) -> None:
        """Move to host memory what ``offload`` says."""
        self._release()
        if self._config.offload is not Offload.none and self._optimizer is not None:
            self._moments_shelf.put(
                value for state in self._optimizer.state.values() for value in state.values()
            )
        if self._config.offload is Offload.all:
            self._weights_shelf.put(self._packed.parameters())

    def _onload_weights(self) -> None:
        if not self._weights_shelf.is_empty:
            self._weights_shelf.take_back()

    def _onload_moments(self) -> None:
        if not self._moments_shelf.is_empty:
            self._moments_shelf.take_back()

    def _release(self) -> None:
        if self._sharded is not None:
            self._sharded.release()

    def _whole_on_host(self) -> dict[str, Tensor]:
        """Gather the weights of the model, on rank 0; nothing is kept on the others."""
        keep = self.ranks.rank == 0
        return {name: value.cpu() for name, value in self.export_params() if keep}

    def _state(self) -> TrainState:
        self._onload_weights()
        self._onload_moments()
        self._release()
        live = {base_name(name): value for name, value in live_tensors(self._packed)}
        trained = {name: value for name, value in live.items() if value.requires_grad}
        return TrainState(
            # What adapters are attached to is frozen, and not of the state; buffers are.
            model={
                name: value.detach()
                for name, value in live.items()
                if name in trained or not isinstance(value, nn.Parameter)
            },
            parameters=trained,
            optimizer=self._trained("no state of its own to save or to load"),
            rank=self.ranks.rank,
            device=self.ranks.device,
        )

    def _trained(self, lacks: str) -> torch.optim.Optimizer:
        """Return the optimizer.

        Raises:
            TrainingError: the engine only reads.
        """
        if self._optimizer is None:
            raise TrainingError(
                f"this engine only reads (trainable=False), so it has {lacks}; build it with "
                "trainable=True, or leave its role out"
            )
        return self._optimizer

    def _to_device(self, value: Tensor) -> Tensor:
        return to_device(value, self.ranks.device)

    def _apply_gradient(self) -> dict[str, float]:
        optimizer = self._trained("nothing to train")
        lr = self.learning_rate
        norm = clip_gradient(self._packed.parameters(), self._config.grad_clip)
        finite = math.isfinite(norm)
        if finite:
            self._onload_moments()
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            self.num_updates += 1
        else:
            self.num_skipped += 1
        optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": norm, "lr": lr, "skipped": float(not finite)}
