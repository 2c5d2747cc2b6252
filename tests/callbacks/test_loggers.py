"""Several loggers at once, in the run folder: all of them get the same points, however a process ended."""

import csv
import importlib.util
import json
import shutil
import signal
import socket
import struct
from collections import Counter
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger

from lit_linformer.callbacks.loggers import Table, WeightsAndBiases
from lit_linformer.tasks import MLM
from lit_linformer.utils.files import read_rows
from tests.callbacks.test_curves import curves
from tests.cli.test_errors import complaint
from tests.helpers import TINY, after, inside, output, run_forked
from tests.utils.test_signals import send

OVERLAYS = Path(__file__).parents[2] / "conf/logger"
ALWAYS = {"run.json", "config.yaml", "tokenizer.json", "perplexity.csv", "result.json", "hparams.yaml", "checkpoints"}


class Lines(Logger):
    """A user's own logger, which writes a file."""

    name, version = "lines", "0"

    def __init__(self, save_dir: str, prefix: str = "") -> None:
        super().__init__()
        self.path, self.prefix = Path(save_dir) / "lines.jsonl", prefix

    def log_hyperparams(self, params, *args, **kwargs) -> None: ...

    def log_metrics(self, metrics, step=None) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps({self.prefix + name: [step, value] for name, value in metrics.items()}) + "\n")

    def log_image(self, key, images, step=None) -> None:
        images[0].savefig(self.path.with_name(f"{key.replace('/', '-')}-{step}.png"))


def installed():
    """The overlay with all loggers except those whose package is not installed, and the names of those kept."""
    config = yaml.safe_load((OVERLAYS / "all.yaml").read_text())
    loggers = config["trainer"]["logger"]
    for kind, package in (("WandbLogger", "wandb"), ("MLFlowLogger", "mlflow"), ("MLFlowLogger", "alembic")):
        if importlib.util.find_spec(package) is None:
            loggers[:] = [logger for logger in loggers if not logger["class_path"].endswith(kind)]
    return config, {logger["class_path"].rpartition(".")[2] for logger in loggers}


@pytest.fixture(scope="module")
def run(tmp_path_factory, corpus, cache):
    """A run with all loggers, killed after step 8 and resumed from step 5: (folder, loggers, output)."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("loggers")
    config, kinds = installed()
    (folder / "all.yaml").write_text(yaml.safe_dump(config))
    (folder / "tiny.yaml").write_text(TINY)
    argv = ["fit", "--config", "tiny.yaml", "--config", "all.yaml", "--ckpt_path", "auto"]
    argv += ["--data.source", str(corpus), "--data.cache_dir", str(cache)]
    argv += ["--trainer.callbacks+", "LengthSweep", "--trainer.callbacks.lengths", "[16,32]"]
    with inside(folder), pytest.MonkeyPatch.context() as patched:
        lookup = socket.getaddrinfo

        def noted(host, *args, **kwargs):
            with open("hosts.txt", "a") as file:
                file.write(f"{host}\n")
            return lookup(host, *args, **kwargs)

        patched.setattr(socket, "getaddrinfo", noted)
        with pytest.MonkeyPatch.context() as kills:
            after(kills, MLM, "on_train_batch_start", send(signal.SIGKILL, lambda module, *_: module.batches_seen == 9))
            assert run_forked(argv, folder / "first.txt") == -9, (folder / "first.txt").read_text()
        said = output(argv, folder)
    return folder, kinds, said


def points(rows):
    """{tag: [(step, value), …]} without timings."""
    found = {}
    for tag, step, value in rows:
        if not tag.startswith(("throughput/", "sweep/tokens_per_second", "sweep/peak", "epoch")):
            found.setdefault(tag, []).append((step, pytest.approx(value)))
    return found


@pytest.mark.slow
def test_the_folder_is_the_runs_whatever_the_logger(run):
    folder, kinds, said = run
    assert {path.name for path in folder.iterdir()} <= {"all.yaml", "tiny.yaml", "first.txt", "output.txt", "hosts.txt", "runs"}
    there = {path.name for path in (folder / "runs/tiny").iterdir() if not path.name.startswith("events.")}
    others = {"length_sweep.csv", "length_sweep.png", "by_tokens", "metrics.csv"}
    others |= {"wandb", "loggers.json"} if "WandbLogger" in kinds else set()
    others |= {"mlflow.db", "mlartifacts", "loggers.json"} if "MLFlowLogger" in kinds else set()
    assert there == ALWAYS | others
    names = {path.name.partition("-")[0] for path in (folder / "runs/tiny/checkpoints").iterdir()}
    assert names == {"last.ckpt", "previous.ckpt", "best"}
    assert "next        tensorboard --logdir runs\n" in said and "predict --config runs/tiny/config.yaml" in said
    assert ("wandb sync runs/tiny/wandb/offline-run-*" in said) is ("WandbLogger" in kinds)
    assert ("mlflow server --backend-store-uri sqlite:///runs/tiny/mlflow.db" in said) is ("MLFlowLogger" in kinds)
    hosts = set((folder / "hosts.txt").read_text().split()) if (folder / "hosts.txt").exists() else set()
    assert hosts <= {"localhost", "127.0.0.1", "::1"}  # offline is offline


@pytest.mark.slow
def test_csv_has_tensorboards_points_each_once(run):
    with open(run[0] / "runs/tiny/metrics.csv", newline="") as file:
        rows = [(tag, int(row["step"]), float(row[tag])) for row in csv.DictReader(file) for tag in row if row[tag]]
    found, board = points(rows), curves(run[0] / "runs/tiny")
    assert [step for step, _ in found["train/loss"]] == [*range(1, 13)]
    here = {"train/lr": "watch/lr", "sweep/perplexity_16": "watch_sweep/perplexity_16"}  # TensorBoard's names of these
    for tag in ("train/loss", "train/lr", "val/perplexity", "val/perplexity_best", "sweep/perplexity_16"):
        assert found[tag] == board[here.get(tag, tag)], tag
    curve = read_rows(run[0] / "runs/tiny/perplexity.csv")
    assert [value for _, value in found["tokens"]] == [row["tokens"] for row in curve]
    assert [value for _, value in found["val/perplexity_by_tokens"]] == [row["perplexity"] for row in curve]


@pytest.mark.slow
def test_mlflow_goes_on_with_its_run(run):
    folder, kinds, _ = run
    if "MLFlowLogger" not in kinds:
        pytest.skip("mlflow is not installed")
    from mlflow.tracking import MlflowClient

    with inside(folder):
        client = MlflowClient("sqlite:///runs/tiny/mlflow.db")
        (experiment,) = [found for found in client.search_experiments() if found.name == "lit-linformer"]
        (found,) = client.search_runs([experiment.experiment_id])
        assert (found.info.run_name, found.info.status) == ("tiny", "FINISHED")
        assert found.data.params["encoder/projection_dim"] == "8"
        board = curves(folder / "runs/tiny")
        for tag in ("train/loss", "val/perplexity", "val/perplexity_by_tokens"):
            history = {(metric.step, metric.value) for metric in client.get_metric_history(found.info.run_id, tag)}
            assert sorted(history) == [(step, pytest.approx(value)) for step, value in board[tag]], tag
        (figure,) = client.list_artifacts(found.info.run_id, "sweep/by_length")
        assert figure.path.endswith("step-00000007.png") and figure.file_size > 5000


def wandb_records(path):
    """LevelDB's log: a header of 7 bytes, then 32 KB blocks of pieces: checksum (4 bytes), length (2), kind (1), data."""
    content, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        length, kind = struct.unpack_from("<HB", content, at + 4)
        if kind:  # 0: the rest of the block is empty
            record += content[at + 7 : at + 7 + length]
            if kind in (1, 4):  # a whole record, or its last piece
                yield record
                record = b""
        at += 7 + length
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768


@pytest.mark.slow
def test_wandb_goes_on_with_its_run_offline(run):
    folder, kinds, _ = run
    if "WandbLogger" not in kinds:
        pytest.skip("wandb is not installed")
    from wandb.proto.wandb_internal_pb2 import Record

    (identity,) = json.loads((folder / "runs/tiny/loggers.json").read_text())["WandbLogger"]
    starts = sorted((folder / "runs/tiny/wandb").glob("offline-run-*"))
    assert len(starts) == 2 and all(start.name.endswith(f"-{identity}") for start in starts)
    rows, seen = [], Counter()
    for start in starts:
        for data in wandb_records(start / f"run-{identity}.wandb"):
            record = Record()
            record.ParseFromString(data)
            seen[record.WhichOneof("record_type")] += 1
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            at = "tokens" if "tokens" in items else "trainer/global_step"
            rows += [(tag, items.get(at), value) for tag, value in items.items()]
    board = curves(folder / "runs/tiny")
    # When it was killed, W&B had written only part of the first start's points.
    for tag, from_here in (("train/loss", 6), ("val/perplexity", 5), ("val/perplexity_by_tokens", 5 * 128)):
        found, right = {step: value for name, step, value in rows if name == tag}, dict(board[tag])
        assert found == {step: pytest.approx(right[step]) for step in found}, tag
        assert {step for step in right if step >= from_here} <= found.keys(), tag
    assert seen["exit"] == 1
    assert any(start.glob("files/media/images/sweep/by_length*.png") for start in starts)


@pytest.mark.slow
def test_what_loggers_wrote_is_overwritten_and_the_best_checkpoint_is_found(run, corpus, cache, tmp_path):
    with inside(run[0]):
        argv = ["--config", "runs/tiny/config.yaml", "--data.source", str(corpus), "--data.cache_dir", str(cache)]
        assert "checkpoint: runs/tiny/checkpoints/best-00000007-" in output(["validate", *argv], tmp_path)
        shutil.copytree("runs/tiny", "runs/again", symlinks=True)
        again = ["fit", *argv, "--name", "again", "--trainer.max_steps", "2"]
        assert "already holds a run" in complaint(again, tmp_path)
        table = ["--trainer.logger", "lightning.pytorch.loggers.CSVLogger"]
        output([*again, "--overwrite", "true", *table], tmp_path)
        left = {path.name for path in Path("runs/again").rglob("*") if path.is_file() and path.parent.name != "checkpoints"}
        assert left <= (ALWAYS | {"metrics.csv", "length_sweep.csv", "length_sweep.png"})
        assert "val/perplexity_by_tokens" in Path("runs/again/metrics.csv").read_text()


def test_one_more_logger_stands_beside_the_default_one(tiny, tmp_path):
    there = {}
    for name, given in {"more": "--trainer.logger+", "other": "--trainer.logger"}.items():
        output(["fit", *tiny, "--trainer.max_steps", "2", "--name", name, given, "CSVLogger"], tmp_path)
        there[name] = {path.name.partition(".")[0] for path in (tmp_path / "runs" / name).iterdir()}
    assert there["more"] - there["other"] == {"events", "by_tokens"} and "metrics" in there["more"] & there["other"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["false"], set()),
        (["tests.callbacks.test_loggers.Lines", "--trainer.logger.prefix", "my "], {"lines.jsonl", "sweep-by_length-2.png"}),
    ],
    ids=["none", "one's own"],
)
def test_no_logger_and_ones_own(given, expected, tiny, tmp_path):
    argv = ["--trainer.max_steps", "2", "--trainer.val_check_interval", "2", "--trainer.logger", *given]
    argv += ["--trainer.callbacks+", "LengthSweep", "--trainer.callbacks.lengths", "[16]"]
    said = output(["fit", *tiny, *argv], tmp_path)
    there = {path.name for path in (tmp_path / "runs/tiny").iterdir()}
    assert there - {"length_sweep.csv", "length_sweep.png"} == ALWAYS - {"hparams.yaml"} | expected
    assert said.endswith(
        "next        python run.py predict --config runs/tiny/config.yaml \\\n"
        '                --data.text "The <mask> of a function."\n'
    )
    if expected:
        lines = [json.loads(line) for line in (tmp_path / "runs/tiny/lines.jsonl").read_text().splitlines()]
        counts = Counter((name, step) for line in lines for name, (step, _) in line.items())
        of_steps = [("my train/loss", 1), ("my train/loss", 2), ("my val/perplexity", 0), ("my val/perplexity", 2)]
        assert [counts[point] for point in of_steps] == [1] * 4


def test_a_logger_that_cannot_be_is_refused_at_once(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(WeightsAndBiases, "packages", ("wandb_which_is_absent",))
    argv = ["fit", *tiny, "--name", "none", "--trainer.logger", "WandbLogger"]
    line = complaint(argv, tmp_path)
    assert "trainer.logger is WandbLogger, for which the package wandb_which_is_absent is not installed; allowed: after" in line
    assert not (tmp_path / "runs").exists()


def test_a_logger_that_cannot_begin_is_one_line(tiny, tmp_path, monkeypatch):
    pytest.importorskip("wandb")

    def nobody(logger):
        raise RuntimeError("No API key configured.")

    monkeypatch.setattr(WandbLogger, "experiment", property(nobody))  # also asked for when the run closes its loggers
    line = complaint(["fit", *tiny, "--trainer.logger", "WandbLogger"], tmp_path)
    assert line == "error: trainer.logger could not begin: No API key configured."


@pytest.mark.parametrize("rest", ["0", "0,2", "0,2,0.2"])
def test_a_row_of_a_csv_that_was_cut_off_is_dropped(rest, tmp_path):
    (tmp_path / Table.BEFORE).write_text(f"epoch,step,train/loss\n0,1,0.5\n{rest}")
    Table(CSVLogger(tmp_path, name="", version="")).drop(2)
    assert read_rows(tmp_path / Table.NAME) == [{"epoch": 0, "step": 1, "train/loss": 0.5}]
