"""A run that saves every step and never ends: python trains_for_ever.py DIRECTORY."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from agentrl.dist.engine import PendingSave
from agentrl.dist.train_state import TrainState
from agentrl.train.checkpoint import CheckpointStore


class Engine:
    """Trains a layer with gradients that follow from its weights, a step and a random number."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layer = nn.Linear(300, 300)
        self.state = TrainState(
            model=dict(layer.state_dict(keep_vars=True)),
            parameters=dict(layer.named_parameters()),
            optimizer=torch.optim.AdamW(layer.parameters(), lr=0.01, fused=True),
            device=torch.device("cpu"),
        )
        self.num_updates = 0

    def train(self) -> None:
        """Make one optimizer step."""
        for parameter in self.state.parameters.values():
            parameter.grad = parameter.detach() * 0.5 + torch.rand(()) - 0.5
        self.state.optimizer.step()
        self.num_updates += 1

    def save(self, directory: Path) -> PendingSave:
        """See :class:`~agentrl.dist.engine.TrainEngine`."""
        return self.state.save(directory, {"num_updates": self.num_updates})

    def load(self, directory: Path) -> None:
        """See :class:`~agentrl.dist.engine.TrainEngine`."""
        self.num_updates = self.state.load(directory)["num_updates"]


def main(directory: Path) -> None:
    """Go on from the newest checkpoint, for ever."""
    torch.set_num_threads(1)
    store, engine = CheckpointStore(directory, config={}), Engine()
    newest = store.load_latest()
    if newest is not None:
        engine.load(newest.of_engine("actor"))
    while True:
        engine.train()
        engines: dict[str, Any] = {"actor": engine}
        store.save(engine.num_updates, engines, {"step": engine.num_updates}, score=None)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
