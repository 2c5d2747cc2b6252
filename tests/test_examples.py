"""examples/, each copied to a clean folder as a user's own file: trained, killed, resumed, validated; and a plain module."""

import json
import multiprocessing
import random
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from examples import database_texts, denoising, tagging
from lit_linformer.data.loader import EvaluationLoader
from lit_linformer.data.tokenizer import load_tokenizer
from lit_linformer.model import EncoderConfig
from lit_linformer.utils.files import read_rows
from tests.cli.test_errors import complaint
from tests.helpers import TINY, assert_same, fit, in_one_process, inside, load, run_forked
from tests.tasks.test_sharding import fit_sharded
from tests.test_distributed import EXACT, GLOBAL

EXAMPLES = Path(__file__).parents[1] / "examples"
PLAIN = """
import torch
from lightning.pytorch import LightningModule
from torch import nn


class Plain(LightningModule):
    def __init__(self, vocab_size: int = 300):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, 8)
        self.output = nn.Linear(8, vocab_size)

    def loss(self, batch):
        ids = batch["input_ids"]
        return nn.functional.cross_entropy(self.output(self.tokens(ids[:, :-1])).flatten(0, 1), ids[:, 1:].flatten())

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)
"""
BROKEN = "from lightning.pytorch import Callback\n\n\nclass Watch(Callback):\n    def report(self, folder=Path()): ...\n"


@pytest.fixture(scope="module")
def clean(tmp_path_factory, corpus, cache):
    """A folder with the examples, and the output of each line; two of the runs were killed in step 9, and resumed."""
    folder = tmp_path_factory.mktemp("clean")
    for example in EXAMPLES.glob("*.py"):
        shutil.copy(example, folder)
    (folder / "plain.py").write_text(PLAIN)
    (folder / "broken.py").write_text(BROKEN)
    (folder / "tiny.yaml").write_text(TINY)
    draw, words = random.Random(0), corpus.read_text().split()
    with closing(sqlite3.connect(folder / "reviews.db")) as database:
        database.execute("CREATE TABLE reviews (text TEXT, stars INTEGER)")
        rows = [(" ".join(draw.choices(words, k=20)), 3) for _ in range(150)]
        database.executemany("INSERT INTO reviews VALUES (?, ?)", rows)
        database.commit()
    (folder / "tagged").mkdir()
    for name, count in (("train", 60), ("validation", 11)):
        texts = [[word for word in draw.choices(words, k=12) if word.strip()] for _ in range(count)]
        rows = [{"words": row, "tags": ["long" if len(word) > 4 else "short" for word in row]} for row in texts]
        (folder / "tagged" / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = ["--data.source", str(corpus), "--data.cache_dir", str(cache)]
    common = ["fit", "--config", "tiny.yaml", "--progress.every_n_steps", "6"]
    denoising = [*common, "--model", "denoising.Denoising", *data]
    texts = [*common, "--data", "database_texts.DatabaseTexts", "--data.database", "reviews.db"]
    texts += ["--data.tokenizer", "runs/denoising/tokenizer.json", "--data.max_length", "32"]
    tagging = [*common, "--model", "tagging.Tagging", "--model.pretrained", "runs/denoising", "--model.encoder", "null"]
    tagging += ["--data", "tagging.TaggedWords", "--data.source", "tagged", "--data.tokenizer", "runs/denoising/tokenizer.json"]
    tagging += ["--data.max_length", "32"]
    watched = [*common, *data, "--name", "watched", "--trainer.callbacks+", "gradient_norm.GradientNorm"]
    watched += ["--trainer.callbacks.power", "1.0"]
    plain = [*common, "--model", "plain.Plain", *data, "--data.max_length", "32"]
    best = [*plain, "--name", "plain", "--best.monitor", "val/loss"]
    lines = {
        "denoising": [*denoising, "--name", "denoising"],
        "database": [*texts, "--name", "database"],
        "tagging": [*tagging, "--name", "tagging"],
        "watched": watched,
        "watched on": [*watched, "--ckpt_path", "last", "--trainer.max_steps", "16"],
        "plain refused": [*plain, "--name", "refused"],
        "plain": best,
        "plain on": [*best, "--ckpt_path", "last", "--trainer.max_steps", "16"],
    }
    lines["predict tagging"] = ["predict", "--config", "runs/tagging/config.yaml"]
    for name in ("denoising", "database", "plain"):
        lines[f"validate {name}"] = ["validate", "--config", f"runs/{name}/config.yaml"]
    with inside(folder):
        found = dict(zip(lines, in_one_process(list(lines.values()), folder / "printed"), strict=True))
        for name, argv in (("denoising", denoising), ("database", texts), ("tagging", tagging)):
            killed = [*argv, "--name", f"killed-{name}", "--ckpt_path", "auto"]
            kill = ["--trainer.callbacks+", "tests.helpers.KillAt", "--trainer.callbacks.hook", "on_train_batch_start"]
            assert run_forked([*killed, *kill, "--trainer.callbacks.step", "9"], folder / f"{name}.txt") == -9
            assert run_forked(killed, folder / f"{name}.txt") == 0, (folder / f"{name}.txt").read_text()
    return folder, found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["denoising", "database", "tagging"])
def test_goes_on_bit_for_bit(name, clean):
    folder, found = clean
    assert found[name][0] == 0, found[name][1]
    whole, killed = (load(folder / f"runs/{run}/checkpoints/last.ckpt") for run in (name, f"killed-{name}"))
    assert whole["global_step"] == killed["global_step"] == 12
    assert_same(whole["state_dict"], killed["state_dict"])
    assert_same(whole["optimizer_states"], killed["optimizer_states"])


@pytest.mark.slow
def test_an_objective_has_its_own_best_checkpoint_curve_and_closing_lines(clean):
    folder, found = clean
    said = found["denoising"][1]
    assert "validation loss 0." in said and "python run.py validate --config runs/denoising/config.yaml" in said
    assert "perplexity" not in said and "predict" not in said
    curve = read_rows(folder / "runs/denoising/curve.csv")
    assert [row["step"] for row in curve][:2] == [0, 7] and curve[-1]["val/loss"] < curve[0]["val/loss"]
    (best,) = (folder / "runs/denoising/checkpoints").glob("best-*.ckpt")
    assert f"checkpoint: runs/denoising/checkpoints/{best.name}" in found["validate denoising"][1]
    assert json.loads((folder / "runs/denoising/result.json").read_text())["best_metrics"]["val/loss"] == min(
        row["val/loss"] for row in curve[1:]
    )


@pytest.mark.slow
def test_a_database_as_data(clean):
    folder, found = clean
    said = found["database"][1]
    assert "validation perplexity\n  first " in said and "python run.py validate --config runs/database/config.yaml" in said
    assert "predict" not in said  # which needs more than ids, positions and labels
    assert found["validate database"][0] == 0 and "checkpoints/best-" in found["validate database"][1]
    assert len(read_rows(folder / "runs/database/perplexity.csv")) >= 2


@pytest.mark.slow
def test_each_word_gets_a_tag_from_an_encoder_that_was_trained(clean):
    folder, found = clean
    said = found["tagging"][1]
    assert "validation F1\n  first " in said and "python run.py predict --config runs/tagging/config.yaml\n" in f"{said}\n"
    assert "only its weights are taken over" not in said  # of the encoder, which is this project's, all is
    first, *_, last = [row["val/f1"] for row in read_rows(folder / "runs/tagging/curve.csv")]
    assert last > first
    (best,) = (folder / "runs/denoising/checkpoints").glob("best-*.ckpt")
    begun = tagging.Tagging(str(folder / "runs/denoising"), num_labels=2).net.encoder.state_dict()
    assert_same({f"net.encoder.{name}": weight for name, weight in begun.items()}, encoder_weights(load(best)))
    rows = [json.loads(line) for line in (folder / "tagged/validation.jsonl").read_text().splitlines()]
    answers = [json.loads(line) for line in (folder / "runs/tagging/predictions.jsonl").read_text().splitlines()]
    assert found["predict tagging"][0] == 0 and len(answers) == len(rows)
    for row, answer in zip(rows, answers, strict=True):
        assert 0 < len(answer["tags"]) <= len(row["words"]) and {*answer["tags"]} <= {"long", "short"}


def encoder_weights(checkpoint):
    return {name: weight for name, weight in checkpoint["state_dict"].items() if name.startswith("net.encoder.")}


def test_a_word_without_tokens_does_not_move_the_tags_of_those_after_it(tmp_path):
    tokenizer, path = load_tokenizer(str(EXAMPLES.parent / "models/small/tokenizer.json")), tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"words": ["", "Oslo", "fjord"], "tags": ["-", "place", "-"]}) + "\n")
    batch = tagging.TaggedRows(path, ["-", "place"], tokenizer, 16)[[(0, 0)]]
    begins = batch["labels"][0] != tagging.IGNORED
    assert batch["labels"][0, begins].tolist() == [0, 1, 0]
    assert batch["input_ids"][0, begins][1] == tokenizer.encode(" Oslo")[0]


@pytest.mark.slow
def test_the_norm_of_sharded_gradients_is_that_of_whole_ones(tiny, tmp_path):
    watched = ["--trainer.callbacks+", "examples.gradient_norm.GradientNorm"]
    exact = [*tiny, *EXACT[:4], *GLOBAL, "--trainer.max_steps", "3"]
    assert fit(exact, "one", tmp_path / "one", *watched) == 0
    fit_sharded(exact, "two", tmp_path / "two", *watched)
    shown = [(tmp_path / f"{name}.out").read_text() for name in ("one", "two")]
    one, two = (float(re.search(r"largest gradient norm: (\S+) at step", text)[1]) for text in shown)
    assert one == pytest.approx(two, rel=1e-2)


def test_on_two_ranks_each_row_of_an_example_counts_once(tmp_path):
    tokenizer = load_tokenizer(str(EXAMPLES.parent / "models/small/tokenizer.json"))
    path, row = tmp_path / "rows.jsonl", {"words": ["in", "Oslo", "today"], "tags": ["-", "place", "-"]}
    path.write_text(f"{json.dumps(row)}\n" * 11)
    ids = np.random.default_rng(0).integers(5, 8192, (11, 16))
    ids[3:5, 9:] = tokenizer.pad_id
    texts = database_texts.MaskedRows(ids, tokenizer, seed=1)
    for rows in (texts, tagging.TaggedRows(path, ["-", "place"], tokenizer, 16)):

        def counted(rank, ranks, rows=rows):
            return sum(int((batch["labels"] >= 0).sum()) for batch in EvaluationLoader(rows, 5, rank, ranks))

        assert counted(0, 1) == counted(0, 2) + counted(1, 2) > 20
    shape = EncoderConfig(max_length=16, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32, projection_dim=4)
    module = denoising.Denoising(shape, vocab_size=len(tokenizer)).eval()

    def losses(rank, ranks):
        loader = EvaluationLoader(texts, 5, rank, ranks)
        return torch.cat([module._losses(batch, torch.Generator().manual_seed(0)) for batch in loader]).tolist()

    both = losses(0, 2) + losses(1, 2)
    assert len(both) == 11 * 16 - 2 * 7 and sorted(both) == pytest.approx(sorted(losses(0, 1)), abs=1e-6)


@pytest.mark.slow
def test_a_callback_keeps_what_it_has_seen(clean):
    from tests.callbacks.test_curves import curves

    folder, found = clean
    before, after = (
        line for name in ("watched", "watched on") for line in found[name][1].splitlines() if line.startswith("largest")
    )
    assert before.startswith("largest gradient norm: ") and float(after.split()[3]) >= float(before.split()[3])
    assert [step for step, _ in curves(folder / "runs/watched")["train/gradient_norm"]] == [*range(1, 17)]


@pytest.mark.slow
def test_a_plain_module_needs_to_say_what_is_best_and_is_told_so_before_training(clean):
    folder, found = clean
    status, said = found["plain refused"]
    assert (
        status == 2
        and "best.monitor is 'val/perplexity', which Plain does not log in its validation; allowed: val/loss" in said
    )
    assert "--best.monitor" in said and not list((folder / "runs").glob("refused/checkpoints/*"))
    status, said = found["plain"]
    assert (
        status == 0
        and re.search(r"val/loss\n  first +5\.", said)
        and "python run.py validate --config runs/plain/config.yaml" in said
    )
    assert "resuming at step 12" in found["plain on"][1] and found["plain on"][0] == 0
    assert "checkpoints/best-" in found["validate plain"][1]
    assert torch.load(folder / "runs/plain/checkpoints/last.ckpt", weights_only=True)["global_step"] == 16


@pytest.mark.slow
def test_a_class_that_cannot_be_found_is_told_with_its_reason(clean, tmp_path, monkeypatch):
    monkeypatch.chdir(clean[0])
    fit = ["fit", "--config", "tiny.yaml"]
    line = complaint([*fit, "--trainer.callbacks+", "broken.Watch"], tmp_path)
    assert "trainer.callbacks is 'broken.Watch', but module broken cannot be imported: NameError: name 'Path' is not" in line
    line = complaint([*fit, "--trainer.callbacks+", "LenghtSweep"], tmp_path)
    assert "trainer.callbacks is 'LenghtSweep'; did you mean 'LengthSweep'?; allowed: the name of a Callback" in line
    line = complaint([*fit, "--model", "denoising.Denoise"], tmp_path)
    assert "model is 'denoising.Denoise', but module denoising has no Denoise; did you mean 'denoising.Denoising'?" in line
    line = complaint([*fit, "--data", "denoising.Denoising"], tmp_path)
    assert "data is 'denoising.Denoising', which is no subclass of LightningDataModule" in line


@pytest.mark.slow
def test_sliding_window_is_attention_to_those_near():
    """In its own process: in a CUDA build compiling initialises CUDA, and then no process may be forked that forks."""
    process = multiprocessing.get_context("fork").Process(target=compare_sliding_windows)
    process.start()
    process.join()
    assert process.exitcode == 0


def compare_sliding_windows():
    """FlexAttention's blocks against the mask used in training on a CPU, also at the edges; a full window is full attention."""
    from examples import sliding_window
    from lit_linformer.model import SelfAttention

    torch.manual_seed(0)
    attention, x = sliding_window.SlidingWindow(16, 2, 300), torch.randn(2, 300, 16)
    for window in (3, 300):
        sliding_window.WINDOW = window
        sliding_window.near.cache_clear()
        masked, _ = attention(x)
        with torch.no_grad():
            flex, _ = attention(x)
            moved, _ = attention(x.index_fill(1, torch.tensor([100]), 5.0))
        torch.testing.assert_close(flex, masked.detach(), rtol=1e-4, atol=1e-5)
        seen = (moved - flex).abs().amax((0, 2)).nonzero().flatten().tolist()
        assert seen == [place for place in range(300) if abs(place - 100) <= window]
    torch.testing.assert_close(masked, SelfAttention.forward(attention, x)[0], rtol=1e-4, atol=1e-5)
