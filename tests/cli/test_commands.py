"""The commands as a user runs them: fit, validate, test, predict, prepare, and their help."""

import json
import os
import re
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

from lit_linformer.utils.files import read_rows
from lit_linformer.utils.signals import START_METHOD
from tests.cli.test_errors import complaint
from tests.helpers import HANGS, in_one_process, load, output, slow

ROOT = Path(__file__).parents[2]


@pytest.fixture
def trained(put, tiny, finished):
    put("tiny")
    return (finished / "tiny.out").read_text()


def test_a_name_that_is_a_number_is_a_name(tiny, tmp_path):
    """Also in config.yaml, which the parser reads as YAML 1.2."""
    fit = ["fit", *tiny, "--trainer.max_steps", "1", "--trainer.num_sanity_val_steps", "0"]
    names = ["1e-3", "2024"]
    lines = [[*fit, "--name", name] for name in names]
    lines += [["validate", "--config", f"runs/{name}/config.yaml"] for name in names]
    for status, said in in_one_process(lines, tmp_path / "printed"):
        assert status == 0, said
    assert {path.parent.name for path in (tmp_path / "runs").glob("*/validate.json")} == {*names}


def test_fit_leaves_a_run_directory_and_says_what_is_next(trained, tmp_path):
    run = tmp_path / "runs/tiny"
    assert {"config.yaml", "perplexity.csv", "checkpoints", "by_tokens"} <= {path.name for path in run.iterdir()}
    assert load(run / "checkpoints/last.ckpt")["global_step"] == 12
    assert "before training" in trained and "validation perplexity\n  first " in trained
    assert "tensorboard --logdir runs" in trained and "predict --config runs/tiny/config.yaml" in trained
    assert not list(run.rglob("*.tmp"))


def test_curve_file_and_tensorboard_tell_the_same(trained, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows = read_rows(tmp_path / "runs/tiny/perplexity.csv")
    assert [(row["step"], row["tokens"]) for row in rows] == [(0, 0), (7, 7 * 4 * 32)]
    assert rows[1]["perplexity"] < rows[0]["perplexity"] < 400 and rows[1]["best"] == rows[1]["perplexity"]
    events, by_tokens = (EventAccumulator(str(tmp_path / "runs/tiny" / sub)).Reload() for sub in ("", "by_tokens"))
    against_steps = [(point.step, point.value) for point in events.Scalars("val/perplexity")]
    assert against_steps == [(row["step"], pytest.approx(row["perplexity"], rel=1e-6)) for row in rows]
    against_tokens = [(point.step, point.value) for point in by_tokens.Scalars("val/perplexity_by_tokens")]
    assert against_tokens == [(row["tokens"], pytest.approx(row["perplexity"], rel=1e-6)) for row in rows]
    assert {"train/loss", "watch/lr", "val/perplexity_best"} <= set(events.Tags()["scalars"])


def test_best_checkpoints_are_kept_by_perplexity(tiny, tmp_path):
    output(["fit", *tiny, "--trainer.val_check_interval", "3", "--best.keep", "2"], tmp_path)
    curve = {int(row["step"]): row["perplexity"] for row in read_rows(tmp_path / "runs/tiny/perplexity.csv")[1:]}  # trained
    kept = sorted(path.name for path in (tmp_path / "runs/tiny/checkpoints").glob("best-*.ckpt"))
    best = sorted(curve, key=curve.get)[:2]
    assert kept == sorted(f"best-{step:08d}-{curve[step]:.4f}.ckpt" for step in best)


def test_validate_and_test_take_the_best_checkpoint(trained, tiny, tmp_path):
    best = read_rows(tmp_path / "runs/tiny/perplexity.csv")[-1]["best"]
    shown = output(["validate", *tiny], tmp_path)
    (measured,) = re.findall(r"val/perplexity +│ +([0-9.]+)", shown)
    assert "best-00000007" in shown and float(measured) == pytest.approx(best, rel=1e-9)
    assert "test/perplexity" in output(["test", *tiny, "--ckpt_path", "last"], tmp_path)
    assert load(tmp_path / "runs/tiny/checkpoints/last.ckpt")["global_step"] == 12


def test_validate_is_asked_for_some_of_the_text(trained, tiny, tmp_path):
    line = complaint(["validate", *tiny, "--trainer.limit_val_batches", "0"], tmp_path)
    assert "trainer.limit_val_batches is 0; allowed with validate: null, or more than 0" in line


def test_predict_fills_every_mask(trained, tiny, tmp_path):
    (tmp_path / "texts.txt").write_text("one <mask> here\n\n<mask> and <mask>\n")
    shown = output(["predict", *tiny, "--data.file", "texts.txt"], tmp_path)
    records = [json.loads(line) for line in (tmp_path / "runs/tiny/predictions.jsonl").read_text().splitlines()]
    assert [(record["text"], record["mask"]) for record in records] == [
        ("one <mask> here", 1),
        ("<mask> and <mask>", 1),
        ("<mask> and <mask>", 2),
    ]
    for record in records:
        chances = [word["probability"] for word in record["top"]]
        assert len(chances) == 5 and chances == sorted(chances, reverse=True) and 0 < sum(chances) <= 1
    assert "3 masks → runs/tiny/predictions.jsonl" in shown


def test_predict_from_a_run_directory_alone(trained, tmp_path):
    """Needs neither the corpus nor the cache."""
    elsewhere = ["--data.source", "gone.txt", "--data.cache_dir", "empty"]
    argv = ["predict", "--config", "runs/tiny/config.yaml", *elsewhere, "--data.text", "one <mask> here"]
    assert "1 mask → runs/tiny/predictions.jsonl" in output(argv, tmp_path)
    assert not (tmp_path / "empty").exists()


def test_padding_of_a_batch_does_not_change_a_prediction(trained, tiny, tmp_path):
    path = tmp_path / "runs/tiny/predictions.jsonl"
    output(["predict", *tiny, "--data.text", "one <mask> here"], tmp_path)
    alone = json.loads(path.read_text().splitlines()[0])
    output(["predict", *tiny, "--data.text", '["one <mask> here", "a <mask> and more"]'], tmp_path)
    beside = json.loads(path.read_text().splitlines()[0])
    assert [word["id"] for word in alone["top"]] == [word["id"] for word in beside["top"]]
    assert [w["probability"] for w in alone["top"]] == pytest.approx([w["probability"] for w in beside["top"]], rel=1e-5)


def test_prepare_is_what_fit_then_finds(tiny, tmp_path):
    own = ["--data.cache_dir", str(tmp_path / "cache")]
    assert re.search(r"done: .*/cache now has tokenizer-\w+, tokens-\w+$", output(["prepare", *tiny, *own], tmp_path).strip())
    there = f"done: all of it was there already, in {tmp_path / 'cache'}"
    assert there in output(["prepare", *tiny, *own], tmp_path)
    assert not (tmp_path / "runs").exists()
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    assert any(path.name == "tokenizer.json" for path in made) and any(path.suffix == ".bin" for path in made)
    output(["fit", *tiny, *own], tmp_path)
    assert there in output(["prepare", "--config", "runs/tiny/config.yaml"], tmp_path)
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    assert {path: time for path, time in after.items() if path.suffix != ".lock"} == {
        path: time for path, time in made.items() if path.suffix != ".lock"
    }


def test_later_config_and_command_line_override(tiny, tmp_path):
    (tmp_path / "overlay.yaml").write_text(
        "model:\n  init_args:\n    encoder:\n      max_length: 16\n      projection_dim: 4\n"
    )
    argv = ["fit", *tiny, "--config", "overlay.yaml", "--model.lr", "0.5", "--name", "changed"]
    output([*argv, "--trainer.max_steps", "1"], tmp_path)
    import yaml

    config = yaml.safe_load((tmp_path / "runs/changed/config.yaml").read_text())
    assert config["model"]["init_args"]["lr"] == 0.5
    assert config["data"]["init_args"]["max_length"] == 16  # by interpolation


def test_config_of_a_run_starts_another_one(tiny, tmp_path):
    short = ["--trainer.max_steps", "2"]
    output(["fit", *tiny, *short, "--overwrite", "true"], tmp_path)
    output(["fit", *tiny, "--ckpt_path", "last", "--trainer.max_steps", "3"], tmp_path)
    shown = output(["fit", "--config", "runs/tiny/config.yaml", "--name", "other"], tmp_path)
    assert "before training" in shown and (tmp_path / "runs/other/checkpoints/last.ckpt").is_file()
    assert load(tmp_path / "runs/tiny/checkpoints/last.ckpt")["global_step"] == 3


@pytest.mark.slow
def test_training_imports_nothing_that_it_does_not_use(tiny, tmp_path):
    names = ["datasets", "pyarrow", "pandas"]
    if find_spec("transformers") is None:  # torchmetrics imports it if it is installed, and it the hub
        names.append("huggingface_hub")
    code = (
        "import sys; from lit_linformer.cli import main; from lit_linformer.data import FineTuningData; "
        f"main(sys.argv[1:]); print([m for m in {names} if m in sys.modules])"
    )
    argv = [sys.executable, "-c", code, "fit", *tiny, "--trainer.max_steps", "1"]
    shown = subprocess.run(argv, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert shown.stdout.splitlines()[-1] == "[]"


def test_live_bar_on_a_terminal(tiny, tmp_path):
    shown = output(["fit", *tiny, "--progress.live", "true", "--progress.every_n_steps", "2"], tmp_path)
    for words in ("12/12", "tokens/s", "samples/s", "perplexity"):
        assert words in shown


@pytest.mark.slow
def test_two_processes_launched_by_lightning(tiny, tmp_path):
    argv = [sys.executable, str(ROOT / "run.py"), "fit", *tiny, "--trainer.strategy", "ddp", "--trainer.devices", "2"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, timeout=HANGS, start_new_session=True)
    assert done.returncode == 0, done.stderr
    assert load(tmp_path / "runs/tiny/checkpoints/last.ckpt")["seen"]["tokens"] == 12 * 4 * 32 * 2


@pytest.mark.parametrize(
    "argv",
    [
        "list --source {runs}",
        "fit --help",
        "grid --config conf/paper/table2.yaml --print_commands true",
        "grid --config conf/mechanisms/quarter.yaml --only mechanism=lookup --print_commands true",
        slow("embed --ckpt_path models/small --text rain --output {runs}/rain.npy"),
    ],
    ids=("list", "help", "grid", "short", "embed"),
)
def test_what_is_printed_may_be_cut_short(argv, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    read, write = os.pipe()
    os.close(read)  # as head does once it has enough
    command = [sys.executable, "run.py", *argv.format(runs=tmp_path).split()]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=HANGS)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_closed_standard_streams_are_opened(tmp_path):
    """`fit >&-` failed in sys.stdout.isatty(), and with `2>&-` a warning could be written into the file that has number 2."""
    study = (
        "import sys\n\ndef main(argv):\n    print(open('file', 'w').fileno(), sys.stdout.isatty(), file=open('told', 'w'))\n"
    )
    (tmp_path / "study.py").write_text(study)
    command = [sys.executable, str(ROOT / "run.py"), "study"]
    subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], cwd=tmp_path, timeout=HANGS, check=True)
    number, terminal = (tmp_path / "told").read_text().split()
    assert int(number) > 2 and terminal == "False"


def test_processes_that_a_command_starts_are_forked_on_linux_whatever_pythons_default(tmp_path):
    """Python 3.14's default pickles what they are given, such as a data module whose `batch` a plain DataLoader calls."""
    (tmp_path / "study.py").write_text(
        "import multiprocessing\n\ndef main(argv):\n    print(multiprocessing.get_start_method(allow_none=True))\n"
    )
    command = [sys.executable, str(ROOT / "run.py"), "study"]
    assert subprocess.check_output(command, cwd=tmp_path, text=True, timeout=HANGS) == f"{START_METHOD}\n"


def test_a_deleted_current_folder_is_one_line(tmp_path):
    gone = 'mkdir gone && cd gone && rmdir ../gone && exec "$@"'
    command = ["sh", "-c", gone, "sh", sys.executable, str(ROOT / "run.py"), "list", "configs"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANGS)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "current folder has been deleted" in done.stderr


def test_console_command_works_in_any_directory(tmp_path):
    command = [str(Path(sysconfig.get_path("scripts"), "lit-linformer")), "fit", "--config", "nowhere.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=HANGS)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "nowhere.yaml" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("torch_version, frozen", [("2.14.1", True), ("2.15.0", False)])
def test_nothing_is_frozen_at_the_exit_where_triton_would_report_it(torch_version, frozen):
    script = (
        "import atexit, gc, sys\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 0))\n"  # the first is called last
        "from lit_linformer.cli import _app\n"
        "_app()\n"
        "import torch\n"
        f"torch.__version__ = torch.torch_version.TorchVersion('{torch_version}')\n"
        "sys.modules['triton'] = None\n"
    )
    command = [sys.executable, "-c", script]
    assert subprocess.check_output(command, cwd=ROOT, text=True, timeout=HANGS) == f"{frozen}\n"


@pytest.mark.slow
def test_a_whole_number_of_batches_is_one_whatever_another_package_has_written(tmp_path):
    """typing returns Optional[Union[int, float]] in the order in which a package first wrote it, maybe float before int."""
    script = (
        "from lightning.pytorch import Trainer\n"
        "for name in ('limit_train_batches', 'limit_val_batches'):\n"
        "    Trainer.__init__.__annotations__[name] = float | int | None\n"
        "from lit_linformer.cli import main\n"
        "limits = ['--trainer.limit_train_batches', '0.5', '--trainer.limit_val_batches', '1']\n"
        "main(['fit', '--config', 'conf/quickstart.yaml', *limits, '--print_config'])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=HANGS)
    assert "limit_train_batches: 0.5\n" in done.stdout and "limit_val_batches: 1\n" in done.stdout, done.stderr
