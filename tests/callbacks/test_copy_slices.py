"""Slices by what can be copied: each fits its definition, they add up to the perplexity, and training is not affected."""

import csv
import math
import shutil
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_linformer.callbacks import CopySlices
from lit_linformer.callbacks.copy_slices import OTHER, SLICES, copy_slices
from lit_linformer.model import EncoderConfig
from lit_linformer.tasks import MLM
from lit_linformer.utils.files import read_rows
from tests.helpers import TINY, assert_same_runs, fit, inside, output, run_forked

SLICED = ["--trainer.callbacks+", "CopySlices", "--trainer.callbacks.near", "3", "--trainer.callbacks.frequent", "270"]
TWO = ["--trainer.strategy", "ddp_fork", "--trainer.devices", "2"]
MASK = 4


def read(path):
    with open(path, newline="") as file:
        rows = [{key: value if key == "slice" else float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    return {(row["step"], row["slice"]): row for row in rows}


def slice_of(row, place, label, near, frequent):
    """The definition, token by token."""
    again = [j for j, token in enumerate(row) if token == label and j != place]
    far = [j for j in again if abs(j - place) > near]
    if row[place] == label or (again and not far):
        return "other"

    def same(j, shift):
        inside = 0 <= j + shift < len(row) and 0 <= place + shift < len(row)
        return inside and row[j + shift] == row[place + shift] != MASK

    kind = "nowhere" if not far else "beside" if any(same(j, -1) or same(j, 1) for j in far) else "elsewhere"
    return f"{kind}_{'frequent' if label < frequent else 'rare'}"


@pytest.mark.parametrize("at_a_time", [2**22, 1, 60 * 50 * 5])
def test_slices_are_what_their_definition_says(at_a_time, monkeypatch):
    monkeypatch.setattr("lit_linformer.callbacks.copy_slices.AT_A_TIME", at_a_time)
    torch.manual_seed(0)
    ids = torch.randint(5, 40, (60, 50))
    positions = torch.stack([torch.randperm(50)[:12].sort().values for _ in range(60)])
    labels = ids.gather(1, positions)
    new = torch.where(torch.rand(labels.shape) < 0.8, MASK, torch.randint(5, 40, labels.shape))
    masked = ids.scatter(1, positions, torch.where(torch.rand(labels.shape) < 0.1, labels, new))
    labels[3, 2] = -100
    found = copy_slices(masked, positions, labels, MASK, near=4, frequent=20)
    assert found[3, 2] == -100
    names = {slice_of(masked[b].tolist(), positions[b, m], labels[b, m], 4, 20) for b in range(60) for m in range(12)}
    assert names == set(SLICES)
    for b in range(60):
        for m in range(12):
            if (b, m) != (3, 2):
                row = masked[b].tolist()
                expected = slice_of(row, positions[b, m].item(), labels[b, m].item(), 4, 20)
                assert SLICES[found[b, m]] == expected, (b, m)


def test_a_row_without_targets_and_edges():
    ids = torch.tensor([[1, 7, 8, 9, 7, MASK]])
    found = copy_slices(ids, torch.tensor([[0, 5]]), torch.tensor([[-100, 8]]), MASK, near=1, frequent=0)
    assert found.tolist() == [[-100, SLICES.index("beside_rare")]]
    ids = torch.tensor([[MASK, MASK, MASK, 5, MASK, 10, MASK]])  # beyond the ends there is no neighbour, nor is a mask one
    found = copy_slices(ids, torch.tensor([[0, 1]]), torch.tensor([[10, 10]]), MASK, near=1, frequent=50)
    assert found.tolist() == [[SLICES.index("elsewhere_frequent"), SLICES.index("elsewhere_frequent")]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, corpus, cache, finished):
    """Without slices and with fewer validations; with them; and with them but killed and resumed."""
    folder = tmp_path_factory.mktemp("slices")
    (folder / "tiny.yaml").write_text(TINY)
    tiny = ["--config", str(folder / "tiny.yaml"), "--data.source", str(corpus), "--data.cache_dir", str(cache)]
    tiny += ["--trainer.val_check_interval", "3"]
    with inside(folder):
        shutil.copyfile(finished / "tiny.0", "without.0")
        shutil.copytree(finished / "runs/tiny", "runs/without")
        assert fit(tiny, "with", folder / "with", *SLICED) == 0
        assert fit(tiny, "killed", folder / "killed", *SLICED, kill_at=8) == -9
        assert fit(tiny, "killed", folder / "killed", *SLICED, "--ckpt_path", "last") == 0
    return folder, tiny


def test_they_add_up_to_the_perplexity(runs):
    folder, _ = runs
    rows = read(folder / "runs/with/copy_slices.csv")
    curve = {row["step"]: row["perplexity"] for row in read_rows(folder / "runs/with/perplexity.csv")}
    assert sorted({step for step, _ in rows}) == [3, 6, 9, 12]
    for step in (3, 6, 9, 12):
        seen = [rows[step, name] for name in SLICES]
        assert sum(row["share"] for row in seen) == pytest.approx(1)
        mean = sum(row["share"] * row["nll"] for row in seen if row["share"])
        assert math.exp(mean) == pytest.approx(curve[step], rel=1e-6)
        assert all(row["perplexity"] == pytest.approx(math.exp(row["nll"])) for row in seen if row["share"])
    shares = [[rows[step, name]["share"] for name in SLICES] for step in (3, 6, 9, 12)]
    assert all(one == other for one, other in pairwise(shares)) and sum(share > 0 for share in shares[0]) >= 6
    points = EventAccumulator(str(folder / "runs/with")).Reload().Scalars("watch_copy/nll_beside_frequent")
    assert [point.step for point in points] == [3, 6, 9, 12]
    assert points[-1].value == pytest.approx(rows[12, "beside_frequent"]["nll"])


def test_training_does_not_notice_and_a_resumed_run_has_all_rows(runs):
    folder, _ = runs
    assert_same_runs(folder, "without", "with")
    whole, killed = (folder / f"runs/{name}/copy_slices.csv" for name in ("with", "killed"))
    assert whole.read_text() == killed.read_text()


def test_same_on_two_processes(runs, monkeypatch):
    folder, tiny = runs
    monkeypatch.chdir(folder)
    found = []
    for words in ([], TWO):
        assert run_forked(["validate", *tiny, "--name", "with", *SLICED, *words], folder / "out") == 0
        found.append(read(folder / "runs/with/validate_copy_slices.csv"))
    one, two = found
    assert one.keys() == two.keys() and len(one) == OTHER + 1
    for key, row in one.items():
        assert two[key]["share"] == row["share"]
        assert two[key]["nll"] == pytest.approx(row["nll"], rel=1e-6, nan_ok=True)


def test_bad_settings_and_other_data_are_refused(tiny, tmp_path):
    words = ["fit", *tiny, "--trainer.callbacks+", "CopySlices"]
    assert "CopySlices.near is -1; allowed: 0 or more" in output([*words, "--trainer.callbacks.near", "-1"], tmp_path, 2)
    other = SimpleNamespace(datamodule=SimpleNamespace())
    with pytest.raises(ValueError, match="holds CopySlices, but data is SimpleNamespace; allowed: masked language"):
        CopySlices().setup(other, MLM(EncoderConfig(vocab_size=9, hidden_size=12, num_layers=1)), "fit")
