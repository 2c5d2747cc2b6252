"""Where a number comes from: a commit if there is one, and no path of the machine."""

import importlib.metadata
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lit_linformer.utils import environment

ROOT = Path(__file__).parents[2]


def test_environment_fails_gracefully_without_git_or_repository(tmp_path, monkeypatch):
    if (ROOT / ".git").exists() and shutil.which("git"):  # false in an unpacked archive, or without git
        head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout
        assert environment.commit().removesuffix("-dirty") == head.strip()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.commit() == "" and "commit" not in environment.environment()
    monkeypatch.undo()
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    assert environment.commit() == "" and environment.environment()["threads"] == torch.get_num_threads()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--data.source /home/someone/texts/a.txt", "--data.source …/a.txt"),
        ("--data.source=/home/texts/ --x", "--data.source=…/ --x"),
        ("'/a/b' ~/c/d [/e/f,/g/h]", "'…/b' …/d […/f,…/h]"),
        ("and/or 1/2 ../a/b ./a/b runs/a/b https://example.org/a/b a / b", None),
    ],
)
def test_folders_of_the_machine_are_left_out(text, expected):
    assert environment.without_folders(text) == (text if expected is None else expected)
    assert environment.without_folders(f"see {Path.cwd()}/runs/a") == "see runs/a"
    assert environment.without_folders(f"/mnt{Path.cwd()}/texts") == "…/texts"


def test_commands_start_by_run_py_or_as_a_package(tmp_path, monkeypatch):
    """Installed from a wheel there is no run.py."""
    monkeypatch.chdir(environment.ROOT)
    assert environment.run_command() == [sys.executable, "run.py"]
    monkeypatch.chdir(tmp_path)
    assert environment.run_command() == [sys.executable, str(environment.ROOT / "run.py")]
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    assert environment.run_command() == [sys.executable, "-m", "lit_linformer"]


@pytest.mark.parametrize(
    ("started", "next_begins"),
    [
        ("run.py", "python run.py"),
        ("../a folder/run.py", "python '../a folder/run.py'"),
        ("/usr/bin/lit-linformer", "lit-linformer"),
        ("/usr/lib/lit_linformer/__main__.py", "python -m lit_linformer"),
        ("/usr/lib/pytest/__main__.py", "python run.py"),
        ("", "python run.py"),
    ],
)
def test_the_next_command_begins_as_this_one_did(started, next_begins, monkeypatch):
    monkeypatch.setattr(sys, "argv", [started])
    assert environment.typed() == next_begins


@pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() != "x86_64" or not hasattr(torch.cpu, "get_capabilities"),
    reason="for x86 processors, whose flags stand in /proc/cpuinfo, and a torch that asks them",
)
def test_units_for_bfloat16_are_those_that_the_system_names():
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    assert environment.lacks_bfloat16() != any(flag in flags for flag in ("avx512_bf16", "amx_bf16", "avx_ne_convert"))


def test_a_clone_that_is_not_installed_knows_its_version(tmp_path, monkeypatch):
    told = environment.versions()["lit-linformer"]

    def version(name, real=importlib.metadata.version):
        if name == "lit-linformer":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert environment.versions()["lit-linformer"] == told
    monkeypatch.setattr(environment, "ROOT", tmp_path)  # only the package folder, copied into another project
    assert "lit-linformer" not in environment.versions()
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "theirs"\nversion = "3"\n')
    assert "lit-linformer" not in environment.versions()
