"""One thread per process, since tests run in parallel, and two ranks on two cores."""

import gc
import importlib
import os
import signal
import tempfile
import warnings
from contextlib import redirect_stdout, suppress
from io import StringIO
from multiprocessing import forkserver

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest

# Variables from a Slurm job, torchrun or terminal around pytest must not reach the processes that tests start.
STRANGE = ("SLURM_", "TORCHELASTIC_", "MASTER_", "PL_GLOBAL_SEED", "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")
STRANGE += ("WORLD_SIZE", "COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
for name in [name for name in os.environ if name.startswith(STRANGE)]:
    del os.environ[name]
CHECKED = tempfile.TemporaryDirectory()
os.environ["LIT_LINFORMER_CACHE"] = CHECKED.name  # not the user's home
# Code compiled by another session may use other CPU instructions: pytest's processes share a cache of their own.
if "PYTEST_XDIST_WORKER" not in os.environ:
    COMPILED = tempfile.TemporaryDirectory()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = COMPILED.name
    # With nohup, or in a shell's background, the tests' processes would inherit these signals as ignored.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Imported once here; each forked command would spend a third of its time on it.
IMPORTED = "lit_linformer.cli.app omegaconf attrs fsspec.implementations.chained torch.utils.tensorboard torch.profiler"
IMPORTED += " torch.distributed.fsdp torch.distributed.checkpoint.state_dict"


def pytest_configure(config):
    """With pytest-xdist the controller imports nothing, since the workers wait for it."""
    if config.getoption("markexpr", None) != "gpu":  # other tests fork after importing torch, which CUDA forbids
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if "PYTEST_XDIST_WORKER" in os.environ or not config.getoption("numprocesses", None):
        make_ready()
        config.pluginmanager.import_plugin("tests.trained_runs")


def make_ready():
    """Does once what each forked command would repeat, which is half of its time."""
    for name in IMPORTED.split():
        with suppress(ModuleNotFoundError):  # missing in other versions of a dependency
            importlib.import_module(name)
    import torch

    from lit_linformer import cli
    from lit_linformer.cli.app import LinformerCLI
    from lit_linformer.cli.quick_checks import known_settings

    torch.set_num_threads(1)
    # Autograd looks for devices at the first backward pass. With a CUDA build and no GPU it finds none here; once dynamo is
    # imported it finds some and starts threads for them, after which no forked process can run a backward pass.
    torch.zeros((), requires_grad=True).backward()
    known_settings({})  # what this and LinformerCLI read of classes stays in memory
    with warnings.catch_warnings(), redirect_stdout(StringIO()), suppress(Exception, SystemExit):
        warnings.simplefilter("ignore")
        LinformerCLI(["fit", "--print_config"])
    gc.collect()
    cli._app()  # freezes all of it
    os.register_at_fork(after_in_child=forked)


def forked():
    """Runs in each forked process."""
    gc.freeze()  # a collection would write to all objects inherited from the parent, and so copy their memory
    forkserver._forkserver.__init__()  # it would wait for the parent's server, which is not its child: "No child processes"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A text file of 120 small documents."""
    from tests.helpers import write_corpus

    return write_corpus(tmp_path_factory.mktemp("corpus") / "text.txt")


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """A data cache shared by the whole session: tokenizer and blocks are made once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def tiny(tmp_path, corpus, cache, monkeypatch):
    """Command-line arguments for a model that trains in a second, with tmp_path as the working directory."""
    from tests.helpers import TINY

    monkeypatch.chdir(tmp_path)
    config = tmp_path / "tiny.yaml"
    config.write_text(TINY)
    return ["--config", str(config), "--data.source", str(corpus), "--data.cache_dir", str(cache)]
