"""Checkpoints by name: the newest intact one, the best of the history in the curve; checksums."""

import functools
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import yaml

from lit_linformer.data.tokenizer import load_tokenizer, train_tokenizer
from lit_linformer.runs.checkpoints import check_checkpoint, checkpoint_path, find_checkpoint, write_checkpoint
from lit_linformer.runs.record import RunRecord
from lit_linformer.runs.trained_model import find_model
from tests.callbacks.test_checkpoint import write
from tests.helpers import disk_calls, output

ROOT = Path(__file__).parents[2]
WEIGHTS = torch.arange(1000.0)


def write_whole(run, name, step=1):
    path = run / "checkpoints" / name
    write_checkpoint({"state_dict": {"w": WEIGHTS}, "global_step": step}, path)
    return path


def flip(path, at=None, bit=1):
    """Flips a bit of the weights, or one elsewhere."""
    content = bytearray(path.read_bytes())
    content[content.find(WEIGHTS[5:9].numpy().tobytes()) if at is None else at] ^= bit
    path.write_bytes(content)


def test_a_checkpoint_is_on_the_disk_before_it_takes_the_place_of_another(tmp_path, monkeypatch):
    calls = disk_calls(monkeypatch)
    write_whole(tmp_path, "last.ckpt")
    assert calls == ["sync last.ckpt.tmp", "rename last.ckpt"]


def test_torch_writes_checksums_and_does_not_look_at_them(tmp_path):
    """runs/checkpoints.py relies on this: with a torch that wrote none, or that checked by itself, it would be different."""
    path = write_whole(tmp_path, "last.ckpt")
    with zipfile.ZipFile(path) as content:
        assert all(part.CRC for part in content.infolist() if part.file_size) and content.testzip() is None
    flip(path)
    assert not torch.equal(torch.load(path, weights_only=True)["state_dict"]["w"], WEIGHTS)


def test_a_flipped_bit_falls_back_to_the_one_before(tmp_path, capsys):
    last, previous = write_whole(tmp_path, "last.ckpt", 2), write_whole(tmp_path, "previous.ckpt", 1)
    assert find_checkpoint(tmp_path, "last") == last
    flip(last)
    assert find_checkpoint(tmp_path, "last") == previous
    assert f"ckpt_path is {last}, which is no longer what was written: the checksum of" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"^model.pretrained is .*last.ckpt, which is no longer what was written: "):
        check_checkpoint(last, "model.pretrained")
    write_whole(tmp_path, "last.ckpt", 2)
    flip(previous)  # which is not needed
    assert find_checkpoint(tmp_path, "last") == last and not capsys.readouterr().err


def test_flipped_bits_everywhere_are_noticed_or_harmless(tmp_path):
    path = write_whole(tmp_path, "last.ckpt")
    content = path.read_bytes()
    for place in range(0, len(content), len(content) // 150):
        flip(path, place)
        try:
            checkpoint = check_checkpoint(path)
        except ValueError as error:
            assert "\n" not in str(error)
        else:  # in alignment padding, for example
            assert torch.equal(checkpoint["state_dict"]["w"], WEIGHTS) and checkpoint["global_step"] == 1
        path.write_bytes(content)


def test_a_flipped_bit_among_the_plain_values_is_damage_whatever_unpickling_makes_of_it(tmp_path):
    path = write_whole(tmp_path, "last.ckpt")
    content = path.read_bytes()
    start = content.index(b"\x80\x02")  # pickle's first bytes
    for place in range(start, content.index(b"global_step") + 16):
        flip(path, place)
        with pytest.raises(ValueError, match=r"no longer what was written: the checksum of archive/data.pkl does not fit"):
            check_checkpoint(path)
        path.write_bytes(content)


def test_a_flipped_bit_in_the_table_of_contents_says_compressed(tmp_path):
    path = write_whole(tmp_path, "last.ckpt")
    flip(path, path.read_bytes().index(b"PK\x01\x02") + 10, 8)
    with pytest.raises(ValueError, match="no longer what was written: it is damaged"):
        check_checkpoint(path)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ({"last": 2, "previous": 1}, "last"),
        ({"last": 2, "previous": 1, "new": 3}, "new"),  # killed before it became last.ckpt
        ({"previous": 1, "new": 3}, "new"),  # killed between the two renames
        ({"last": 2, "new": 2}, "new"),
        ({"last": 2, "previous": 3}, "last"),  # after going back to an earlier step, as with --ckpt_path best
        ({"last": 3, "new": 2}, "new"),
        ({"new": 3}, "new"),
        ({"previous": 1}, "previous"),
        ({}, None),
    ],
)
def test_last_is_the_newest(steps, expected, tmp_path):
    for name, step in steps.items():
        write_whole(tmp_path, f"{name}.ckpt", step)
    (tmp_path / "checkpoints").mkdir(exist_ok=True)
    (tmp_path / "checkpoints/last.ckpt.tmp").write_bytes(b"half")
    assert find_checkpoint(tmp_path, "last") == (expected and tmp_path / f"checkpoints/{expected}.ckpt")


def test_half_a_sharded_new_one_is_left_out(tmp_path, capsys):
    new = tmp_path / "checkpoints/new.ckpt"
    new.mkdir(parents=True)
    (new / "__0_0.distcp").write_bytes(b"half")
    assert find_checkpoint(tmp_path, "last") is None
    last = write_whole(tmp_path, "last.ckpt")
    assert find_checkpoint(tmp_path, "last") == last
    assert "new.ckpt, which is no longer what was written: " in capsys.readouterr().err


def test_best_is_what_the_curve_tells(tmp_path):
    """Killed after a best at step 14, then resumed from 12 with another learning rate, which made step 14 worse."""
    best = functools.partial(write, tmp_path / "checkpoints")
    seven, stale = best("best-00000007-20.0000.ckpt"), best("best-00000014-9.0000.ckpt")
    assert find_checkpoint(tmp_path, "best") == stale  # no curve: the file names decide
    curve = "step,tokens,seconds,perplexity,best\n7,1,1,20.00001,20.0\n14,2,2,{},20.0\n"
    (tmp_path / "perplexity.csv").write_text(curve.format(33.3))
    assert find_checkpoint(tmp_path, "best") == seven
    (tmp_path / "perplexity.csv").write_text(curve.format(8.99996))
    assert find_checkpoint(tmp_path, "best") == stale
    record = RunRecord(tmp_path)
    assert (record.last("step"), record.best()) == (14, (8.99996, 14))
    (tmp_path / "result.json").write_text('{"step": 20, "best_step": 7, "best_metrics": {"val/perplexity": 8.5}}')
    record = RunRecord(tmp_path)
    assert (record.last("step"), record.last("tokens"), record.best()) == (20, 2, (8.5, 7))


def test_best_of_scores(tmp_path):
    best = functools.partial(write, tmp_path / "checkpoints")
    first, stale = best("best-00000007-0.5000.ckpt"), best("best-00000014-0.9000-v1.ckpt")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"best": {"monitor": "val/score", "mode": "max"}}))
    assert find_checkpoint(tmp_path, "best") == stale
    (tmp_path / "scores.csv").write_text("step,epoch,val/score\n7,0,0.5\n14,1,0.3\n")
    assert find_checkpoint(tmp_path, "best") == first


def test_best_of_values_that_are_all_0_in_four_decimals(tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"best": {"monitor": "val/mse", "mode": "min"}}))
    (tmp_path / "curve.csv").write_text("step,seconds,val/mse,best\n100,1,4.1e-05,0\n200,1,1.2e-05,0\n300,1,2.6e-05,0\n")
    files = {step: write(tmp_path / "checkpoints", f"best-{step:08d}-0.0000.ckpt") for step in (100, 200, 300)}
    assert find_checkpoint(tmp_path, "best") == files[200] and RunRecord(tmp_path).best() == (1.2e-05, 200)


@pytest.mark.parametrize("text", ["", "[]", "best: 3", "best: {monitor: [", "\x00", "a: &a [*a]", "{" * 3000])
def test_settings_of_best_in_a_bad_config(text, tmp_path):
    (tmp_path / "config.yaml").write_text(text)
    assert RunRecord(tmp_path).setting("best.monitor", "val/perplexity") == "val/perplexity"
    only = write(tmp_path / "checkpoints", "best-00000007-20.0000.ckpt")
    assert find_checkpoint(tmp_path, "best") == only


@pytest.mark.slow
def test_the_tokenizer_that_a_checkpoint_carries(tmp_path):
    tokenizer, path = train_tokenizer("bpe", ["a text"], 300), tmp_path / "last.ckpt"
    state = {"state_dict": {"w": WEIGHTS}, "global_step": 1}
    torch.save(state | {"tokenizer": tokenizer.to_str()}, path)
    assert load_tokenizer(str(path)).sha256 == tokenizer.sha256
    alone = f"from lit_linformer.data.tokenizer import load_tokenizer; print(load_tokenizer({str(path)!r}).sha256)"
    told = subprocess.run([sys.executable, "-c", alone], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert told.strip() == tokenizer.sha256  # in plain Python, where nothing else has been imported
    for wrong in (state, state | {"tokenizer": 3}):
        torch.save(wrong, path)
        with pytest.raises(ValueError, match=r"^data.tokenizer is .*last.ckpt, which carries no tokenizer; allowed: a check"):
            load_tokenizer(str(path))
    for content in (path.read_bytes()[:1000], b"", b"plain text"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"^data.tokenizer is .*last.ckpt, which is truncated or no checkpoint.*$"):
            load_tokenizer(str(path))


@pytest.mark.parametrize("step", [None, "seven", 1.5])
def test_a_step_that_is_none(step, tmp_path):
    torch.save({"state_dict": {}, "global_step": step}, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="which holds no training state"):
        check_checkpoint(tmp_path / "x.ckpt")


@pytest.mark.parametrize(
    ("command", "asked", "names", "told"),
    [
        ("fit", "last", [], "checkpoints holds none; allowed: a --name that has run, or auto, which then starts anew"),
        ("fit", "last", ["last"], "checkpoints/last.ckpt cannot be read; allowed: --ckpt_path best, if that is whole, or to "),
        ("fit", "last", ["last", "previous"], "checkpoints/last.ckpt cannot be read, nor can previous.ckpt; allowed: "),
        ("fit", "last", ["best-00000007-1.0000"], "checkpoints holds none but best-00000007-1.0000.ckpt; allowed: a --name"),
        ("fit", "best", ["last"], "checkpoints holds none but last.ckpt; allowed: a --name that has run, or auto"),
        ("fit", "best", ["best-00000007-1.0000"], "checkpoints/best-00000007-1.0000.ckpt, which is truncated or no checkpoint"),
        ("fit", ".", ["last"], "checkpoints/last.ckpt cannot be read; allowed: a checkpoint file, the folder of a run"),
        ("test", None, ["last"], "ckpt_path is not given and {}/checkpoints/last.ckpt cannot be read; allowed: a file"),
        ("test", "last", ["last"], "checkpoints/last.ckpt cannot be read; allowed: a --name that has run"),
    ],
)
def test_checkpoints_that_cannot_be_read_are_named(command, asked, names, told, tmp_path, capsys):
    for name in names:
        write_whole(tmp_path, f"{name}.ckpt").write_bytes(b"half")
    with pytest.raises(ValueError) as refused:
        checkpoint_path(command, str(tmp_path) if asked == "." else asked, tmp_path)
    assert told.format(tmp_path) in str(refused.value)
    assert "falling back" not in capsys.readouterr().err


def test_a_model_that_cannot_be_read_is_named(tmp_path):
    write_whole(tmp_path, "last.ckpt").write_bytes(b"half")
    with pytest.raises(ValueError, match=r"^model.pretrained is .*, but .*/checkpoints/last.ckpt cannot be read; allowed: a "):
        find_model(tmp_path, "model.pretrained")


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("models/small", r"^ckpt_path is .*small, an exported model; allowed: .*; or --model.pretrained .*models/small$"),
        ("conf", r"^ckpt_path is .*conf, a folder without a checkpoint; allowed: a checkpoint file, the folder of a run, last"),
        ("runs/none", r"^ckpt_path is .*none, which is not there; allowed: a checkpoint file, the folder of a run, last"),
    ],
)
@pytest.mark.parametrize("command", ["fit", "predict"])
def test_what_is_no_checkpoint_is_told(command, asked, told, tmp_path):
    with pytest.raises(ValueError, match=told):
        checkpoint_path(command, str(ROOT / asked), tmp_path)


@pytest.mark.slow
def test_a_run_that_goes_on_may_keep_fewer_of_the_best(tiny, tmp_path):
    words = ["fit", *tiny, "--trainer.val_check_interval", "2"]
    output([*words, "--best.keep", "3", "--trainer.max_steps", "6"], tmp_path)
    folder = tmp_path / "runs/tiny/checkpoints"
    assert len(list(folder.glob("best-*"))) == 3
    output([*words, "--best.keep", "1", "--ckpt_path", "last"], tmp_path)
    curve = RunRecord(tmp_path / "runs/tiny").curve
    best = min(curve, key=lambda row: row["perplexity"])
    assert [path.name[:13] for path in folder.glob("best-*")] == [f"best-{best['step']:08.0f}"]
