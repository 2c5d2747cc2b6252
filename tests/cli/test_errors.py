"""Bad input: one line that names the setting, its value and what is allowed; exit status 2; nothing half-written.

Cases that need only a command line or a file are in tests/bad_input.yaml; here are those that need more.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning

from lit_linformer.cli.checks import check_callbacks
from lit_linformer.model import EncoderConfig
from lit_linformer.runs.checkpoints import find_checkpoint
from lit_linformer.tasks import MLM
from tests.helpers import TINY, in_one_process, load, run_forked, small_disk

ROOT = Path(__file__).parents[2]


def complaint(argv, tmp_path, status=2):
    """What a failing command prints: exactly one line beginning with `error: `, and no traceback."""
    log = tmp_path / "complaint.txt"
    log.unlink(missing_ok=True)
    assert run_forked(argv, log) == status
    lines = log.read_text().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1 and lines[-1] == errors[0] and "Traceback" not in log.read_text(), lines
    assert "Union" not in errors[0] and len(errors[0]) < 500, errors[0]
    return errors[0]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("lr: 1.0e-2", "lrate: 1.0e-2", "tiny.yaml; did you mean 'model.lr'?"),
        ("max_steps: 12", "max_stps: 12", "tiny.yaml; did you mean 'trainer.max_steps'?"),
        ("${seed_everything}", "${seed}", "${seed} in the config names no setting"),
        ("  max_steps: 12", " max_steps: 12", "tiny.yaml is no valid YAML at line"),
        ("tasks.MLM", "tasks.MLN", "MLN"),
        ("lr: 1.0e-2", "lr: [1, 2]", "model.lr is"),
    ],
)
def test_bad_config_file(old, new, expected, tiny, tmp_path):
    assert old in TINY
    (tmp_path / "tiny.yaml").write_text(TINY.replace(old, new))
    assert expected in complaint(["fit", *tiny], tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("empty.txt", b"", "empty.txt"),
        ("latin1.txt", "na\xefve words\n".encode("latin-1") * 50, "latin1.txt"),
        ("broken.jsonl", b'{"text": "a b c"}\n{"text": \n', "broken.jsonl"),
        ("other.jsonl", b'{"body": "a b c"}\n' * 50, "text"),
    ],
)
def test_bad_corpus_leaves_nothing_half_written(name, content, expected, tiny, tmp_path):
    (tmp_path / name).write_bytes(content)
    cache = tmp_path / "cache"
    line = complaint(["prepare", *tiny, "--data.source", str(tmp_path / name), "--data.cache_dir", str(cache)], tmp_path)
    assert expected in line
    assert not list(cache.glob("tokens-*/*")) and not list(cache.glob("*tmp*"))


def test_corpus_too_small_for_one_row(tiny, tmp_path):
    (tmp_path / "short.txt").write_text("only a few words")
    whole = ["--data.validation_fraction", "0", "--data.test_fraction", "0"]
    line = complaint(["fit", *tiny, *whole, "--data.source", str(tmp_path / "short.txt")], tmp_path)
    assert "data.max_length" in line and "32" in line


def test_tokenizer_without_a_mask_token(tiny, tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "<pad>": 2}, unk_token="<pad>")).save(str(tmp_path / "tokenizer.json"))
    line = complaint(["fit", *tiny, "--data.tokenizer", str(tmp_path / "tokenizer.json")], tmp_path)
    assert "mask token" in line and "data.tokenizer" in line


def test_checkpoint_of_another_shape(put, tiny, tmp_path):
    put("tiny")
    wider = ["--model.encoder.hidden_size", "32", "--name", "wider"]
    line = complaint(["fit", *tiny, *wider, "--ckpt_path", "runs/tiny/checkpoints/last.ckpt"], tmp_path)
    assert "does not fit this model" in line and "16] there" in line and "32]" in line


@pytest.mark.parametrize("damage", ["truncated", "text", "empty", "weights"])
def test_file_that_is_no_checkpoint(damage, tiny, tmp_path):
    path = tmp_path / "damaged.ckpt"
    torch.save({"weight": torch.zeros(1000)}, path)
    whole = path.read_bytes()
    path.write_bytes({"truncated": whole[:500], "text": b"hello", "empty": b"", "weights": whole}[damage])
    assert "damaged.ckpt, which" in complaint(["fit", *tiny, "--ckpt_path", str(path)], tmp_path)


def test_second_run_of_the_same_name_is_refused_unless_told(put, tiny, tmp_path):
    short = ["fit", *tiny, "--trainer.max_steps", "2"]
    put("tiny")
    before = (tmp_path / "runs/tiny/checkpoints/last.ckpt").read_bytes()
    assert "runs/tiny already holds a run; allowed: another --name" in complaint(short, tmp_path)
    assert (tmp_path / "runs/tiny/checkpoints/last.ckpt").read_bytes() == before
    assert run_forked([*short, "--overwrite", "true"]) == 0
    assert load(tmp_path / "runs/tiny/checkpoints/last.ckpt")["global_step"] == 2


def test_too_long_a_name_is_the_users_mistake(tmp_path):
    assert complaint(["fit", "--config", "a" * 300], tmp_path).startswith("error: File name too long: aaa")


def test_a_runs_folder_as_config_names_the_file_in_it(tiny, tmp_path):
    (tmp_path / "runs/a").mkdir(parents=True)
    (tmp_path / "runs/a/config.yaml").write_text("name: a\n")
    line = complaint(["fit", "--config", "runs/a"], tmp_path)
    assert line == "error: config is 'runs/a', which is no file; allowed: runs/a/config.yaml"


def test_predict_needs_a_mask_and_a_text(put, tiny, tmp_path):
    put("tiny")
    assert "<mask>" in complaint(["predict", *tiny, "--data.text", "no gap"], tmp_path)
    assert "data.text" in complaint(["predict", *tiny], tmp_path)


def test_a_callback_that_prunes_what_is_read_without_a_forward():
    model = MLM(EncoderConfig(vocab_size=9, max_length=8, hidden_size=8, num_layers=1, num_heads=2, projection_dim=4))
    with pytest.raises(ValueError, match=r"trainer.callbacks is 'ModelPruning', which prunes .* allowed: torch.nn.utils.prune"):
        check_callbacks([ModelPruning("l1_unstructured")], model, resumes=False)


def test_full_disk_while_a_checkpoint_is_written(tiny, tmp_path):
    with small_disk(tmp_path / "runs", "1200k") as runs:
        assert run_forked(["fit", *tiny, "--trainer.max_steps", "5"], tmp_path / "out.txt") == 0
        room = os.statvfs(runs)
        (runs / "filler").write_bytes(bytes(room.f_bavail * room.f_bsize - 40_000))
        line = complaint(["fit", *tiny, "--ckpt_path", "last"], tmp_path, os.EX_IOERR)
        assert re.search("cannot write the checkpoint .*: .*No space left on device; those before it are intact", line)
        checkpoints = runs / "tiny" / "checkpoints"
        assert not list(checkpoints.glob("*.tmp"))
        assert load(find_checkpoint(runs / "tiny", "last"))["global_step"] == 5
        (runs / "filler").unlink()
        assert run_forked(["fit", *tiny, "--ckpt_path", "last"], tmp_path / "out.txt") == 0


def test_traceback_only_when_asked_for(tiny, tmp_path):
    command = ["fit", *tiny, "--model.encoder.norm", "both"]
    (tmp_path / "my_own.py").write_text(
        "from lightning.pytorch import Callback\n\n\nclass Failing(Callback):\n    def __init__(self):\n        None + 1\n"
    )
    lines = [command, [*command, "--traceback"], ["fit", *tiny, "--trainer.callbacks+", "my_own.Failing"]]
    (status, plain), (raised, asked), (failed, bug) = in_one_process(lines, tmp_path / "printed")
    assert status == 2 and plain.splitlines() == ["error: model.encoder.norm is 'both'; allowed: post, pre"]
    assert raised == 1 and "Traceback" in asked
    assert failed == 1 and "Traceback" in bug and "TypeError: unsupported operand" in bug  # in the user's class or in ours


def test_a_full_disk_in_a_thread_is_one_line_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_thread.py").write_text(
        "import threading\n\n\ndef write():\n    raise OSError(28, 'No space left on device')\n\n\n"
        "def main(argv):\n    thread = threading.Thread(target=write)\n    thread.start()\n    thread.join()\n"
    )
    (_, plain), (_, asked) = in_one_process([["my_thread"], ["my_thread", "--traceback"]], tmp_path / "printed")
    assert plain == "warning: a thread has ended: [Errno 28] No space left on device\n"
    assert "Traceback" in asked


def test_a_python_without_the_packages_is_one_line():
    # Without site-packages and PYTHONPATH, where some clusters keep torch.
    command = [sys.executable, "-S", "-E", str(ROOT / "run.py"), "fit", "--config", "conf/quickstart.yaml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert f"error: {sys.executable} lacks the package " in done.stderr


def test_windows_is_refused_in_one_line_but_loads_models(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "win32")
    assert "that Windows lacks; allowed: Linux, in WSL too" in complaint(["fit", "--config", "conf/quickstart.yaml"], tmp_path)
    lacks = "import os, sys, torch; sys.modules |= dict.fromkeys(('fcntl', 'resource')); del os.register_at_fork, os.fork; "
    code = lacks + "from lit_linformer.export import load; load('models/small')"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
