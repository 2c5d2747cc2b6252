"""Small trained runs, made by the real command, once per session."""

import shutil

import pytest
import torch

from lit_linformer.tasks import MLM
from tests.helpers import TINY, BatchLog, after, inside, output, run_forked
from tests.sst2 import CONFIG, write_sst2


@pytest.fixture(scope="session")
def finished(tmp_path_factory, corpus, cache):
    """A folder with an uninterrupted run of 12 steps, runs/tiny; tiny.0 has its batches, tiny.out its output."""
    folder = tmp_path_factory.mktemp("finished")
    log = BatchLog(str(folder / "tiny"))  # not as a callback, which would be in the run's config
    with inside(folder), pytest.MonkeyPatch.context() as patched:
        (folder / "tiny.yaml").write_text(TINY)
        after(patched, MLM, "on_train_batch_end", lambda module, *of: log.on_train_batch_end(module.trainer, module, *of))
        data = ["--data.source", str(corpus), "--data.cache_dir", str(cache)]
        assert run_forked(["fit", "--config", "tiny.yaml", *data], folder / "tiny.out") == 0
    return folder


@pytest.fixture
def put(finished, tmp_path):
    """put("whole") copies that run to runs/whole in the working directory, and its batches to whole.0."""

    def put(name):
        shutil.copyfile(finished / "tiny.0", tmp_path / f"{name}.0")
        return shutil.copytree(finished / "runs/tiny", tmp_path / "runs" / name)

    return put


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory, corpus, cache):
    """A pretraining run of 8 steps; noise is added to its weights, so that differences show."""
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


def finetune(folder, cache, epochs):
    with inside(folder):
        write_sst2(folder / "glue/SST-2")
        (folder / "task.yaml").write_text(CONFIG)
        words = ["--data.cache_dir", str(cache), "--data.source", str(folder / "glue"), "--trainer.max_epochs", str(epochs)]
        output(["fit", "--config", "task.yaml", *words], folder)
    return folder / "runs/task"


@pytest.fixture(scope="session")
def finetuned(tmp_path_factory, cache):
    """The same for a classifier with SST-2's labels."""
    run = finetune(tmp_path_factory.mktemp("finetuned"), cache, 1)
    roughen(run)
    return run


@pytest.fixture(scope="session")
def learnt(tmp_path_factory, cache):
    """A folder in which a classifier has learnt its task: glue/, runs/task, and output.txt with the command's output."""
    folder = tmp_path_factory.mktemp("learnt")
    finetune(folder, cache, 8)
    return folder


@pytest.fixture
def task(tmp_path, cache, monkeypatch):
    """Command-line arguments to fine-tune a tiny encoder from scratch on files in GLUE's layout."""
    monkeypatch.chdir(tmp_path)
    write_sst2(tmp_path / "glue/SST-2")
    (tmp_path / "task.yaml").write_text(CONFIG)
    return ["--config", "task.yaml", "--data.cache_dir", str(cache)]


def roughen(run):
    draw = torch.Generator().manual_seed(0)
    for path in (run / "checkpoints").glob("*.ckpt"):
        checkpoint = torch.load(path, weights_only=True)
        for tensor in checkpoint["state_dict"].values():
            if tensor.is_floating_point():
                tensor += 0.2 * torch.randn(tensor.shape, generator=draw)
        torch.save(checkpoint, path)
