"""Where a number comes from: hardware, versions, commit and command. The machine's host, user and folders are not recorded."""

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("lightning", "lit-linformer")
# The folders of an absolute path: /home/someone/texts/ of /home/someone/texts/a.txt. Not those of a URL, nor a/b.
_ABSOLUTE = re.compile(r"(?<![\w.:/~…*?-])~?/(?:[^\s,/'\"`|]+/)+")


def environment(device: str = "cpu") -> dict[str, Any]:
    """Hardware, versions and, if this is a git checkout, the commit."""
    import torch

    found = {"hardware": hardware(device), **({} if device == "cpu" else {"cpu": cpu()}), "cores": cores()}
    found |= {"threads": torch.get_num_threads(), **versions()}
    return {**found, "commit": head} if (head := commit()) else found


def hardware(device: str) -> str:
    """The GPU and its memory, or the processor."""
    if not device.startswith("cuda"):
        return cpu()
    import torch

    here = torch.cuda.get_device_properties(device)
    return f"{here.name}, {here.total_memory / 2**30:.0f} GiB"


def cpu() -> str:
    with contextlib.suppress(OSError):
        if found := re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8")):
            return found[1]
    return platform.processor() or platform.machine()


def lacks_bfloat16() -> bool:
    """Whether this is an x86 processor without units for bfloat16: torch then computes it far more slowly than float32."""
    import torch

    can: dict = getattr(torch.cpu, "get_capabilities", dict)()  # not every torch has it
    units = "avx512_bf16", "amx_bf16", "avx_ne_convert"
    return can.get("architecture") == "x86_64" and not any(can.get(unit) for unit in units)


def cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def process_memory(key: str) -> int:
    """Resident memory of this process in bytes: now (VmRSS) or at its peak (VmHWM). OSError if the system does not say."""
    if found := re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE):
        return int(found[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")


def machine_memory() -> int:
    """This machine's memory in bytes, on Linux."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def give_memory_back() -> None:
    """Returns freed memory that glibc keeps to the system; other C libraries are left alone."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def versions() -> dict[str, str]:
    """Versions of Python and packages; torch.__version__ names the build, as in 2.14.1+cu130, its package's version may not."""
    import torch

    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if "lit-linformer" not in found:  # run.py works without installing the project
        with contextlib.suppress(OSError):
            text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
            found |= re.findall(r'^name = "(lit-linformer)"\nversion = "(.+)"$', text, re.MULTILINE)
    return found


def commit() -> str:
    """The commit of this checkout, with -dirty if a file differs from it; "" without git or a repository."""
    head = _git("rev-parse", "--short", "HEAD")
    return head and head + ("-dirty" if _git("status", "--porcelain") else "")


def _git(*words: str) -> str:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return ""
    # No lock: a status must not block a commit that is made at the same time.
    command = ["git", "--no-optional-locks", "-C", str(ROOT), *words]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    return ""


def run_command() -> list[str]:
    """What starts a command of this project in a new process: the path of run.py, as a user types it, or the package."""
    script = ROOT / "run.py"
    if not script.is_file():
        return [sys.executable, "-m", "lit_linformer"]
    return [sys.executable, os.path.relpath(script) if script.is_relative_to(Path.cwd()) else str(script)]


def typed() -> str:
    """How the user's next command line begins, from the folder that this one was started in."""
    script = Path(sys.argv[0])
    if script.name == "lit-linformer":
        return script.name
    if script.match("lit_linformer/__main__.py"):
        return "python -m lit_linformer"
    return f"python {shlex.quote(sys.argv[0])}" if script.name == "run.py" else "python run.py"


def command_line(argv: list[str]) -> str:
    """`python run.py …` as it was typed, without the machine's folders."""
    return without_folders(shlex.join(["python", "run.py", *argv]))


def without_folders(text: str) -> str:
    """Makes absolute paths below the working directory relative; others keep only the last part: …/texts."""
    here = rf"(?<![\w.~/-]){re.escape(str(Path.cwd()))}/"
    return _ABSOLUTE.sub("…/", re.sub(here, "", text))
