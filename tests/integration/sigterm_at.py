"""The command line, told to stop at a moment of its own: python sigterm_at.py MOMENT STEP ..."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from agentrl.cli.main import main
from agentrl.train.trainer import Trainer

METHODS = {"collect": "collect", "update": "train_on"}


def stopping(method: Callable[..., Any], step: int) -> Callable[..., Any]:
    """Send this process a SIGTERM when ``method`` begins in ``step``."""

    def wrapped(trainer: Trainer, *arguments: Any) -> Any:
        if trainer.step + 1 == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return method(trainer, *arguments)

    return wrapped


if __name__ == "__main__":
    moment, step = sys.argv[1], int(sys.argv[2])
    name = METHODS[moment]
    setattr(Trainer, name, stopping(getattr(Trainer, name), step))
    sys.argv = ["agentrl", *sys.argv[3:]]
    main()
