"""Tests that need a GPU; skipped without one. GPU_TESTS_ON=cpu runs them on a CPU as a rehearsal."""

import os

import pytest
import torch

ON = os.environ.get("GPU_TESTS_ON", "cuda")


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if ON == "cuda" and not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a GPU, and -m gpu alone"))


@pytest.fixture
def device():
    return torch.device(ON)
