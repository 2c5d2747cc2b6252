"""TensorBoard's curves, read back as TensorBoard reads them: every point once, however a process ended."""

import os
import signal

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_linformer.callbacks import LastCheckpoint
from lit_linformer.callbacks.checkpoint import BestCheckpoint
from lit_linformer.tasks import MLM
from lit_linformer.utils.files import read_rows
from tests.helpers import after, output, run_forked, slow
from tests.utils.test_signals import send


def curves(run):
    """{tag: [(step, value), …]} for the curves that two equal runs share."""
    found = {}
    for folder in (run, run / "by_tokens"):
        events = EventAccumulator(str(folder)).Reload()
        for tag in events.Tags()["scalars"]:
            if not tag.startswith(("throughput/", "watch/")) or tag == "watch/lr":
                found[tag] = [(point.step, point.value) for point in events.Scalars(tag)]
    return found


def kill(step):
    """A hook that kills the process at that step, after writing all points so far to the file."""

    def then(_, trainer, *arguments):
        if trainer.global_step == step:
            trainer.logger.experiment.flush()
            os.killpg(0, signal.SIGKILL)

    return then


@pytest.fixture
def whole(put):
    found = curves(put("whole"))
    assert [step for step, _ in found["train/loss"]] == [*range(1, 13)]
    assert [step for step, _ in found["val/perplexity"]] == [step for step, _ in found["val/perplexity_best"]] == [0, 7]
    assert [tokens for tokens, _ in found["val/perplexity_by_tokens"]] == [0, 7 * 4 * 32]
    return found


ENDINGS = {
    "after-a-checkpoint": (kill(5), LastCheckpoint, "_write", -9),
    "after-that-before-a-validation": (kill(7), LastCheckpoint, "_write", -9),
    "before-that-after-a-validation": (kill(7), BestCheckpoint, "on_validation_end", -9),
    "after-that-of-a-validation": (kill(7), LastCheckpoint, "on_validation_end", -9),
    "by-a-signal-before-a-validation": (
        send(signal.SIGTERM, lambda module, *_: module.batches_seen == 7), MLM, "on_train_batch_start", 143
    ),
    "by-a-signal": (send(signal.SIGTERM, lambda module, *_: module.batches_seen == 9), MLM, "on_train_batch_start", 143),
    "before-the-first": (
        send(signal.SIGKILL, lambda module, *_: module.batches_seen == 4), MLM, "on_train_batch_start", -9
    ),
}  # fmt: skip
FIRST = "by-a-signal"
SLOW = [slow(how) for how in ENDINGS if how != FIRST]


@pytest.mark.parametrize("how", [FIRST, *SLOW])
def test_no_ending_loses_a_point_or_has_one_twice(how, whole, tiny, tmp_path, monkeypatch):
    then, owner, name, status = ENDINGS[how]
    run = ["fit", *tiny, "--name", how, "--ckpt_path", "auto"]
    run += ["--last.every_n_steps", "7"] if "a-validation" in how else []
    with monkeypatch.context() as patched:
        after(patched, owner, name, then)
        assert run_forked(run, tmp_path / "log") == status
    assert run_forked(run, tmp_path / "log") == 0
    assert curves(tmp_path / "runs" / how) == whole


@pytest.mark.slow
def test_validations_within_an_accumulation_have_one_point_each_step(tiny, tmp_path, monkeypatch):
    within = ["--trainer.accumulate_grad_batches", "3", "--trainer.val_check_interval", "4", "--trainer.max_steps", "6"]
    output(["fit", *tiny, *within], tmp_path)
    found = curves(tmp_path / "runs/tiny")
    # Before training, and after batches 4, 8, 12 and 16; every third batch ends a step, and what is measured within a step is
    # plotted at that step.
    assert (
        [step for step, _ in found["val/perplexity"]] == [step for step, _ in found["val/perplexity_best"]] == [0, 2, 3, 4, 6]
    )
    killed = [*within, "--name", "killed", "--ckpt_path", "auto", "--last.every_n_steps", "1"]
    with monkeypatch.context() as patched:  # in step 3, whose validation is done
        after(patched, MLM, "on_train_batch_start", send(signal.SIGKILL, lambda module, *_: module.batches_seen == 9))
        assert run_forked(["fit", *tiny, *killed], tmp_path / "log") == -9
    assert run_forked(["fit", *tiny, *killed], tmp_path / "log") == 0
    assert curves(tmp_path / "runs/killed") == found
    output(["fit", *tiny, *within, "--name", "often", "--trainer.val_check_interval", "1"], tmp_path)
    found = curves(tmp_path / "runs/often")
    assert [step for step, _ in found["val/perplexity_best"]] == [step for step, _ in found["val/perplexity"]] == [*range(7)]
    rows = {row["step"]: row["perplexity"] for row in read_rows(tmp_path / "runs/often/perplexity.csv")}
    assert [value for _, value in found["val/perplexity"]] == pytest.approx([rows[step] for step in range(7)])


def test_the_page_opens_on_loss_and_perplexity(whole, tmp_path):
    """TensorBoard shows the first two groups of tags in alphabetical order, and folds the others."""
    events = EventAccumulator(str(tmp_path / "runs/whole")).Reload()
    tags = sorted(events.Tags()["scalars"])
    assert list(dict.fromkeys(tag.partition("/")[0] for tag in tags)) == ["train", "val", "watch"]
    assert tags[:3] == ["train/loss", "val/perplexity", "val/perplexity_best"]
    assert {"watch/epoch", "watch/lr", "watch/tokens_per_second", "watch/data_wait"} <= set(tags)
    rows = read_rows(tmp_path / "runs/whole/perplexity.csv")
    assert whole["val/perplexity"] == [(row["step"], pytest.approx(row["perplexity"])) for row in rows]
    assert [value for _, value in whole["val/perplexity_by_tokens"]] == [value for _, value in whole["val/perplexity"]]
