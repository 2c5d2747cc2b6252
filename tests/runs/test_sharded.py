"""Sharded checkpoints: read without executing what they contain, and every byte of them checked."""

import io
import json
import os
import pickle
import shutil
import warnings
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load, metadata, save

from lit_linformer.runs import sharded
from lit_linformer.runs.checkpoints import check_checkpoint, find_checkpoint, unknown_classes
from lit_linformer.runs.record import RunRecord
from lit_linformer.runs.sharded import CHECKSUMS, META, METADATA, Planner, Reader, load_sharded, read_metadata, write_checksums
from tests.helpers import assert_same, disk_calls

STATE = {
    "state_dict": {"net.a": torch.arange(300, dtype=torch.float32), "net.b": torch.ones(7, 5, dtype=torch.bfloat16)},
    "optimizer_0": {
        "state": {"net.a": {"step": torch.tensor(3.0), "exp_avg": torch.arange(300.0)}},
        "param_groups": [{"params": ["net.a"], "lr": 0.1, "betas": (0.9, 0.98), "name": "decay"}],
    },
}


def write(folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not distributed
        save(STATE, checkpoint_id=folder, no_dist=True)
    torch.save({"global_step": 5, "epoch": 0}, folder / META)
    write_checksums(folder)
    return folder


def test_what_torch_leaves_to_the_kernel_is_synced(tmp_path, monkeypatch):
    calls = disk_calls(monkeypatch)
    write(tmp_path / "last.ckpt")
    assert calls[-3:] == [f"sync {name}" for name in (META, METADATA, CHECKSUMS)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write(tmp_path_factory.mktemp("sharded") / "last.ckpt")


@pytest.fixture
def folder(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "checkpoints/last.ckpt"))


class Evil:
    """Makes a folder when it is unpickled in torch's way."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_reads_what_torch_wrote(folder):
    checkpoint = load_sharded(folder)
    assert_same(checkpoint["state_dict"], STATE["state_dict"])
    (optimizer,) = checkpoint["optimizer_states"]
    assert_same(optimizer["state"][0], STATE["optimizer_0"]["state"]["net.a"])
    assert optimizer["param_groups"] == [{"params": [0], "lr": 0.1, "betas": (0.9, 0.98), "name": "decay"}]
    assert checkpoint["global_step"] == 5
    assert RunRecord(folder.parents[1]).status() == "stopped at step 5"


def test_reads_into_tensors_that_are_there(folder):
    state = {"state_dict": {name: torch.zeros_like(tensor) for name, tensor in STATE["state_dict"].items()}}
    load(state, storage_reader=Reader(folder), planner=Planner(), no_dist=True)
    assert_same(state["state_dict"], STATE["state_dict"])


@pytest.mark.parametrize("place", ["metadata", "value"])
def test_code_in_a_pickle_is_not_run(place, folder, tmp_path):
    target = tmp_path / "executed"
    if place == "metadata":
        (folder / METADATA).write_bytes(pickle.dumps(Evil(target)))
    else:  # in the place of a plain value
        metadata = read_metadata(folder)
        index = next(index for index in metadata.storage_data if index.fqn.endswith("name"))
        torch.save(Evil(target), file := folder / "evil.distcp")
        metadata.storage_data[index].relative_path = file.name
        metadata.storage_data[index].offset, metadata.storage_data[index].length = 0, file.stat().st_size
        (folder / METADATA).write_bytes(pickle.dumps(metadata))
    (folder / "checksums.json").unlink()
    with pytest.raises(ValueError, match="holds other objects than weights and plain values: they are not loaded") as raised:
        check_checkpoint(folder)
    assert "\n" not in str(raised.value) and not target.exists()
    if place == "metadata":
        with pytest.raises(FileExistsError if target.exists() else Exception):  # torch's own reader does run it
            FileSystemReader(folder).read_metadata()
        assert target.exists()


class ByName:
    """Pickled as Python 3.11.0 to 3.11.3 pickles an Enum member: by getattr."""

    def __init__(self, kind, name):
        self.kind, self.name = kind, name

    def __reduce__(self):
        return getattr, (self.kind, self.name)


def test_a_member_of_an_enum_by_its_name_is_read_and_nothing_else_by_a_name():
    def read(kind, name):
        return sharded._Unpickler(io.BytesIO(pickle.dumps(ByName(kind, name)))).load()

    encoding = metadata._MEM_FORMAT_ENCODING
    member = next(iter(encoding))
    assert read(encoding, member.name) is member
    for kind, name in ((torch.Size, "__mro__"), (encoding, "__subclasses__")):
        with pytest.raises((pickle.UnpicklingError, KeyError)):
            read(kind, name)


@pytest.mark.parametrize(
    ("module", "name"),
    [("torch.nn", "Linear"), ("builtins", "eval"), ("torch", "load"), ("torch.distributed.checkpoint.metadata", "os.system")],
)
def test_other_classes_are_refused(module, name, folder):
    words = (b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name))
    (folder / METADATA).write_bytes(b"\x80\x04" + b"".join(words) + b"\x93.")
    (folder / "checksums.json").unlink()
    with pytest.raises(pickle.UnpicklingError, match="names "):
        read_metadata(folder)


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "a/b"])
def test_files_outside_of_the_folder_are_not_opened(path, folder):
    metadata = read_metadata(folder)
    next(iter(metadata.storage_data.values())).relative_path = path
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    (folder / "checksums.json").unlink()
    with pytest.raises(ValueError, match="which is no file of this folder"):
        check_checkpoint(folder)


def test_flipped_bytes_anywhere_are_noticed(whole, folder):
    for file in sorted(whole.iterdir()):
        content = file.read_bytes()
        for place in sorted({len(content) * part // 7 for part in range(7)} | {len(content) - 1}):
            damaged = bytearray(content)
            damaged[place] ^= 0xFF
            (folder / file.name).write_bytes(damaged)
            try:
                checkpoint = check_checkpoint(folder)
            except ValueError:
                continue
            # Not noticed: then no value has changed (it was alignment padding, for example).
            assert_same(checkpoint["state_dict"], STATE["state_dict"])
            assert_same(checkpoint["optimizer_states"][0]["state"][0], STATE["optimizer_0"]["state"]["net.a"])
            assert checkpoint["global_step"] == 5
        (folder / file.name).write_bytes(content)
    assert check_checkpoint(folder)["global_step"] == 5


def test_a_flipped_tensor_is_noticed_before_it_is_read(folder, capsys):
    metadata = read_metadata(folder)
    part = next(part for index, part in metadata.storage_data.items() if index.fqn == "state_dict.net.a")
    file = folder / part.relative_path
    content = bytearray(file.read_bytes())
    start = content.find(torch.arange(5, 9, dtype=torch.float32).numpy().tobytes(), part.offset)
    content[start] ^= 1
    file.write_bytes(content)
    write(folder.parent / "previous.ckpt")
    assert find_checkpoint(folder.parents[1], "last") == folder.parent / "previous.ckpt"
    assert "the checksum of __0_0.distcp: " in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"which is no longer what was written: the checksum of __0_0.distcp"):
        check_checkpoint(folder)


def test_what_would_not_be_loaded_is_found_when_it_is_saved(folder):
    assert unknown_classes(folder) == []
    torch.save({"callbacks": {"Own": {"share": Fraction(1, 3)}}}, folder / META)
    assert unknown_classes(folder) == ["fractions.Fraction"]


@pytest.mark.parametrize("name", ["__0_0.distcp", META, METADATA])
def test_a_missing_or_cut_off_part(name, folder):
    for cut in (lambda path: path.write_bytes(path.read_bytes()[:-40]), Path.unlink):
        cut(folder / name)
        with pytest.raises(ValueError, match=r"^ckpt_path is .*last.ckpt, which is "):
            check_checkpoint(folder)


def test_one_of_before_the_checksums_is_read(folder):
    (folder / "checksums.json").unlink()
    assert check_checkpoint(folder, whole=False)["global_step"] == 5
    assert json.dumps(load_sharded(folder)["optimizer_states"][0]["param_groups"])
