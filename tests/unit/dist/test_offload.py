from __future__ import annotations

import torch

from agentrl.dist.offload import HostShelf

CPU = torch.device("cpu")


def test_content_comes_back_to_the_same_tensors_and_their_views() -> None:
    weight = torch.randn(7, 5)
    view, want = weight[2:4].T, weight.clone()
    shelf = HostShelf(CPU)
    for _ in range(2):  # buffers of the first time serve the second
        shelf.put([weight, view])
        assert weight.untyped_storage().nbytes() == 0 and not shelf.is_empty
        shelf.take_back()
        assert shelf.is_empty
        assert torch.equal(weight, want) and torch.equal(view, want[2:4].T)
        assert view.data_ptr() == weight[2:4].data_ptr()


def test_doing_it_twice_is_doing_it_once() -> None:
    weight = torch.randn(3, dtype=torch.float64)
    want = weight.clone()
    shelf = HostShelf(CPU)
    shelf.put([weight])
    shelf.put([weight])
    shelf.take_back()
    shelf.take_back()
    assert torch.equal(weight, want)


def test_what_changes_while_it_is_back_is_kept() -> None:
    weight = torch.zeros(4)
    shelf = HostShelf(CPU)
    shelf.put([weight])
    shelf.take_back()
    weight += 1
    shelf.put([weight])
    shelf.take_back()
    assert torch.equal(weight, torch.ones(4))
