"""What is refused before torch is imported; it includes nothing that the parser accepts."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lit_linformer import data, tasks
from lit_linformer.cli.given import given_settings
from lit_linformer.cli.help import settings_of
from lit_linformer.cli.quick_checks import ELSEWHERE, check_quickly, known_settings
from lit_linformer.utils.errors import UserError
from tests.cli.test_help import LINES
from tests.helpers import output

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("model", "texts"), [*((one, "PretrainingData") for one in tasks.TASKS), *(("MLM", one) for one in data.__all__)]
)
def test_names_that_are_known_are_all_that_the_parser_takes(model, texts):
    argv = ["fit", "--model", model, "--data", texts]
    known = {name for names in known_settings(given_settings(argv)).values() for name in names}
    parsed = {name for name in settings_of(argv) if "." in name}
    assert parsed <= known


def test_names_of_other_libraries_stand_for_settings_and_are_none():
    settings = {*settings_of(["fit"]), "name", "ckpt_path", "seed_everything"}
    others = [word for words in ELSEWHERE.values() for word in words.split()]
    assert ELSEWHERE.keys() <= settings and len({*others}) == len(others)
    assert {*others} & {name.rpartition(".")[2] for name in settings} == {"seed"}  # the data has one of its own


@pytest.mark.parametrize("line", LINES[1:])
def test_good_lines_pass(line):
    check_quickly([*shlex.split(line), "--model.pretrained", "runs/x"])


def test_help_on_a_class_needs_no_model():
    check_quickly(["fit", "--trainer.callbacks.help", "Spectrum"])


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("fit --config conf/quickstart.yaml --model.lrate 1", "unknown setting 'model.lrate'; did you mean 'model.lr'?"),
        ("predict --config conf/quickstart.yaml --data.txt x", "unknown setting 'data.txt'; did you mean 'data.text'?"),
        ("fit --confg conf/quickstart.yaml", "unknown setting 'confg'; did you mean 'config'?"),
        ("predict --conf=conf/quickstart.yaml", "unknown setting 'conf'; did you mean 'config'?"),
        ("fit --config conf/quickstart.yaml --trainer.gpus 2", "setting 'trainer.gpus'; did you mean 'trainer.devices'?"),
        ("fit --config conf/quickstart.yaml --trainer.resume last", "'trainer.resume'; did you mean 'ckpt_path'?"),
        ("fit --config conf/quickstart.yaml --seed 3", "unknown setting 'seed'; did you mean 'seed_everything'?"),
        ("fit --config conf/quickstart.yaml --model.encoder.k 3", "did you mean 'model.encoder.projection_dim'?"),
        ("fit", "model.encoder is not given"),
        ("fit --model SequenceClassification", "model.pretrained is not given"),
        (
            "predict --config conf/quickstart.yaml --data.text a --data.text=b",
            "data.text is given 2 times, of which the last alone would be read; allowed: once, with a list",
        ),
        ("predict --config conf/quickstart.yaml --data.file a --data.file b", "data.file is given 2 times, of which"),
        ("fit --config conf/quickstart.yaml --last.every 3", "did you mean 'last.every_n_steps'?"),
        ("fit conf/quickstart.yaml", "is neither a setting nor the value of one; allowed: --config conf/quickstart.yaml"),
        ("fit --config conf/quickstart.yaml conf/debug/fast.yaml", "the value of one; allowed: --config conf/debug/fast.yaml"),
        ("fit --config=conf/quickstart.yaml conf/debug/fast.yaml", "the value of one; allowed: --config conf/debug/fast.yaml"),
        (
            "fit --config conf/model/modern.yaml --config conf/quickstart.yaml",
            "conf/model/modern.yaml changes settings of the model, and comes before conf/quickstart.yaml, which says what the "
            "model is; allowed: --config conf/quickstart.yaml --config conf/model/modern.yaml",
        ),
        ("fit -config conf/quickstart.yaml", "unknown setting '-config'; did you mean '--config'?"),
        ("predict --config conf/quickstart.yaml -ckpt_path=last", "unknown setting '-ckpt_path'; did you mean '--ckpt_path'?"),
        ("fit --config", "--config has no value; allowed: a file with settings, as conf/quickstart.yaml"),
        ("fit --config --model.lr 1", "--config has no value; allowed: a file with settings, as conf/quickstart.yaml"),
        ("fit --config conf/lra/table.yaml", "conf/lra/table.yaml is a file for `grid`; allowed: a file with settings, as"),
        (
            "fit --config conf/quickstart.yaml --config conf/tune/lr.yaml",
            "lr.yaml is a file for `tune --space`; allowed: a file",
        ),
        (
            "fit --config conf/finetune/small.yaml",
            "model.pooling in conf/finetune/small.yaml is a setting of SequenceClassification, and the model is MLM; allowed",
        ),
    ],
)
def test_bad_lines(line, told):
    with pytest.raises(UserError) as refused:
        check_quickly(shlex.split(line))
    assert told in str(refused.value) and "\n" not in str(refused.value)


def test_what_a_file_says_of_another_class_is_no_error():
    check_quickly(shlex.split("fit --config conf/quickstart.yaml --model SequenceClassification --model.pooling mean"))
    check_quickly(shlex.split("fit --config conf/quickstart.yaml --data RecallData --data.pairs 3"))
    check_quickly(["predict", "--config", "conf/quickstart.yaml", f"--data.text={'long ' * 2000}<mask>"])
    check_quickly(shlex.split("fit --config conf/quickstart.yaml --model nobody.Idea --model.anything 3"))


@pytest.mark.parametrize("line", ["fit", "fit --config nowhere.yaml", "fit --config conf/quickstart.yaml --model.lrate 1"])
def test_the_refusal_needs_no_torch(line):
    code = (
        f"import sys; sys.argv = ['run.py', *{line.split()!r}]; import runpy\n"
        "try: runpy.run_path('run.py', run_name='__main__')\nexcept SystemExit as end: print(end.code)\n"
        "print([m for m in ('torch', 'lightning', 'jsonargparse') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines() == ["2", "[]"] and len(done.stderr.splitlines()) == 1


def test_a_warning_is_one_line_without_its_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "warns.py").write_text("import warnings\ndef main(argv):\n    warnings.warn('two\\nlines')\n")
    assert output(["warns"], tmp_path) == "warning: two lines\n"
