"""The short --help: its values are the real parser's, a section fits a screen, nothing heavy is imported; and --help_all."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lit_linformer.cli import often_changed
from lit_linformer.cli.help import settings_of
from lit_linformer.cli.short_help import settings_shown, short_help
from lit_linformer.utils import sources
from tests.helpers import in_one_process, output

ROOT = Path(__file__).parents[2]
LINES = [
    "fit",
    "fit --config conf/quickstart.yaml",
    "fit --config conf/quickstart.yaml --config conf/debug/fast.yaml --config conf/trainer/ddp.yaml --name=x",
    "fit --config conf/quickstart.yaml --model.encoder.projection_dim 16 --model.lr=1e-4 --data.max_length 64",
    "fit --config conf/quickstart.yaml --model.betas [0.9,0.95] --trainer.callbacks+ lit_linformer.callbacks.Spectrum",
    "fit --config conf/quickstart.yaml --model.encoder.max_length 64 --data RecallData --data.pairs 4",
    "fit --config conf/finetune/sst2.yaml --config conf/finetune/small.yaml --model.pretrained runs/x",
    "fit --config conf/convert/distill.yaml --config conf/convert/mlm.yaml --trainer.strategy ddp",
    "fit --config conf/recall/small.yaml --best.keep 3",
    "fit --config conf/quickstart.yaml --model examples.denoising.Denoising --model.replaced 0.3",
    "fit --config conf/logger/csv.yaml --model lit_linformer.tasks.SequenceClassification --data FineTuningData",
    "validate --config conf/pretrain/small.yaml --trainer.limit_val_batches 0.1",
    "test --config conf/finetune/imdb.yaml --data.eval_batch_size 8",
    "predict --config conf/quickstart.yaml --data.text='The <mask> of it.'",
    "prepare --config conf/pretrain/wikitext103.yaml --data.vocab_size 300",
]


def shown(line):
    return {one.name: one for _, lines in settings_shown(shlex.split(line)) for one in lines}


@pytest.fixture(scope="module")
def parsed(tmp_path_factory):
    """{line: the config that the real parser makes of it}"""
    lines = [[*shlex.split(line), "--print_config"] for line in LINES]
    found = in_one_process(lines, tmp_path_factory.mktemp("parsed"))
    assert all(status == 0 for status, _ in found), found
    return {line: yaml.safe_load(printed) for line, (_, printed) in zip(LINES, found, strict=True)}


@pytest.mark.parametrize("line", LINES)
def test_values_are_those_of_the_real_parser(line, parsed):
    for name, one in shown(line).items():
        if name == "ckpt_path":  # the parser prints none for prepare, and none is given here
            continue
        if name in ("model", "data"):
            path = parsed[line][name]["class_path"]
            assert one.value in (path, path.rpartition(".")[2])
            continue
        found = parsed[line]
        if name.startswith("model.encoder.") and found["model"]["init_args"]["encoder"] is None:
            continue  # --model.encoder is not given yet; the page shows what can be given
        for part in name.split("."):
            found = found["init_args"] if "init_args" in found else found
            found = found[part]
        if name in ("trainer.callbacks", "trainer.logger", "trainer.strategy") and not isinstance(found, str | None):
            names = [entry["class_path"] for entry in (found if isinstance(found, list) else [found])]
            given = one.value if isinstance(one.value, list) else [one.value]
            assert [entry["class_path"] if isinstance(entry, dict) else entry for entry in given] == names
            continue
        same = one.value == found or (isinstance(found, float) and float(one.value) == found)
        assert same or (isinstance(found, str) and str(one.value) == found), (name, one.value, found)


@pytest.mark.parametrize("command", often_changed.SECTIONS)
def test_every_setting_of_the_short_list_exists_and_has_that_default(command):
    known = settings_of([command])
    for title, names in often_changed.SECTIONS[command]:
        for name in names.split():
            assert name in ("model", "data", "model.encoder") or name in known, (title, name)
    for line in shown(command).values():
        assert line.words, line


@pytest.mark.parametrize(("key", "name"), [(key, name) for key in ("model", "data") for name in often_changed.OF_CLASSES])
def test_settings_of_classes_exist(key, name):
    if name not in sources.exported(f"lit_linformer.{'tasks' if key == 'model' else key}"):
        return
    lines = shown(f"fit --{key} {name}")
    wanted = often_changed.OF_CLASSES[name].split()
    assert [f"{key}.{one}" for one in wanted] == [one for one in lines if one.startswith(f"{key}.") and "encoder" not in one]
    assert all(lines[f"{key}.{one}"].words for one in wanted)


def test_what_every_command_shows_of_data_exists():
    known = {name for one in sources.exported("lit_linformer.data").values() for name in one.settings()}
    assert {name for names in often_changed.OF_DATA.values() for name in names.split()} <= known


@pytest.mark.parametrize("line", LINES)
def test_a_section_fits_a_screen_of_80_columns(line):
    page = short_help(shlex.split(line), 80)
    _, *sections = page.split("\n\n")
    assert all(len(section.splitlines()) <= 30 for section in sections), page
    assert all(len(row) <= 80 for section in sections[:-1] for row in section.splitlines()), page
    assert "class_path" not in page and "lightning.pytorch" not in page and "Union" not in page


def test_predict_can_be_asked_without_a_run():
    page, with_config = (short_help(shlex.split(f"predict{more}"), 80) for more in ("", " --config conf/quickstart.yaml"))
    assert '  python run.py predict --model.pretrained models/small --data.text "Paris is the <mask> of France."' in page
    assert "--data.column text" in page
    assert "  python run.py predict --config conf/quickstart.yaml --data.file texts.txt" in with_config


def test_the_page_says_what_one_types_and_what_it_is():
    page = short_help(shlex.split("fit --config conf/quickstart.yaml --model.encoder.projection_dim 16"), 160)
    rows = page.splitlines()
    assert any(row.startswith("  --model.encoder.projection_dim 16") and row.endswith("(default 128)") for row in rows)
    assert any(row.startswith("  --model.schedule wsd") and "linear | cosine | polynomial | constant" in row for row in rows)
    assert any(row.startswith("  --model.lr 0.002") and "more than 0, up to 10000 (default 0.001)" in row for row in rows)
    assert any("linear, conv, mean, max, gaussian, or a class of your own" in row for row in rows)
    assert any(row.startswith("  --trainer.callbacks+ NAME") and row.endswith("(now PerplexityCurve)") for row in rows)
    assert rows[2].startswith("conf/quickstart.yaml: A first curve")
    assert "python run.py fit --config conf/quickstart.yaml --help_all" in page
    assert "  python run.py fit --config conf/quickstart.yaml --name again --seed_everything 1\n" in page
    assert "--config conf/quickstart.yaml --name idea" in short_help(["fit"], 80)


def test_the_commands_of_the_page_quote_a_file(tmp_path):
    file = tmp_path / "my own.yaml"
    file.write_text("model: {init_args: {lr: 1e-3}}\n")
    assert f"  python run.py fit --config '{file}' --help_all\n" in short_help(["fit", "--config", str(file)], 160)


@pytest.mark.parametrize(
    "line", ["", "--help", "fit --config conf/quickstart.yaml --help", "predict -h", "benchmark --help_all", "list"]
)
def test_pages_import_neither_torch_nor_lightning(line):
    code = (
        f"import sys; sys.argv = ['run.py', *{line.split()!r}]; import runpy\n"
        "try: runpy.run_path('run.py', run_name='__main__')\nexcept SystemExit as end: assert not end.code\n"
        "print([m for m in ('torch', 'lightning', 'jsonargparse', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "[]" and len(done.stdout.splitlines()) > 20


def test_a_class_that_only_an_import_knows_has_the_whole_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made.py").write_text("from lit_linformer.tasks import MLM\nIdea = type('Idea', (MLM,), {})\n")
    page = output(["fit", "--model", "made.Idea", "--help"], tmp_path)
    assert page.startswith("model made.Idea: no file of that name was found to read, so these are all settings")
    assert "--model.warmup_steps" in page and "--trainer.max_steps" in page
    line = output(["fit", "--model", "nobody.Idea", "--help"], tmp_path, status=2)
    assert line.startswith("error: model is 'nobody.Idea', but there is no module nobody")


def test_help_all_lists_every_setting_with_classes_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = output(["fit", "--model", "SequenceClassification", "--help_all"], tmp_path)
    assert "--model.layer_lr_decay" in page and "--trainer.reload_dataloaders_every_n_epochs" in page
    assert "known subclasses" not in page and "PerplexityCurve" in page and "lit_linformer.callbacks.P" not in page


def test_a_config_that_is_none_is_refused_by_help_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "error: config is 'nowhere.yaml', which is no file" in output(
        ["fit", "--config", "nowhere.yaml", "--help"], tmp_path, status=2
    )
