"""The command line, stopped at a moment of its own: python signal_at.py SIGNAL MOMENT STEP ..."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from agentrl.cli.main import main
from agentrl.train.trainer import Trainer

METHODS = {"collect": "collect", "update": "train_on"}


def stopping(method: Callable[..., Any], step: int, number: int) -> Callable[..., Any]:
    """Send this process a signal when ``method`` begins in ``step``."""

    def wrapped(trainer: Trainer, *arguments: Any) -> Any:
        if trainer.step + 1 == step:
            os.kill(os.getpid(), number)
        return method(trainer, *arguments)

    return wrapped


if __name__ == "__main__":
    number, moment, step = signal.Signals[sys.argv[1]], sys.argv[2], int(sys.argv[3])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    name = METHODS[moment]
    setattr(Trainer, name, stopping(getattr(Trainer, name), step, number))
    sys.argv = ["agentrl", *sys.argv[4:]]
    main()
