"""What runs in every rank of a vLLM engine: weights come in here, and are summed where they lie.

vLLM makes :class:`WorkerExtension` a base of its worker, so that ``collective_rpc`` finds the
methods; they begin with ``agentrl_`` because none may hide one of vLLM's. Weights are copied
straight into the views of :mod:`.vllm_names`: no loader of vLLM's runs, parameters stay where they
are, and captured CUDA graphs stay valid.

**CPU build.** vLLM packs the weights of linear maps there and empties the originals, so that
nothing can be loaded into them, and a tied head is packed on its own and goes stale without an
error. Importing this module, which happens before the model is built, replaces the packing by
torch's own linear map.
"""

# pyright: reportMissingImports=false
# vLLM need not be installed where types are checked.
from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from agentrl.errors import EngineError
from agentrl.rollout.engines.vllm_names import Placement, check_names, find_placements
from agentrl.weights.channels import Address, Receiver, open_receiver
from agentrl.weights.checksum import SliceSums, TensorSlice, wrapped_sum
from agentrl.weights.plan import BucketPlan


def _keep_weights_on_cpu() -> None:
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    if current_platform.is_cpu():
        utils.dispatch_cpu_unquantized_gemm = dispatch


_keep_weights_on_cpu()


class WorkerExtension:
    """Methods of one rank that the engine loop calls on all of them at once."""

    _agentrl_placements: dict[str, list[Placement]]
    _agentrl_counted: list[Placement]
    """Whose sums are this rank's to give."""
    _agentrl_summing: SliceSums
    _agentrl_plan: BucketPlan
    _agentrl_receiver: Receiver | None = None

    def agentrl_map(
        self, expected: dict[str, tuple[int, ...]]
    ) -> list[tuple[str, tuple[int, ...], str]]:
        """Find where every tensor lies, and check that it is all of them.

        Args:
            expected: name -> shape of every parameter in ``transformers``, tied ones once.

        Returns:
            name, shape and dtype of every tensor that is served, in the order of ``expected``.

        Raises:
            EngineError: see :func:`~agentrl.rollout.engines.vllm_names.check_names`.
        """
        worker: Any = self
        model = worker.model_runner.get_model()
        parallel = worker.parallel_config
        placements = find_placements(
            model,
            packed=getattr(model, "packed_modules_mapping", {}),
            tensor_parallel=parallel.tensor_parallel_size,
            rank=worker.rank % parallel.tensor_parallel_size,
        )
        check_names(placements, expected, model=type(model).__name__)
        by_name: dict[str, list[Placement]] = defaultdict(list)
        for placement in placements:
            by_name[placement.name].append(placement)
        self._agentrl_placements = dict(by_name)
        self._agentrl_counted = [part for part in placements if part.counted]
        self._agentrl_summing = SliceSums(
            [TensorSlice(part.view, part.shape, part.starts) for part in self._agentrl_counted]
        )
        return [
            (name, tuple(shape), str(by_name[name][0].view.dtype).removeprefix("torch."))
            for name, shape in expected.items()
        ]

    def agentrl_connect(self, plan: BucketPlan, address: Address) -> None:
        """Open the channel that weights come through, in place of the one before."""
        worker: Any = self
        if self._agentrl_receiver is not None:
            self._agentrl_receiver.close()
            self._agentrl_receiver = None
        self._agentrl_plan = plan
        self._agentrl_receiver = open_receiver(address, plan, worker.device)

    def agentrl_load_bucket(self, index: int) -> None:
        """Copy this rank's part of one bucket into its parameters; returns when it is there."""
        worker: Any = self
        assert self._agentrl_receiver is not None, "no channel: connect first"
        bucket = self._agentrl_plan.buckets[index]
        flat = self._agentrl_receiver.receive(index)
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for piece, whole in zip(bucket.slices, bucket.views(flat), strict=True):
            for placement in self._agentrl_placements[piece.name]:
                targets.append(placement.view)
                sources.append(placement.cut(whole))
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
        if worker.device.type == "cuda":  # the sender may fill the slot again
            torch.cuda.current_stream(worker.device).synchronize()

    def agentrl_sums(self) -> dict[str, int]:
        """Sum this rank's slices where they lie.

        Returns:
            name -> what they add to the tensor's checksum, modulo 2^64; elements that other ranks
            hold too are counted by one of them.

        Raises:
            EngineError: values that are not finite.
        """
        _check_finite([part for parts in self._agentrl_placements.values() for part in parts])
        sums: dict[str, list[int]] = defaultdict(list)
        found = self._agentrl_summing.compute().tolist()
        for part, value in zip(self._agentrl_counted, found, strict=True):
            sums[part.name].append(value)
        return {name: wrapped_sum(values) for name, values in sums.items()}


def _check_finite(placements: list[Placement]) -> None:
    views = [part.view for part in placements]
    largest = torch._foreach_norm(views, float("inf"))  # pyright: ignore[reportPrivateImportUsage]
    wrong = ~torch.isfinite(torch.stack(list(largest)))
    if wrong.any():
        names = sorted({placements[i].name for i in wrong.nonzero().flatten().tolist()})
        raise EngineError(
            f"weight update: {len(names)} tensors hold values that are not finite, the first "
            f"{names[0]!r}; look at the training step before it, and send sound weights before "
            "anything is sampled"
        )
