"""One thread a process: tests run beside each other, and two ranks on two cores."""

import importlib
import os
import signal
import tempfile

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch

from tests.helpers import TINY, write_corpus

pytest_plugins = ["tests.trained_runs"]

torch.set_num_threads(1)
CHECKED = tempfile.TemporaryDirectory()
os.environ["LIT_LINFORMER_CACHE"] = CHECKED.name  # not the home of the one who tests
# Nor what another session has compiled, for other instructions perhaps: pytest's processes share a cache of their own.
if "PYTEST_XDIST_WORKER" not in os.environ:
    COMPILED = tempfile.TemporaryDirectory()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = COMPILED.name
    # Under nohup, or in a shell's background, the tests' processes would ignore these from their start.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
# What each forked process of a command would import again, a third of its time.
IMPORTED = "lit_linformer.cli.app omegaconf attrs fsspec.implementations.chained torch.utils.tensorboard torch.profiler"
for name in f"{IMPORTED} torch.distributed.fsdp torch.distributed.checkpoint.state_dict".split():
    importlib.import_module(name)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A text file of 120 small documents."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text.txt")


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """A data cache that the whole session shares: tokenizer and blocks are made once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def tiny(tmp_path, corpus, cache, monkeypatch):
    """Arguments of a command on a model that trains in a second, with tmp_path as the working directory."""
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "tiny.yaml"
    config.write_text(TINY)
    return ["--config", str(config), "--data.source", str(corpus), "--data.cache_dir", str(cache)]
