"""A LightningModule and a LightningDataModule that know nothing of this project: tests/own_code.py."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_linformer.utils.files import read_rows
from tests import own_code
from tests.helpers import fit, load, output, read_log, run_forked, slow
from tests.tasks.test_sharding import SHARDED

CONFIG = """
seed_everything: 0
name: own
trainer: {accelerator: cpu, devices: 1, max_epochs: 2, log_every_n_steps: 1}
model:
  class_path: tests.own_code.Plain
  init_args:
    encoder: {vocab_size: 20, max_length: 8, hidden_size: 8, num_layers: 1, num_heads: 2, projection_dim: 4}
data: {class_path: tests.own_code.Rows}
"""
BEST = ["--best.monitor", "val_loss"]
TWO = ["--trainer.devices", "2", "--trainer.strategy", "ddp_fork"]


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text(CONFIG)
    return ["--config", "own.yaml"]


def refused(argv, tmp_path):
    """The line with which a command ends."""
    line = output(argv, tmp_path, status=2).splitlines()[-1]
    assert line.startswith("error: ")
    return line


def test_what_save_hyperparameters_keeps_is_loaded_again_but_cannot_predict(own, tmp_path):
    output(["fit", *own, *BEST], tmp_path)
    assert load(tmp_path / "runs/own/checkpoints/last.ckpt")["hyper_parameters"]["encoder"].vocab_size == 20
    assert "val_loss" in output(["validate", "--config", "runs/own/config.yaml"], tmp_path)
    assert "checkpoints/best-" in output(["validate", *own, *BEST, "--ckpt_path", "runs/own"], tmp_path)  # its best
    assert "resuming" in output(["fit", *own, *BEST, "--ckpt_path", "last", "--trainer.max_epochs", "3"], tmp_path)
    line = refused(["predict", "--config", "runs/own/config.yaml"], tmp_path)
    assert line == "error: model is Plain; allowed with predict: a class with predict_step"


@pytest.mark.slow
def test_scores_under_ones_own_names_are_results(own, tmp_path):
    """Named val_loss and test_loss, as in most code, they appear in result.json, test.json, report and grid."""
    grid = {
        "name": "rates",
        "arguments": shlex.join([*own, *BEST]),
        "axes": {"rate": {"high": "--model.rate 1e-2"}, "seed": {"0": "--seed_everything 0"}},
        "table": {"rows": "rate", "columns": "seed", "value": "test_loss", "decimals": "4"},
    }
    Path("grid.yaml").write_text(yaml.safe_dump(grid))
    table = output(["grid", "--config", "grid.yaml"], tmp_path)
    run = Path("runs/rates/high-0")
    assert {"val_loss"} == set(json.loads((run / "result.json").read_text())["best_metrics"])
    tested = json.loads((run / "test.json").read_text())["metrics"]["test_loss"]
    assert f"{tested:.4f}" in table
    output(["validate", "--config", str(run / "config.yaml")], tmp_path)
    assert json.loads((run / "validate.json").read_text())["metrics"]["val_loss"] > 0
    output(["report", "--source", str(run), "--output", "page"], tmp_path)
    assert f"test_loss {tested:.4f}" in Path("page/report.md").read_text()


def test_numpy_in_a_checkpoint_and_settings_of_ones_own(own, tmp_path):
    own = ["--config", "own.yaml", "--model", "tests.own_code.NumPyRates", *BEST]
    output(["fit", *own], tmp_path)
    assert "resuming at step 16" in output(["fit", *own, "--ckpt_path", "last", "--trainer.max_epochs", "3"], tmp_path)
    assert "val_loss" in output(["validate", "--config", "runs/own/config.yaml"], tmp_path)


def test_what_shares_its_name_with_a_metric_of_this_project_is_left_alone(own, tmp_path):
    output(["fit", *own, *BEST, "--model", "tests.own_code.Listed", "--trainer.callbacks+", "PerplexityCurve"], tmp_path)
    assert [row["step"] for row in read_rows(Path("runs/own/curve.csv"))] == [0, 8, 16]


def test_a_language_model_may_be_judged_otherwise(tiny, tmp_path):
    tiny = [*tiny, "--model", "tests.own_code.JudgedOtherwise", "--trainer.max_steps", "7"]
    output(["fit", *tiny], tmp_path)
    assert [row["val/half"] for row in read_rows(Path("runs/tiny/curve.csv"))] == [0.5, 0.5]
    assert not Path("runs/tiny/perplexity.csv").exists()
    line = refused(["fit", *tiny, "--name", "sliced", "--trainer.callbacks+", "CopySlices"], tmp_path)
    assert "holds CopySlices, but validation_step of JudgedOtherwise returns no nll; allowed: one that" in line


def test_tokens_may_be_counted_in_a_buffer(own, tmp_path):
    counts = ["--model", "tests.own_code.Counts", "--trainer.callbacks+", "PerplexityCurve"]
    shown = output(["fit", *own, *BEST, *counts, "--trainer.max_epochs", "1"], tmp_path)
    assert ", 96 tokens\n" in shown
    output(["fit", *own, *BEST, *counts, "--ckpt_path", "last"], tmp_path)
    assert [row["tokens"] for row in read_rows(Path("runs/own/curve.csv"))] == [0, 96, 192]
    assert json.loads(Path("runs/own/result.json").read_text())["tokens"] == 192


def test_a_class_without_settings_refuses_one_by_its_name(own, tmp_path):
    line = refused(["fit", *own, *BEST, "--data", "tests.own_code.Bare", "--data.source", "x"], tmp_path)
    assert line == "error: unknown setting 'data.source'"


def test_an_encoder_without_its_type_is_refused_by_its_name(tiny, tmp_path):
    line = refused(["fit", *tiny, "--model", "tests.own_code.Untyped"], tmp_path)
    allowed = "encoder: EncoderConfig | None = None, as in MLM"
    assert line == f"error: model.encoder has no type in tests.own_code.Untyped; allowed: {allowed}"


def test_what_would_not_be_loaded_is_refused_when_it_is_saved(own, tmp_path):
    line = refused(["fit", *own, *BEST, "--trainer.callbacks+", "tests.own_code.Keeps"], tmp_path)
    assert "checkpoints/new.ckpt holds fractions.Fraction, which is not loaded again" in line


def test_each_batch_draws_anew_without_a_count(own, tmp_path):
    output(["fit", *own, "--model", "tests.own_code.Draws"], tmp_path)
    draws = Path("draws").read_text().split()
    assert len(draws) == len(set(draws)) == 16


def test_a_net_without_an_encoder_is_sharded_as_a_whole(own):
    sharded = [*SHARDED, "--trainer.devices", "1", "--trainer.max_steps", "2"]
    assert run_forked(["fit", *own, *sharded, "--model", "tests.own_code.Draws"]) == 0


@pytest.mark.parametrize("ends", ["--trainer.max_steps 8", slow("--trainer.max_steps 16"), slow("--trainer.max_epochs 1")])
def test_a_plain_loader_goes_on_at_a_pass_s_end(ends, own, tmp_path):
    """With the rows of an uninterrupted run, 8 batches an epoch."""
    longer = ["--trainer.max_epochs", "4"]
    output(["fit", *own, *BEST, *longer, "--name", "whole", "--model.folder", "whole"], tmp_path)
    output(["fit", *own, *BEST, *longer, *ends.split()], tmp_path)
    output(["fit", *own, *BEST, *longer, "--ckpt_path", "last"], tmp_path)
    assert Path("seen/train.0").read_text() == Path("whole/train.0").read_text()


def test_a_loader_keeps_its_place_when_steps_are_asked_for_first(own, tmp_path):
    own = [*own, *BEST, "--model", "tests.own_code.Estimates", "--data", "tests.own_code.StatefulRows"]
    output(["fit", *own, "--trainer.max_steps", "3"], tmp_path)
    output(["fit", *own, "--trainer.max_steps", "8", "--ckpt_path", "last"], tmp_path)
    assert rows_seen("train", 0) == list(range(16))


def test_a_net_may_have_an_encoder_of_another_kind(own, tmp_path):
    shown = output(["fit", *own, "--model", "tests.own_code.Autoencoder", *BEST], tmp_path)
    assert "model       Autoencoder\nsize        32 parameters\n" in shown
    assert json.loads(Path("runs/own/result.json").read_text())["parameters"] == 32


@pytest.mark.slow
def test_data_that_do_not_tell_how_many_tokens_there_are(tiny, pretrained, tmp_path):
    ids = ["--data", "tests.own_code.Ids", "--trainer.max_steps", "1", "--name"]
    tiny = tiny[:2]
    shown = output(["fit", *tiny, *ids, "default"], tmp_path)
    assert "note: Ids has no num_tokens: the model's vocabulary is the default of model.encoder.vocab_size, 50,265\n" in shown
    shown = output(["fit", *tiny, *ids, "given", "--model.encoder.vocab_size", "16"], tmp_path)
    assert "num_tokens" not in shown and "error" not in shown
    assert "validate --config runs/given/config.yaml" in shown and "predict" not in shown
    line = refused(["predict", "--config", "runs/given/config.yaml"], tmp_path)
    assert line.startswith("error: a batch for predict holds input_ids, positions, labels; allowed: one with rows, columns, te")
    line = refused(["fit", *tiny, *ids, "few", "--model.encoder.vocab_size", "15"], tmp_path)
    assert line.startswith("error: input_ids of a batch hold 15; allowed: 0 to 14; the data's num_tokens, or else model.enc")
    for command in ("validate", "test"):
        line = refused([command, *tiny, *ids, "given", "--model.encoder.vocab_size", "16", "--data.largest", "16"], tmp_path)
        assert line.startswith("error: input_ids of a batch hold 16; allowed: 0 to 15")
    output(["fit", *tiny, *ids, "further", "--model.pretrained", str(pretrained), "--model.encoder", "null"], tmp_path)


def rows_seen(stage, rank):
    return [row for line in Path(f"seen/{stage}.{rank}").read_text().splitlines() for row in json.loads(line)]


def test_the_rows_of_plain_loaders_are_divided_among_processes(own, tmp_path):
    output(["fit", *own, *BEST, *TWO], tmp_path)
    for stage, rows, passes in (("train", 16, 2), ("validation", 8, 3)):
        seen = [rows_seen(stage, rank) for rank in range(2)]
        assert sorted(seen[0] + seen[1]) == sorted(list(range(rows)) * passes), stage


def test_of_a_metric_that_each_process_has_for_itself_the_first_one_s_decides(own, tmp_path):
    output(["fit", *own, *BEST, *TWO, "--model", "tests.own_code.OfEach"], tmp_path)
    (best,) = Path("runs/own/checkpoints").glob("best-*.ckpt")
    assert best.name == "best-00000008-92.0000.ckpt"
    assert json.loads(Path("runs/own/result.json").read_text())["best_step"] == 8


def test_a_metric_that_one_process_logs_is_refused_before_training(own, tmp_path):
    line = refused(["fit", *own, *BEST, *TWO, "--model", "tests.own_code.OfTheFirst"], tmp_path)
    assert "best.monitor is 'val_loss', which OfTheFirst does not log on all processes; allowed: a metric that" in line


def test_an_early_stop_by_what_is_not_logged_is_refused_before_training(own, tmp_path):
    stop = ["--trainer.callbacks+", "EarlyStopping", "--trainer.callbacks.monitor"]
    told = refused(["fit", *own, *BEST, *stop, "val_los"], tmp_path)
    assert "EarlyStopping.monitor is 'val_los', which Plain does not log in its validation; allowed: val_loss" in told
    assert not Path("seen/train.0").exists()


def test_an_early_stop_by_what_training_logs(own, tmp_path):
    """Known at the end of an epoch, but not after a validation within one."""
    stop = ["--model", "tests.own_code.OfAPass", "--trainer.callbacks+", "EarlyStopping", "--trainer.callbacks.monitor"]
    output(["fit", *own, *BEST, *stop, "train_loss"], tmp_path)
    within = ["--name", "within", "--trainer.val_check_interval", "4"]
    told = refused(["fit", *own, *BEST, *stop, "train_loss", *within], tmp_path)
    assert "EarlyStopping.monitor is 'train_loss', which OfAPass had not logged when it looked; allowed: val_loss" in told


def test_several_validation_sets(own, tmp_path):
    best = ["--data.sets", "2", "--best.monitor", "val_loss/dataloader_idx_1"]
    output(["fit", *own, *best], tmp_path)
    assert list(Path("runs/own/checkpoints").glob("best-*"))
    line = refused(["fit", *own, *best, "--model", "tests.own_code.TwoMetrics", "--overwrite", "true"], tmp_path)
    step = "TwoMetrics.validation_step that takes dataloader_idx"
    assert line == f"error: data=Rows gives several loaders by val_dataloader; allowed: one, or a {step}"


def test_a_run_that_goes_on_by_another_metric_tells_of_that_one_alone(own, tmp_path):
    words = ["fit", *own, "--model", "tests.own_code.TwoMetrics", "--best.monitor"]
    output([*words, "val_loss"], tmp_path)
    accuracy = [*words, "val_accuracy", "--best.mode", "max", "--ckpt_path", "last"]
    shown = output([*accuracy, "--trainer.max_epochs", "4"], tmp_path)
    assert re.findall(r"^  (\w+) +\S+ \(step (\d+)\)$", shown, re.M) == [("first", "24"), ("best", "24"), ("last", "32")], shown
    assert json.loads(Path("runs/own/result.json").read_text())["best_step"] == 24  # the step whose checkpoint exists
    assert [path.name[:13] for path in Path("runs/own/checkpoints").glob("best-*")] == ["best-00000024"]


def test_a_dict_of_loaders_and_no_validation(own, tmp_path):
    shown = output(["fit", *own, "--model", "tests.own_code.Trains", "--data", "tests.own_code.TwoSets"], tmp_path)
    assert "\ntraining    2 epochs\n" in shown and "step 16/16" in shown
    assert "tensorboard" in shown and "run.py" not in shown  # nothing to validate
    assert not Path("early").exists()  # asks for rows only when there are some
    for limit, proposed in (("1", True), ("0", False)):  # `validate` would use the run's limit, and refuse it
        shown = output(["fit", *own, *BEST, "--trainer.limit_val_batches", limit, "--overwrite", "true"], tmp_path)
        assert ("run.py validate" in shown) is proposed


def test_a_finder_says_what_it_found(own, tmp_path):
    finder = ["--model.rate", "1e-3", "--trainer.callbacks+", "LearningRateFinder", "--trainer.callbacks.attr_name", "rate"]
    assert "Learning rate set to " in output(["fit", *own, *BEST, *finder], tmp_path)
    # A resumed run would start over, with the checkpoint's weights.
    told = "error: trainer.callbacks is 'LearningRateFinder', which would begin at step 0 with the checkpoint's weights"
    assert told in refused(["fit", *own, *BEST, *finder, "--ckpt_path", "last"], tmp_path)
    told = "error: trainer.callbacks is 'LearningRateFinder', whose rate the schedule of NumPyRates would replace by its own"
    scheduled = ["--model", "tests.own_code.NumPyRates", "--name", "scheduled", *finder[2:4]]
    assert told in refused(["fit", *own, *BEST, *scheduled], tmp_path)


def test_lightnings_timer_is_named_without_its_interval_and_a_profile_is_a_file_of_the_run(own, tmp_path):
    timer = ["--trainer.callbacks+", "Timer", "--trainer.callbacks.duration", "01:00:00:00"]
    output(["fit", *own, *BEST, *timer, "--trainer.profiler", "simple"], tmp_path)
    assert "interval: step" in Path("runs/own/config.yaml").read_text()
    assert "run_training_batch" in Path("runs/own/fit-profile.txt").read_text()


def test_an_overwritten_run_leaves_no_checkpoint_of_ones_own_callback(own, tmp_path):
    words = ["fit", *own, *BEST, "--trainer.callbacks+", "ModelCheckpoint", "--trainer.callbacks.every_n_train_steps", "6"]
    output(words, tmp_path)
    there = {path.name for path in Path("runs/own/checkpoints").glob("epoch=*")}
    assert there == {"epoch=1-step=12.ckpt"}
    output([*words, "--overwrite", "true", "--trainer.max_epochs", "1"], tmp_path)
    assert {path.name for path in Path("runs/own/checkpoints").glob("epoch=*")} == {"epoch=0-step=6.ckpt"}


def test_a_second_checkpoint_of_the_best_is_refused(own, tmp_path):
    second = ["--trainer.callbacks+", "ModelCheckpoint", "--trainer.callbacks.monitor", "val_loss"]
    assert "trainer.callbacks has a ModelCheckpoint with monitor val_loss" in refused(["fit", *own, *BEST, *second], tmp_path)


@pytest.mark.parametrize(
    ("extra", "what", "where"),
    [
        (["--model", "tests.own_code.Unpacks"], "not enough values to unpack (expected 3, got 1)", "one, two, three"),
        (["--trainer.callbacks+", "tests.own_code.Raises"], "invalid literal for int() with base 10: 'three'", 'int("three")'),
    ],
)
def test_a_mistake_in_own_code_says_where_it_is(extra, what, where, own, tmp_path):
    number = 1 + next(i for i, line in enumerate(Path(own_code.__file__).read_text().splitlines()) if where in line)
    line = refused(["fit", *own, *BEST, *extra], tmp_path)
    assert line == f"error: {what} ({own_code.__file__}, line {number}; --traceback shows more)"


def test_the_schedule_ends_where_epochs_do(tiny, tmp_path):
    """max_steps or max_epochs, whichever comes first: the last learning rate of the schedule is that of the last step."""
    ends = ["--trainer.max_steps", "1000", "--trainer.max_epochs", "1", "--trainer.check_val_every_n_epoch", "1"]
    ends += ["--trainer.val_check_interval", "1.0", "--model.schedule", "linear", "--data.batch_size", "32"]
    assert fit(tiny, "own", tmp_path / "log", *ends) == 0
    rates = [line["lr"] for line in read_log(tmp_path / "log.0").values()]
    assert len(rates) > 10 and 0 <= rates[-1] < 0.15 * max(rates)


@pytest.mark.slow
def test_a_module_that_optimises_by_itself(own, tmp_path):
    shown = output(["fit", *own, *BEST, "--model", "tests.own_code.Manual", "--progress.every_n_steps", "4"], tmp_path)
    assert "step 4/16" in shown and "loss" not in shown.partition("step 4/16")[2].partition("\n")[0]
    several = ["--model", "tests.own_code.Manual", "--model.optimizers", "2", "--overwrite", "true"]
    assert "step 32/32" in output(["fit", *own, *BEST, *several], tmp_path)  # counted for both
    shown = output(["fit", *own, *BEST, *several[:4], "--ckpt_path", "last", "--trainer.max_epochs", "3"], tmp_path)
    assert "step 48/48" in shown
    shown = output(["fit", *own, *BEST, *several, "--trainer.max_steps", "20"], tmp_path)
    assert "step 20/20" in shown


@pytest.mark.parametrize("every", ["1", "2"])
def test_the_mean_of_a_pass_stands_at_its_last_step_whether_a_validation_follows_or_not(every, own, tmp_path):
    mean = ["--model", "tests.own_code.OfAPass", "--trainer.check_val_every_n_epoch", every]
    output(["fit", *own, *BEST, *mean], tmp_path)
    assert [point.step for point in EventAccumulator("runs/own").Reload().Scalars("train_loss")] == [8, 16]


def test_of_several_optimizers_a_line_and_a_checkpoint_come_with_the_batch_that_passes_their_step(own, tmp_path):
    words = ["--model", "tests.own_code.Manual", "--model.optimizers", "3", "--progress.every_n_steps", "10"]
    words += ["--last.every_n_steps", "10", "--trainer.log_every_n_steps", "10"]
    shown = output(["fit", *own, *BEST, *words], tmp_path)
    assert re.findall(r"^step (\d+)/48", shown, re.M) == ["12", "21", "30", "42", "48"]
    assert load(Path("runs/own/checkpoints/previous.ckpt"))["global_step"] == 42
    points = EventAccumulator("runs/own").Reload().Scalars("watch/data_wait")
    assert [point.step for point in points] == [12, 21, 30, 42]


def test_several_optimizers_beyond_max_steps_end_with_a_validation(own, tmp_path):
    """Three steps per batch: 21 of 20, in mid-epoch; a signal in that batch does not interrupt a run that is about to end."""
    words = ["--model", "tests.own_code.Manual", "--model.optimizers", "3", "--trainer.max_steps", "20"]
    words += ["--trainer.callbacks+", "tests.own_code.TermAt", "--trainer.callbacks.step", "21"]
    output(["fit", *own, *BEST, *words], tmp_path)
    result = json.loads(Path("runs/own/result.json").read_text())
    assert result["step"] == result["best_step"] == 21 and "val_loss" in result["metrics"]
    last = load(Path("runs/own/checkpoints/last.ckpt"))
    assert last["global_step"] == 21 and not last["callbacks"]["LastCheckpoint"]["owes_validation"]
