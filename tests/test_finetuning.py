"""Fine-tuning from the command line: learns, resumes bit for bit, scores equally on two processes, takes over settings."""

import json
import re
import shutil

import pytest

from lit_linformer.utils import amounts
from tests.helpers import assert_same_runs, fit, load, output, run_forked
from tests.sst2 import CONFIG, scores


def test_learns_a_task_and_leaves_what_scripts_and_people_read(learnt):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown, run = (learnt / "output.txt").read_text(), learnt / "runs/task"
    rows = scores(run / "scores.csv")
    assert [row["step"] for row in rows] == [str(15 * epoch) for epoch in range(1, 9)]
    result = json.loads((run / "result.json").read_text())
    assert result["metrics"]["val/accuracy"] == float(rows[-1]["val/accuracy"]) and result["step"] == 120
    best = max(rows, key=lambda row: float(row["val/score"]))
    assert result["best_metrics"]["val/score"] == float(best["val/score"]) > 0.8
    assert result["best_step"] == int(best["step"])
    (checkpoint,) = (run / "checkpoints").glob("best-*.ckpt")
    assert f"best-{int(best['step']):08d}" in checkpoint.name
    assert "step 15  validation score" in shown and "step 50/120" in shown
    assert '--data.text "…"\n' in shown
    events = EventAccumulator(str(run)).Reload()
    points = [(point.step, point.value) for point in events.Scalars("val/accuracy")]
    assert points == [(int(row["step"]), pytest.approx(float(row["val/accuracy"]))) for row in rows]
    assert "val/confusion_matrix" in events.Tags()["images"]
    (last, *_) = events.Tensors("val/confusion_matrix/text_summary")[::-1]
    counts = [int(n) for n in re.findall(r"\| +(\d+)(?= )", last.tensor_proto.string_val[0].decode())]
    assert sum(counts) == 37 and (counts[0] + counts[3]) / 37 == pytest.approx(result["metrics"]["val/accuracy"])


WINDOWS = "--model.layer_lr_decay 0.7 --data.max_length 10 --data.max_windows 3 --data.window_overlap 2".split()


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra",
    [
        ["--data.num_workers", "2", "--trainer.accumulate_grad_batches", "2", *WINDOWS],
        ["--trainer.strategy", "ddp_fork", "--trainer.devices", "2", "--data.batch_size", "4", "--model.trained_layers", "1"],
    ],
    ids=["workers, accumulate, layer decay, windows", "two processes, one layer frozen"],
)
def test_killed_run_resumes_bit_for_bit(extra, task, tmp_path):
    accumulate = 2 if "--trainer.accumulate_grad_batches" in extra else 1
    assert fit(task, "whole", tmp_path / "whole", *extra) == 0
    # After the checkpoint at step 5; then after that at the end of an epoch, in the middle of the next.
    assert fit(task, "killed", tmp_path / "killed", *extra, kill_at=9 * accumulate - accumulate // 2) == -9
    assert fit(task, "killed", tmp_path / "killed", *extra, "--ckpt_path", "last", kill_at=18 * accumulate) == -9
    assert fit(task, "killed", tmp_path / "killed", *extra, "--ckpt_path", "last") == 0
    assert_same_runs(tmp_path, "whole", "killed", processes=2 if "--trainer.devices" in extra else 1)
    assert scores(tmp_path / "runs/whole/scores.csv") == scores(tmp_path / "runs/killed/scores.csv")


@pytest.mark.slow
def test_another_layer_decay_wins_on_resume(task, tmp_path):
    """And so do the learning rate, weight decay and betas of all parameter groups."""
    words = ["fit", *task, "--trainer.max_steps", "4", "--model.schedule", "constant", "--model.warmup_fraction", "0"]
    output([*words, "--model.layer_lr_decay", "0.9"], tmp_path)
    changed = "--model.layer_lr_decay 0.5 --model.lr 0.001 --model.weight_decay 0.3 --trainer.max_steps 6".split()
    output([*words, *changed, "--ckpt_path", "last"], tmp_path)
    groups = load(tmp_path / "runs/task/checkpoints/last.ckpt")["optimizer_states"][0]["param_groups"]
    rates = {group["name"]: (group["lr"], group["weight_decay"]) for group in groups}
    assert rates["decay"] == (0.001, 0.3) and rates["decay × 0.5"] == (0.0005, 0.3)
    assert not any("0.9" in name for name in rates)


def test_frozen_layers_keep_their_weights(task, tmp_path):
    """With trained_layers, only the last layers and the head learn; resuming with another number of them is refused."""
    few = ["fit", *task, "--trainer.max_steps", "4"]
    output([*few, "--name", "whole"], tmp_path)
    start = load(tmp_path / "runs/whole/checkpoints/last.ckpt")["state_dict"]
    whole = json.loads((tmp_path / "runs/whole/result.json").read_text())["parameters"]
    for count, optimizer, frozen in ((0, "adamw", "net.encoder."), (1, "muon", r"net.encoder.(?!layers.1|final_norm)")):
        name, learning = f"last-{count}", ["--model.pretrained", "runs/whole", "--model.trained_layers", str(count)]
        shown = output([*few, "--name", name, *learning, "--model.optimizer", optimizer], tmp_path)
        found = load(tmp_path / f"runs/{name}/checkpoints/last.ckpt")["state_dict"]
        kept = {key for key, weights in found.items() if (weights == start[key]).all()}
        assert kept == {key for key in found if re.match(frozen, key)}
        learn = sum(found[key].numel() for key in found.keys() - kept)
        assert f"{amounts.count(whole)} parameters, of which {amounts.count(learn)} learn" in shown, shown
        assert json.loads((tmp_path / f"runs/{name}/result.json").read_text())["parameters"] == whole
    again = [*few, "--name", "whole", "--model.trained_layers", "0", "--ckpt_path", "last", "--trainer.max_steps", "6"]
    assert "model.trained_layers is 0; allowed to continue from this checkpoint: null" in output(again, tmp_path, 2)


@pytest.mark.slow
def test_a_schedule_that_is_over_on_other_data_says_so(task, tmp_path):
    output(["fit", *task, "--trainer.max_epochs", "1"], tmp_path)
    shown = output(["fit", *task, "--trainer.max_epochs", "2", "--data.limit_train", "40", "--ckpt_path", "last"], tmp_path)
    assert "trainer.max_epochs comes to 10 steps on these data, and 15 are done: the schedule is over, and the lea" in shown
    longer = ["fit", *task, "--trainer.max_epochs", "3", "--ckpt_path", "last", "--name", "task"]
    assert "the schedule is over" not in output(longer, tmp_path)
    constant = ["fit", *task, "--trainer.max_epochs", "4", "--data.limit_train", "40", "--model.schedule", "constant"]
    assert "the schedule is over" not in output([*constant, "--ckpt_path", "last"], tmp_path)


@pytest.mark.slow
def test_two_processes_train_and_score_like_one(task, tmp_path):
    still = ["--model.dropout", "0", "--model.attention_dropout", "0", "--trainer.max_epochs", "2"]
    still += ["--trainer.precision", "64-true"]  # in float32 AdamW's first steps amplify rounding errors of small gradients
    assert run_forked(["fit", *task, "--name", "one", *still]) == 0
    two = ["--trainer.strategy", "ddp_fork", "--trainer.devices", "2", "--data.batch_size", "4"]
    shown = output(["fit", *task, "--name", "two", *still, *two], tmp_path)
    assert shown.count("120 rows") == shown.count("37 rows") == 1
    one, two = (scores(tmp_path / f"runs/{name}/scores.csv") for name in ("one", "two"))
    for a, b in zip(one, two, strict=True):
        assert {key: float(value) for key, value in b.items()} == pytest.approx({k: float(v) for k, v in a.items()}, rel=1e-6)


def test_pretrained_run_is_carried_over_and_its_own_checkpoint_suffices_later(task, pretrained, tmp_path):
    shutil.copytree(pretrained, tmp_path / "runs/tiny")
    (tmp_path / "sst2.yaml").write_text(
        re.sub(r"    encoder:\n(      .*\n)+|    tokenizer: .*\n|    vocab_size: .*\n", "", CONFIG)
    )
    argv = ["--config", "sst2.yaml", *task[2:], "--trainer.max_epochs", "1"]
    output(["fit", *argv, "--model.pretrained", "runs/tiny"], tmp_path)
    (tmp_path / "runs/tiny").rename(tmp_path / "gone")
    run = tmp_path / "runs/task"
    assert (run / "tokenizer.json").read_text() == (tmp_path / "gone/tokenizer.json").read_text()
    config = (run / "config.yaml").read_text()
    assert "pretrained: runs/tiny" in config
    from_config = ["--config", "runs/task/config.yaml"]
    output(["validate", *from_config], tmp_path)
    validated = json.loads((run / "validate.json").read_text())["metrics"]["val/accuracy"]
    assert validated == pytest.approx(json.loads((run / "result.json").read_text())["best_metrics"]["val/accuracy"])
    shown = output(["fit", *from_config, "--ckpt_path", "last", "--trainer.max_epochs", "2"], tmp_path)
    assert "trainer.max_epochs: 1 → 2" in shown and "pretrained" not in shown.split("resuming")[1].split("step")[1]
    output(["predict", *from_config, "--data.source", "gone-too", "--data.text", "so very good"], tmp_path)


@pytest.mark.slow
def test_early_stopping_on_the_tasks_own_metric(task, tmp_path):
    stop = ["--trainer.callbacks+", "lightning.pytorch.callbacks.EarlyStopping", "--trainer.callbacks.monitor", "val/score"]
    stop += ["--trainer.callbacks.mode", "max", "--trainer.callbacks.patience", "1", "--trainer.callbacks.min_delta", "2"]
    output(["fit", *task, *stop], tmp_path)
    assert len(scores(tmp_path / "runs/task/scores.csv")) == 2


def test_a_run_may_end_before_its_first_validation(task, tmp_path):
    stop = ["--trainer.callbacks+", "lightning.pytorch.callbacks.EarlyStopping", "--trainer.callbacks.monitor", "val/score"]
    stop += ["--trainer.callbacks.check_on_train_epoch_end", "false", "--trainer.max_steps", "4"]
    output(["fit", *task, *stop, "--last.validation", "false"], tmp_path)
    result = json.loads((tmp_path / "runs/task/result.json").read_text())
    assert result["step"] == 4 and "best_metrics" not in result and not (tmp_path / "runs/task/scores.csv").exists()
    output(["fit", *task, *stop, "--name", "validated"], tmp_path)
    result = json.loads((tmp_path / "runs/validated/result.json").read_text())
    assert result["step"] == result["best_step"] == 4 and len(scores(tmp_path / "runs/validated/scores.csv")) == 1


def test_checkpoint_of_another_number_of_classes_or_tokenizer(task, learnt, pretrained, tmp_path):
    shutil.copytree(learnt / "runs", tmp_path / "runs")
    argv = ["validate", *task, "--data.task", "null", "--data.columns", "[sentence]", "--data.labels", '["0", "1", "2"]']
    shown = output([*argv, "--data.source", "glue/SST-2", "--ckpt_path", "last"], tmp_path, status=2)
    assert "error: data.labels is ['0', '1', '2']; allowed: ['negative', 'positive'], the classes of runs/task" in shown
    wider = ["--ckpt_path", "last", "--model.encoder.hidden_size", "32"]
    assert "error: model.encoder.hidden_size is 32, in the checkpoint" in output(["fit", *task, *wider], tmp_path, status=2)
    (tmp_path / "sst2.yaml").write_text(re.sub(r"    encoder:\n(      .*\n)+", "", CONFIG))
    argv = ["fit", "--config", "sst2.yaml", *task[2:], "--name", "other", "--model.pretrained", str(pretrained)]
    shown = output(argv, tmp_path, status=2)  # tokenizer: bpe, trained on the task's own text
    assert "error: data.tokenizer" in shown and "model.pretrained" in shown


def test_a_loss_that_is_nan_ends_the_run(task, tmp_path):
    words = ["--model.lr", "1e4", "--model.weight_decay", "100", "--model.warmup_fraction", "0"]
    line = output(["fit", *task, *words], tmp_path, status=2).splitlines()[-1]
    assert re.match(r"error: the loss is (nan|inf) at step |error: weights, or AdamW's averages", line)
    assert "a lower model.lr (now 10000.0)" in line
    assert not [*(tmp_path / "runs").rglob("*.ckpt")]
