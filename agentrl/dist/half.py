"""Frozen weights in bfloat16: half the memory at rest, for passes that round them anyway."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def keep_in_half(model: nn.Module) -> None:
    """Round every weight to bfloat16, in place; buffers, such as rotary frequencies, stay."""
    for value in model.parameters():
        if value.is_floating_point():
            value.data = value.data.to(torch.bfloat16)
