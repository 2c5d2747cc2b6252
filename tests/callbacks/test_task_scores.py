"""The confusion matrix of a fine-tuning run."""

import pytest
import torch

from lit_linformer.callbacks.task_scores import draw_confusion_matrix
from lit_linformer.utils.figures import figure_class


def test_classes_may_be_named_by_dollars(tmp_path):
    pytest.importorskip("matplotlib")  # which reads text between two dollars as mathematics
    draw_confusion_matrix(figure_class(), torch.eye(3).long(), ("$", "$$", "$$$")).savefig(tmp_path / "matrix.png")


def test_shares_are_those_of_the_true_class():
    pytest.importorskip("matplotlib")
    axes = draw_confusion_matrix(figure_class(), torch.tensor([[3, 1], [0, 2]]), ("a", "b")).axes[0]
    shown = {text.get_position(): text.get_text() for text in axes.texts}  # at (predicted, true)
    assert shown == {(0, 0): "3\n75.0%", (1, 0): "1\n25.0%", (0, 1): "0\n0.0%", (1, 1): "2\n100.0%"}


def test_of_many_classes_the_picture_stays_small():
    pytest.importorskip("matplotlib")
    figure = draw_confusion_matrix(figure_class(), torch.eye(800).long(), tuple(map(str, range(800))))
    axes = figure.axes[0]
    assert max(figure.get_size_inches()) < 25 and not axes.texts and len(axes.get_xticks()) == 80
