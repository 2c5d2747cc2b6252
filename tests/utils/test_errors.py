"""The error of a user's mistake: its line, from another process too, and found within the errors that libraries make of it."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch.multiprocessing

from lit_linformer.model import errors
from lit_linformer.model.registry import UnknownKind
from lit_linformer.utils.errors import SettingError, UserError, user_error

ERRORS = {
    "lr is -1; allowed: more than 0": SettingError("lr", -1, "more than 0"),
    "lr is null; allowed: a number": SettingError("lr", None, "a number"),
    "name is ''; allowed: letters": SettingError("name", "", "letters"),
    "run is runs/a, which is empty; allowed: a run": SettingError("run", Path("runs/a"), "a run", more=", which is empty"),
    "peer is true; allowed with compile: false": SettingError("peer", True, "false", when="with compile"),
    "order is 'x'; did you mean 'y'?; allowed: y": UnknownKind("order", "x", "y", "; did you mean 'y'?"),
    "line 3 has 4 fields; allowed: 2": UserError("line 3 has 4 fields", "2"),
    "labels is [false, null, 'a']; allowed: text": SettingError("labels", [False, None, "a"], "text"),
    "a.csv cannot be read": UserError("a.csv cannot be read"),
}


@pytest.mark.parametrize("line", ERRORS)
def test_its_line_is_the_same_in_another_process(line):
    for error in (ERRORS[line], pickle.loads(pickle.dumps(ERRORS[line])), copy.copy(ERRORS[line])):
        assert str(error) == line and isinstance(error, ValueError) and type(error) is type(ERRORS[line])
        assert error.allowed == ERRORS[line].allowed and getattr(error, "value", 0) == getattr(ERRORS[line], "value", 0)


def test_it_is_one_class_with_torch_and_without():
    assert SettingError is errors.SettingError and UserError is errors.UserError


def test_it_is_found_behind_what_is_raised_from_it():
    told = SettingError("lr", -1, "more than 0")

    def wrapped(explicit: bool) -> Exception:
        try:
            try:
                raise told
            except ValueError as error:
                if explicit:
                    raise TypeError("Does not validate") from error
                raise TypeError("Does not validate")  # noqa: B904
        except TypeError as error:
            return error

    assert {user_error(each) for each in (told, wrapped(True), wrapped(False))} == {str(told)}
    assert user_error(ValueError("lr is -1; allowed: more than 0")) is None  # its text alone is not enough


class Rows(torch.utils.data.Dataset):
    def __init__(self, error: Exception):
        self.error = error

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> None:
        raise self.error


@pytest.mark.parametrize("error", [SettingError("lr", -1, "more than 0"), UserError("a.csv is cut off", "a whole one")])
def test_it_is_found_in_what_a_process_that_loads_data_hands_on(error):
    with pytest.raises(Exception, match="DataLoader worker") as raised:
        next(iter(torch.utils.data.DataLoader(Rows(error), num_workers=1)))
    assert user_error(raised.value) == str(error)


def fail(rank: int, error: Exception) -> None:
    raise error


def test_it_is_found_in_what_a_process_of_training_hands_on():
    error = UnknownKind("order", "x", "y")
    with pytest.raises(torch.multiprocessing.ProcessRaisedException) as raised:
        torch.multiprocessing.start_processes(fail, (error,), start_method="fork")
    assert user_error(raised.value) == str(error)
