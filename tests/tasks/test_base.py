"""What all tasks share."""

import traceback
from types import SimpleNamespace

import pytest
import torch

from lit_linformer.tasks.base import seed_torch


@pytest.fixture
def stacks(monkeypatch):
    """How often the stack is formatted."""
    found = []
    real = traceback.format_stack
    monkeypatch.setattr(traceback, "format_stack", lambda *args, **more: found.append(1) or real(*args, **more))
    return found


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_a_batch_is_seeded_as_torch_seeds_it(seed, stacks):
    torch.manual_seed(seed)
    expected, noted = torch.rand(4), len(stacks)
    seed_torch(seed)
    assert noted and len(stacks) == noted, "it noted the stack for a device that is not there"
    assert torch.equal(torch.rand(4), expected)


def test_devices_in_use_are_seeded_too(monkeypatch):
    seeded = []
    device = SimpleNamespace(is_initialized=lambda: True, manual_seed_all=seeded.append)
    monkeypatch.setattr(torch, "cuda", device)
    seed_torch(5)
    assert seeded == [5]
