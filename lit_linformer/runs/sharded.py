"""Sharded checkpoints: a folder with a file for each process, in the format of torch.distributed.checkpoint.

Their `.metadata` is a pickle, and so are the plain values beside the tensors. torch reads both with pickle.load, which runs
any code in them. Here none runs: `.metadata` may name only the few classes it needs, and values are read with weights_only.
"""

import io
import json
import os
import pickle
import zipfile
import zlib
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from lit_linformer.utils import compat

META = "meta.pt"  # everything but weights and AdamW's state
METADATA = ".metadata"  # which tensor is where
CHECKSUMS = "checksums.json"  # of .metadata; the other files hold torch's own, one for each tensor
DAMAGED = "the checksum of {} does not fit: it is damaged"
# Classes that a .metadata may name, those of torch 2.9 to 2.15.
CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},  # from a name to a layout
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},  # as Python 3.13 calls them
    "collections": {"OrderedDict"},
}  # fmt: skip


def _member(kind: Any, name: Any) -> Enum:
    """Stands in for getattr, with which Python 3.11.0 to 3.11.3 pickle a member of an Enum; does nothing else."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"{METADATA} asks for {name} of {kind}")
    return kind[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # A name with dots would lead from a class to whatever it can reach.
        if name in CLASSES.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"{METADATA} names {module}.{name}")


def is_sharded(path: Path) -> bool:
    return (path / META).is_file() or (path / METADATA).is_file()


def read_metadata(folder: Path) -> Metadata:
    """Which tensor is where. Runs no code.

    Raises pickle.UnpicklingError for objects that a checkpoint does not need, OSError or ValueError for damaged files.
    """
    content = (folder / METADATA).read_bytes()
    if (folder / CHECKSUMS).is_file():  # older checkpoints have none
        if json.loads((folder / CHECKSUMS).read_text(encoding="utf-8")).get(METADATA) != zlib.crc32(content):
            raise ValueError(DAMAGED.format(METADATA))
    try:
        metadata = _Unpickler(io.BytesIO(content)).load()
        names = {part.relative_path for part in metadata.storage_data.values()}
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # a damaged pickle fails in many ways
        raise ValueError(f"{METADATA} cannot be read ({error})") from error
    if outside := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
        raise ValueError(f"{METADATA} names {outside[0]!r}, which is no file of this folder")
    if missing := {name for name in names if not (folder / name).is_file()}:
        raise ValueError(f"it lacks {min(missing)} ({len(missing)} of its files in all)")
    return metadata


def write_checksums(folder: Path) -> None:
    """To be called after everything else is written; also syncs the files that torch does not."""
    (folder / CHECKSUMS).write_text(json.dumps({METADATA: zlib.crc32((folder / METADATA).read_bytes())}) + "\n")
    for name in (META, METADATA, CHECKSUMS):
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())


class Reader(FileSystemReader):
    """torch's reader, without its pickle.load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _WeightsOnly:
    """Reads plain values with torch.load's weights_only."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        # torch's own would unpickle anything: it gets only the value, written anew by torch.save.
        found, clean = torch.load(value, map_location="cpu", weights_only=True), io.BytesIO()
        torch.save(found, clean)
        clean.seek(0)
        super().load_bytes(read_item, clean)  # type: ignore[misc]  # the planner's beside it


class Planner(_WeightsOnly, DefaultLoadPlanner):
    """Reads into existing tensors."""


class _WholePlanner(_WeightsOnly, compat.EmptyStateDictLoadPlanner):
    """Reads everything."""


def check_sharded(folder: Path) -> dict[str, Any]:
    """What a sharded checkpoint holds besides tensors; raises ValueError or OSError if a part of it is missing."""
    read_metadata(folder)
    return torch.load(folder / META, map_location="cpu", weights_only=True)


def verify_sharded(folder: Path) -> None:
    """Reads the whole checkpoint once; raises ValueError if anything is not as it was written."""
    verify_plain(folder / META)
    files: dict[str, list[Any]] = {}
    for part in read_metadata(folder).storage_data.values():
        files.setdefault(part.relative_path, []).append(part)
    for name, parts in files.items():
        with open(folder / name, "rb") as file:
            for part in parts:
                file.seek(part.offset)
                verify_plain(io.BytesIO(file.read(part.length)), name)


def verify_plain(file: Path | io.BytesIO, name: str = "") -> None:
    """Checks the CRC-32 of each tensor, which torch.save writes and torch.load ignores; raises ValueError if one is wrong.

    A file of 500 MB takes 0.2 s (two shared cores of an AMD EPYC, read from memory), a tenth of what writing it takes.
    """
    try:
        with zipfile.ZipFile(file) as content:
            damaged = content.testzip()
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, zlib.error) as error:  # flipped bits in a header
        raise ValueError(f"{name or 'it'} is damaged ({error})") from error
    if damaged is not None:
        raise ValueError(DAMAGED.format(f"{name}: {damaged}" if name else damaged))


def load_sharded(folder: Path) -> dict[str, Any]:
    """The plain checkpoint equivalent to a sharded one, in memory."""
    checkpoint = check_sharded(folder)
    tensors: dict[str, Any] = {}
    try:
        compat.load_state_dict(tensors, storage_reader=Reader(folder), planner=_WholePlanner(), no_dist=True)
    except CheckpointException as error:  # wraps the actual error, with its whole traceback
        raise next(iter(error.failures.values()))[0] from error
    checkpoint["state_dict"] = tensors.pop("state_dict")
    optimizers = [tensors[name] for name in sorted(tensors) if name.startswith("optimizer_")]
    checkpoint["optimizer_states"] = [_by_number(optimizer) for optimizer in optimizers]
    return checkpoint


def _by_number(optimizer: dict[str, Any]) -> dict[str, Any]:
    """An optimiser's state with its parameters numbered, as in torch.optim, instead of named."""
    groups: list[dict[str, Any]] = []
    names: list[str] = []
    for group in optimizer["param_groups"]:
        groups.append({**group, "params": list(range(len(names), len(names) + len(group["params"])))})
        names += group["params"]
    return {"state": {names.index(name): state for name, state in optimizer["state"].items()}, "param_groups": groups}
