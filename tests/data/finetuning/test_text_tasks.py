"""The table of tasks, and tasks not in it."""

import pytest

from lit_linformer.data.finetuning.text_tasks import (
    CLASSIFICATION_METRICS,
    REGRESSION_METRICS,
    TASKS,
    find_task,
    label_of,
    own_task,
)


def test_the_table_is_whole():
    assert [task.name for task in TASKS] == ["CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI", "QNLI", "RTE", "WNLI", "IMDB"]
    for task in TASKS:
        allowed = REGRESSION_METRICS if task.labels is None else CLASSIFICATION_METRICS
        assert set(task.metrics) <= set(allowed) and task.metrics
        assert len(task.submission) == len(task.evaluation) and len(task.columns) in (1, 2)
        assert task.unlabelled_test == (task.hub[0] == "nyu-mll/glue")
    assert [task.name for task in TASKS if task.submits_names] == ["MNLI", "QNLI", "RTE", "IMDB"]
    assert find_task("MNLI").splits("validation") == ["validation_matched", "validation_mismatched"]
    assert find_task("MNLI").splits("train") == ["train"] and find_task("RTE").splits("test") == ["test"]


@pytest.mark.parametrize("name", ["SST-2", "sst2", "SST2", "sst_2", "Sst 2"])
def test_names_are_found_whatever_their_case_and_punctuation(name):
    assert find_task(name).name == "SST-2"


def test_unknown_names_are_one_line_with_the_nearest():
    allowed = "CoLA, SST-2, MRPC, STS-B, QQP, MNLI, QNLI, RTE, WNLI, IMDB"
    for name, meant in {"ssst2": "; did you mean 'SST-2'?", "IMBD": "; did you mean 'IMDB'?", "xyz": ""}.items():
        with pytest.raises(ValueError) as caught:
            find_task(name)
        assert str(caught.value) == f"data.task is {name!r}; allowed: {allowed}{meant}"


def test_a_task_of_ones_own():
    task = own_task(["title", "body"], "topic", ["World", "Sports"], ["accuracy", "f1"])
    assert task.columns == (("title",), ("body",)) and task.labels == ("World", "Sports")
    assert own_task(["text"], labels=["a", "b"]).metrics == ("accuracy",)
    assert own_task(["text"]).metrics == ("pearson", "spearman") and own_task(["text"]).labels is None


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"columns": []}, r"^data.columns is \[\]; allowed: one column of texts, or two of pairs$"),
        ({"columns": ["a", "b", "c"]}, r"^data.columns is .*; allowed: one"),
        ({"columns": ["a", "a"]}, r"^data.columns is .*; allowed: one"),
        ({"columns": ["label"]}, r"^data.label_column is 'label'; allowed: another column than data.columns$"),
        ({"labels": ["one"]}, r"^data.labels is \['one'\]; allowed: two or more different names"),
        ({"labels": ["a", "a"]}, r"^data.labels is .*; allowed: two or more different"),
        ({"metrics": []}, r"^data.metrics is \[\]; allowed: one or more of pearson, spearman$"),
        (
            {"metrics": ["accuracy"]},
            r"^data.metrics has 'accuracy', which is not for a regression .*; allowed: pearson, spearman$",
        ),
        (
            {"labels": ["a", "b"], "metrics": ["pearson"]},
            r"^data.metrics has 'pearson', which is not for a classification; allowed: ",
        ),
        ({"labels": ["a", "b"], "metrics": ["acuracy"]}, r"data.metrics has 'acuracy'; .*; did you mean 'accuracy'\?$"),
        ({"metrics": ["mae"]}, r"has 'mae'; allowed: pearson, spearman, or one of your own \(docs/finetuning.md\)$"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        own_task(**({"columns": ["text"]} | arguments))


STARS = own_task(["text"], labels=["1", "2", "3", "4", "5"])


@pytest.mark.parametrize(
    "task, value, label",
    [
        (find_task("MNLI"), "contradiction", 2),
        (find_task("MNLI"), 2, 2),
        (find_task("MNLI"), "2", 2),
        (find_task("MNLI"), 2.0, 2),
        (find_task("SST-2"), True, 1),
        (find_task("SST-2"), -1, None),
        (find_task("SST-2"), "-1", None),
        (find_task("SST-2"), None, None),
        (STARS, 5, 4),  # a label's name, not its number
        (STARS, "1", 0),
        (STARS, "4.0", 3),  # as pandas writes a column of numbers with missing values
        (STARS, "-1.0", None),
        (find_task("SST-2"), "1.0", 1),
        (find_task("SST-2"), "-1.0", None),
        (own_task(["text"], labels=["1.0", "2.0"]), "2.0", 1),
        (own_task(["text"], labels=["1.0", "2.0"]), 2.0, 1),
        (own_task(["text"], labels=["1.0", "2.0"]), 1, 0),  # the label, not the class number
        (own_task(["text"], labels=["1.0", "0.0"]), "0", 1),
        (own_task(["text"], labels=["-1", "1"]), "-1", 0),
        (own_task(["text"], labels=["true", "false"]), True, 0),  # from JSON; Python writes it True
        (own_task(["text"], labels=["False", "True"]), True, 1),
        (own_task(["text"], labels=["bad", "good"]), True, 1),
        (find_task("STS-B"), "3.800", 3.8),
        (find_task("STS-B"), 0, 0.0),
        (find_task("STS-B"), "5.000", 5.0),
        (find_task("STS-B"), -1.0, None),
        (own_task(["text"]), -1.0, -1.0),  # an ordinary value
        (own_task(["text"]), None, None),
        (own_task(["text"]), -3.4e38, -3.4e38),
    ],
)
def test_labels(task, value, label):
    assert label_of(value, task) == label


def test_names_as_a_setting_takes_them():
    import yaml

    from lit_linformer.data.finetuning.text_tasks import as_typed

    names = ["good", "so so", "No", "off", "3", "1.5", "a, b", "null", "Sci/Tech", "größe", "y", "neg ", "x"]
    assert yaml.safe_load(as_typed(names)) == names and as_typed(["bad", "good"]) == "[bad,good]"


@pytest.mark.parametrize(
    "task, value, message",
    [
        (find_task("SST-2"), "good", r"^label is 'good'; allowed: 'negative', 'positive', or their numbers 0 to 1"),
        (find_task("SST-2"), 2, r"^label is 2; allowed: "),
        (find_task("SST-2"), "0.5", r"^label is '0.5'; allowed: "),
        (find_task("SST-2"), 0.5, r"^label is 0.5; allowed: "),
        (find_task("SST-2"), float("nan"), r"^label is nan; allowed: "),
        (own_task(["text"], labels=["0.5", "1.5"]), 1, r"^label is 1; allowed: '0.5', '1.5'$"),
        (STARS, 0, r"^label is 0; allowed: '1', '2', '3', '4', '5'$"),
        (find_task("STS-B"), "nan", r"^label is 'nan'; allowed: a number from 0 to 5$"),
        (find_task("STS-B"), 5.1, r"^label is 5.1; allowed: a number from 0 to 5$"),
        (own_task(["text"]), "inf", r"^label is 'inf'; allowed: a finite number"),
        (own_task(["text"]), "good", r"^label is 'good'; allowed: a finite number \(give data.labels"),
        (own_task(["text"]), "1e39", r"^label is '1e39'; allowed: a finite number .* up to 3.4e38$"),
        (own_task(["text"]), -3.5e38, r"^label is -3.5e\+38; allowed: a finite number .* up to 3.4e38$"),
        pytest.param(own_task(["text"]), 10**309, r"^label is 10+; allowed: a finite number", id="no float at all"),
    ],
)
def test_bad_labels(task, value, message):
    with pytest.raises(ValueError, match=message):
        label_of(value, task)
