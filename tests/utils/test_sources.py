"""Settings read from source files equal those of the imported classes; what cannot be read is left out."""

import dataclasses
import inspect

import pytest

from lit_linformer import callbacks, data, tasks
from lit_linformer.model import ATTENTIONS, EncoderConfig
from lit_linformer.model.starts import PROJECTION_INITS
from lit_linformer.utils.sources import NotGiven, find, first_sentence, keys, registered

CLASSES = [getattr(tasks, name) for name in tasks.TASKS] + [getattr(data, name) for name in data.__all__]
CLASSES += [callbacks.Spectrum, callbacks.Progress, callbacks.best_checkpoint, callbacks.LengthSweep]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_names_defaults_and_words_are_the_class_s_own(kind):
    declared = find(f"{kind.__module__}.{kind.__name__}")
    parameters = inspect.signature(kind).parameters.values()
    real = {one.name: one.default for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD}
    read = {one.name: one.default for one in declared.own()} if "self" not in real else {}
    assert read.keys() == real.keys()
    for name, default in real.items():
        assert read[name] == default or (default is inspect.Parameter.empty and read[name] is NotGiven)
    assert all(one.words for one in declared.own())
    assert declared.summary and declared.summary in " ".join(inspect.getdoc(kind).split())


def test_a_dataclass_s_fields():
    found = find("lit_linformer.model.EncoderConfig").settings()
    assert {name: one.default for name, one in found.items()} == {
        one.name: one.default for one in dataclasses.fields(EncoderConfig)
    }
    assert found["dropout"].allowed == "at least 0, less than 1" and found["causal"].allowed == "true or false"


def test_settings_that_are_handed_on_are_the_bases_too():
    found = find("examples.denoising.Denoising").settings()
    assert (
        found["replaced"].default == 0.15 and found["lr"].default == 1e-3 and found["lr"].allowed == "more than 0, up to 10000"
    )
    assert found["schedule"].allowed == "linear, cosine, polynomial, constant, wsd"
    assert find("lit_linformer.tasks.SequenceClassification").settings()["lr"].default == 1e-5


def test_names_of_registries_and_tables():
    assert list(registered("ATTENTIONS")) == sorted(ATTENTIONS) or set(registered("ATTENTIONS")) == set(ATTENTIONS)
    assert keys("lit_linformer.model.starts.PROJECTION_INITS") == list(PROJECTION_INITS)


@pytest.mark.parametrize(
    "path", ["nobody.Thing", "lit_linformer.tasks.Nothing", "lit_linformer.tasks", "os.path", "", "x", "sys.path"]
)
def test_what_is_no_class_in_a_file(path):
    assert find(path) is None


def test_a_file_that_is_no_python(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_ideas.py").write_text("class Idea(:\n")
    assert find("broken_ideas.Idea") is None


def test_first_sentences():
    assert first_sentence("One, e.g. a.\nTwo.") == "One, e.g. a"
    assert first_sentence("n = 0.5 is half. Then") == "n = 0.5 is half"
    assert first_sentence("") == ""
