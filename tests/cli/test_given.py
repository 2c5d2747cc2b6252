"""How settings of --config files and the command line combine."""

import shlex
from pathlib import Path

import pytest
import yaml

from lit_linformer.cli.given import for_parser, given_settings
from lit_linformer.model import SelfAttention
from tests.helpers import output

OPTIONS = "model.encoder.attention_options"


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("", {"window": 16}),
        ("--model.encoder.attention lookup", {"window": 16}),
        (f"--{OPTIONS}.chunk 8", {"window": 16, "chunk": 8}),
        (f"--{OPTIONS} null", {}),
        (f"--{OPTIONS}=null", {}),
        ("--model.encoder.attention full", {}),
        ("--model.init_args.encoder.attention=full", {}),
        ("--model.encoder '{attention: window}'", {}),
        (f"--model.encoder '{{attention: window}}' --{OPTIONS}.dual_norm true", {"dual_norm": True}),
        ("--model.encoder '{attention: window, attention_options: {dual_norm: true}}'", {"dual_norm": True}),
        ("--model.encoder '{hidden_size: 64}'", {"window": 16}),
        (f"--model.encoder.attention window --{OPTIONS}.dual_norm true", {"dual_norm": True}),
        (f"--{OPTIONS}.dual_norm true --model.encoder.attention window", {"dual_norm": True}),
        (f"--model.encoder.attention lsh --{OPTIONS} '{{rounds: 3}}'", {"rounds": 3}),
        ("--model.encoder.attention full --model.encoder.attention lookup", {"window": 16}),
        ("--config chunk.yaml", {"chunk": 8}),
        ("--config chunk.yaml --model.encoder.attention lsh", {}),
        ("--config lsh.yaml", {}),
        (f"--config lsh.yaml --{OPTIONS}.rounds 3", {"rounds": 3}),
        ("--config lsh.yaml --config chunk.yaml", {"chunk": 8}),
        ("--config chunk.yaml --config lsh.yaml --model.encoder.attention lookup", {}),
    ],
)
def test_options_of_an_attention_go_with_it(line, options, tmp_path):
    """An attention of the command line, or of a later file, does not get the options that earlier files give another one."""
    first = _written(tmp_path / "window.yaml", {"attention": "lookup", "attention_options": {"window": 16}})
    later = {"chunk": {"attention_options": {"chunk": 8}}, "lsh": {"attention": "lsh"}}
    for name, encoder in later.items():
        line = line.replace(f"{name}.yaml", _written(tmp_path / f"{name}.yaml", encoder))
    argv = ["fit", "--config", "conf/pretrain/small.yaml", "--config", first, *shlex.split(line)]
    found = yaml.safe_load(output([*argv, "--print_config"], tmp_path))
    assert (found["model"]["init_args"]["encoder"]["attention_options"] or {}) == options
    known = given_settings(argv)  # as read without the parser
    nested = {name.removeprefix(f"{OPTIONS}."): value for name, value in known.items() if name.startswith(f"{OPTIONS}.")}
    assert (known.get(OPTIONS) or {}) | nested == options


def test_options_of_files_that_name_no_attention_stay(tmp_path):
    overlay = _written(tmp_path / "rounds.yaml", {"attention_options": {"rounds": 2}})
    words = ["fit", "--config", overlay, "--model.encoder.attention", "lsh"]
    assert for_parser(words) == words


def _written(path, encoder):
    path.write_text(yaml.safe_dump({"model": {"init_args": {"encoder": encoder}}}))
    return str(path)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--data.text", "Note: <mask>"], ["--data.text", '["Note: <mask>"]']),
        (["--data.text=# great film"], ['--data.text=["# great film"]']),
        (["--data.text", "- <mask>"], ['--data.text=["- <mask>"]']),
        (["--data.text_pair", "a: b"], ["--data.text_pair", '["a: b"]']),
        (["--data.text", "plain"], ["--data.text", "plain"]),
        (["--data.text", '["a: b", "c"]'], ["--data.text", '["a: b", "c"]']),
        (["--data.text", "null"], ["--data.text", "null"]),
        (["--data.document_start", "# "], ["--data.document_start", "^# "]),
        (["--data.document_start=^# "], ["--data.document_start=^# "]),
        (["--name", "a: b"], ["--name", "a: b"]),
        (["--data.text", r"${HOME} is \${x} <mask>"], ["--data.text", r"\${HOME} is \\\${x} <mask>"]),
        (["--data.text=- ${a}"], [r'--data.text=["- \\${a}"]']),
        (["--trainer.max_time", "1:00:00:00"], ["--trainer.max_time", "01:00:00:00"]),
    ],
)
def test_what_is_typed_as_a_text_is_one(words, meant):
    assert for_parser(["predict", *words]) == ["predict", *meant]
    if words[0] == "--data.text" and "[" not in words[1] and words[1] != "null":
        assert given_settings(["predict", *words])["data.text"] == words[1]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--data.pairs 4 --data RecallData --model.lr 1", "--data RecallData --data.pairs 4 --model.lr 1"),
        ("--model.lr 1 --data.pairs=4 --data=A --model B", "--data=A --model B --model.lr 1 --data.pairs=4"),
        ("--model.lr 1 --model --data.class_path A", "--model --data.class_path A --model.lr 1"),
        ("--trainer.callbacks+ A --trainer.callbacks.a 1", "--trainer.callbacks+ A --trainer.callbacks.a 1"),
        ("--model.a -1e-3 --model.b=-1E2 --model.c -.5e+1 -1e3", "--model.a=-1e-3 --model.b=-1E2 --model.c=-.5e+1 -1e3"),
        ("--model.a -1 --model.b 1e-3 --name a-1e-3", "--model.a=-1 --model.b 1e-3 --name a-1e-3"),
        ("--trainer.max_time -1:0:0:0 --name -x --overwrite", "--trainer.max_time=-1:0:0:0 --name=-x --overwrite"),
    ],
)
def test_words_as_the_parser_takes_them(line, expected, tmp_path):
    (tmp_path / "a.yaml").write_text("model: {class_path: MLM}\ndata: RecallData\n", encoding="utf-8")
    config = ["--config", str(tmp_path / "a.yaml")]
    assert for_parser(["fit", *line.split(), *config]) == ["fit", *config, *expected.split()]


def test_an_overlay_of_a_class_that_is_typed(tiny, tmp_path):
    overlay = Path(__file__).parents[2] / "conf/debug/fast.yaml"
    line = ["--data", "PretrainingData", "--data.batch_size", "4"]
    assert for_parser(["fit", *line, "--config", str(overlay)]) == ["fit", *line[:2], "--config", str(overlay), *line[2:]]
    printed = output(["fit", "--config", str(overlay), *line, "--print_config"], tmp_path)
    assert "batch_size: 4" in printed and "max_steps: 10" in printed


def test_settings_may_be_typed_before_their_class(tiny, tmp_path):
    line = "--data.max_length 32 --data.pairs 4 --data.vocab_size 60 --data.rows 40 --data.validation_rows 8 --data RecallData"
    quick = ["--trainer.max_steps", "1", "--trainer.fast_dev_run", "true"]
    output(["fit", *tiny[:2], *quick, *line.split()], tmp_path)


class Own(SelfAttention):
    pass


class Looking(SelfAttention):
    @classmethod
    def check(cls, config):
        assert config.projection_dim == 4


@pytest.mark.slow
def test_a_typed_setting_that_nothing_reads_is_told_once(tiny, tmp_path):
    encoder, quick = "--model.encoder", ["--trainer.max_steps", "1", "--trainer.fast_dev_run", "true"]

    def told(*words):
        lines = output(["fit", *tiny, *quick, *words], tmp_path).splitlines()
        return [line.removeprefix("warning: ") for line in lines if "ignored: model." in line]

    full = [f"{encoder}.attention", "full"]
    assert told(*full, f"{encoder}.projection", "conv", f"{encoder}.projection_dim", "4", "--model.power", "3") == [
        "model.power is ignored: model.schedule is linear",
        "model.encoder.projection, model.encoder.projection_dim are ignored: model.encoder.attention is full",
    ]
    # No warning for k from a config, nor for settings that are used.
    assert told(*full) == []
    assert told("--model.schedule", "wsd", "--model.decay_share", "0.2", f"{encoder}.projection_init", "strided") == []
    assert told(f"{encoder}.projection", "mean", f"{encoder}.projection_init", "split", f"{encoder}.local_width", "5") == [
        "model.encoder.projection_init is ignored: model.encoder.projection is mean"
    ]
    constant = ["--model.schedule", "constant", "--model.final_lr_factor", "0.1"]
    assert told(*constant, f"{encoder}.local_std", "0.5", f"{encoder}.local_width", "0") == [
        "model.final_lr_factor is ignored: model.schedule is constant",
        "model.encoder.local_std is ignored: model.encoder.local_width is 0",
    ]
    # A user's own class reads what its base class passes to it, and more only if it looks at the config itself.
    own, slots = f"{__name__}.Own", [f"{encoder}.projection_dim", "4"]
    assert told(f"{encoder}.attention", own, *slots) == [
        f"model.encoder.projection_dim is ignored: model.encoder.attention is {own}"
    ]
    assert told(f"{encoder}.attention", f"{__name__}.Looking", *slots) == []
