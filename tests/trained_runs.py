"""Small trained runs, through the real command, once a session."""

import os

import pytest
import torch

from tests.helpers import TINY, inside, run_forked
from tests.test_finetuning import CONFIG, write_sst2

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory, corpus, cache):
    """A run of two steps; its weights are made less tame, or differences would not show."""
    folder = tmp_path_factory.mktemp("pretrained")
    with inside(folder):
        (folder / "tiny.yaml").write_text(TINY)
        data = ["--data.source", str(corpus), "--data.cache_dir", str(cache)]
        assert (
            run_forked(["fit", "--config", "tiny.yaml", *data, "--trainer.max_steps", "8", "--trainer.val_check_interval", "4"])
            == 0
        )
    roughen(folder / "runs/tiny")
    return folder / "runs/tiny"


@pytest.fixture(scope="session")
def finetuned(tmp_path_factory, cache):
    """The same of a classifier of SST-2's labels."""
    folder = tmp_path_factory.mktemp("finetuned")
    with inside(folder):
        write_sst2(folder / "glue/SST-2")
        (folder / "task.yaml").write_text(CONFIG)
        words = ["--data.cache_dir", str(cache), "--data.source", str(folder / "glue"), "--trainer.max_epochs", "1"]
        assert run_forked(["fit", "--config", "task.yaml", *words]) == 0
    roughen(folder / "runs/task")
    return folder / "runs/task"


def roughen(run):
    draw = torch.Generator().manual_seed(0)
    for path in (run / "checkpoints").glob("*.ckpt"):
        checkpoint = torch.load(path, weights_only=True)
        for tensor in checkpoint["state_dict"].values():
            if tensor.is_floating_point():
                tensor += 0.2 * torch.randn(tensor.shape, generator=draw)
        torch.save(checkpoint, path)
