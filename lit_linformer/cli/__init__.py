"""The command line: `python run.py COMMAND --KEY VALUE …`, with the commands below.

The only package that uses jsonargparse. A setting is `--model.lr 1e-3` on the command line and `model: {init_args: {lr: 1e-3}}`
in a file; a later --config overrides an earlier one, the command line overrides all, and `${name}` in a file takes another
setting's value.
"""

import atexit
import errno
import gc
import importlib
import io
import multiprocessing
import os
import re
import signal
import sys
import sysconfig
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lit_linformer.utils.errors import UserError, meant, user_error
from lit_linformer.utils.signals import START_METHOD, Stopped, check_ranks, is_first_process, is_gone, requeue, watch

COMMANDS = {
    "fit": "train, and validate on the way",
    "validate": "perplexity, or the task's scores, on the validation split",
    "test": "the same on the test split; leaves GLUE's submission file",
    "predict": 'fill the masks of --data.text "…" or --data.file FILE, or classify it',
    "prepare": "make the tokenizer and the token files ahead of fit; trains nothing",
    "grid": "many runs and one table of them: --config conf/paper/table2.yaml",
    "tune": "search for better settings with Optuna: --config … --space conf/tune/lr.yaml",
    "benchmark": "time and memory against n and k: Table 3 and figure 2 of the paper",
    "spectrum": "singular values of trained runs' attention, the paper's figure 1: --run runs/small",
    "report": "one page, Markdown and HTML, of what was measured, beside the paper's values",
    "export": "a trained model as safetensors, for Hugging Face, ONNX or torch.export",
    "convert": "RoBERTa, BERT and DistilBERT in; a Transformer to a Linformer; a longer n",
    "embed": "texts as vectors, .npy or Parquet, for search and clustering",
    "draw": "a Linformer's attention for a text: what each slot reads, and who reads it",
    "list": "configs and what they cost, runs and their best numbers, attentions, tasks, …",
}
CALLED = {"train": "fit", "pretrain": "fit", "finetune": "fit", "resume": "fit", "evaluate": "validate", "eval": "validate"}
LIGHTNING = ("fit", "validate", "test", "predict", "prepare")
# The other commands' modules, each with main(argv): they parse their own settings and print help without importing torch.
PROGRAMS = {name: f"lit_linformer.studies.{name}.command" for name in ("grid", "benchmark", "spectrum", "report")}
PROGRAMS |= {name: f"lit_linformer.{name}.command" for name in ("export", "convert")}
PROGRAMS |= {name: f"lit_linformer.studies.{name}" for name in ("embed", "draw")}
PROGRAMS |= {"tune": "lit_linformer.cli.tune", "list": "lit_linformer.cli.listing"}
HELP = {"-h", "--help", "--help_all"}
# Of OSErrors, the user's:
MISTAKES = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
MAIN_HELP = """usage: python run.py COMMAND --config FILE [--config OVERLAY …] [--SETTING VALUE …]

{commands}

A first curve in minutes on a CPU, from text that comes with Python; a change of your own; continuing an interrupted run:
  python run.py fit --config conf/quickstart.yaml
  python run.py fit --config conf/quickstart.yaml --name idea --model.encoder.projection_dim 32
  python run.py fit --config conf/quickstart.yaml --ckpt_path last

The model that comes with the project, fine-tuned on a task of GLUE:
  python run.py fit --config conf/finetune/sst2.yaml --config conf/finetune/small.yaml

A command's most often changed settings, with the values of the configs that are given (--help_all: all settings):
  python run.py fit --config conf/quickstart.yaml --help

All configs, your runs, and what a setting may name:
  python run.py list

Add --traceback to any command to see where an error came from.
"""


def main(argv: list[str] | None = None) -> None:
    """Runs a command; an error becomes one line on stderr and exit status 2, but a bug of ours keeps its traceback.

    Exit status 74 (os.EX_IOERR): the machine failed, not the settings, as with a full disk; `tune` tries such a trial again.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    _open_standard_streams()
    warnings.showwarning = _show_warning
    if START_METHOD and multiprocessing.get_start_method(allow_none=True) is None:
        # For workers of a user's own DataLoader. With Python 3.14's default all that they are given is pickled, which may be
        # the data module, and with it the Trainer.
        multiprocessing.set_start_method(START_METHOD)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding.lower() not in ("utf-8", "utf8"):
        sys.stdout.reconfigure(errors="backslashreplace")  # an arrow must not crash a command in an ASCII locale
    show_traceback = "--traceback" in argv
    threading.excepthook = threading.__excepthook__ if show_traceback else _show_thread_error
    argv = [word for word in argv if word != "--traceback"]
    if not argv or argv[0] in ("-h", "--help"):
        print(MAIN_HELP.format(commands="\n".join(f"  {name:<10}{what}" for name, what in COMMANDS.items())), end="")
        return
    try:
        if sys.platform == "win32":
            raise UserError("commands need file locks and signals that Windows lacks", "Linux, in WSL too (wsl --install)")
        if (here := _here()) not in sys.path:  # so that class paths find the user's files; last, so that none shadows a package
            sys.path.append(here)
        check_ranks()
        if argv[0] not in LIGHTNING:
            _program(argv[0])(argv[1:])
            sys.stdout.flush()  # so that a reader that is gone is noticed here, not at Python's exit
            return
        watch.begin(argv[0])
        if HELP & set(argv):
            print(_help(argv), end="", flush=True)
            return
        from lit_linformer.cli.quick_checks import check_quickly

        check_quickly(argv)
        _app()(argv)
    except Stopped:  # the handlers stay, so that a second Ctrl-C also cuts the interpreter's shutdown short
        if watch.received == signal.SIGUSR1 and not watch.training and is_first_process():
            requeue()
        raise
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        sys.exit(130)
    except Exception as error:
        # As before `| head`; a BrokenPipeError may also come from another pipe.
        if isinstance(error, BrokenPipeError) and (argv[0] in PROGRAMS or HELP & set(argv)) and is_gone(sys.stdout.fileno()):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        message = None if show_traceback else _message(error)
        if message is None:
            raise
        if argv[0] in PROGRAMS:
            message = _as_typed(message, argv)
        if is_first_process() or not getattr(error, "of_all_processes", False):
            print(f"error: {message}", file=sys.stderr)
        machine = isinstance(error, OSError) and not isinstance(error, MISTAKES) and error.errno != errno.ENAMETOOLONG
        sys.exit(os.EX_IOERR if machine else 2)


def _here() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise UserError("the current folder has been deleted", "one that exists: cd there first") from error


def _open_standard_streams() -> None:
    """Replaces closed standard streams (`>&-`, daemons): else the next file opened gets number 2, and warnings go into it."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            if getattr(sys, name) is None:
                setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))


def _app() -> Callable[[list[str]], Any]:
    """Imports the training code without garbage collection, which would find nothing and take a sixth of the time."""
    gc.disable()
    try:
        from lit_linformer.cli.app import run
    finally:
        gc.freeze()  # saves a second at Python's exit, too
        gc.enable()
        atexit.register(_thaw)
    return run


def _thaw() -> None:
    """Unfreezes at exit: the triton of torch 2.15 and later reports what is still frozen as leaked, in forty lines."""
    if "triton" in sys.modules and sys.modules["torch"].__version__ >= "2.15":
        gc.unfreeze()


def _help(argv: list[str]) -> str:
    from lit_linformer.cli.short_help import Unreadable, short_help

    note = ""
    if "--help_all" not in argv:
        try:
            return short_help(argv)
        except Unreadable as error:  # the parser imports it, or says why it cannot
            note = f"{error}: no file of that name was found to read, so these are all settings, with their defaults.\n\n"
    from lit_linformer.cli.help import settings_help

    return note + settings_help(argv)


def _program(name: str) -> Callable[[list[str]], None]:
    """main(argv) of a command's module: one of PROGRAMS, or a module of the user's."""
    own = name not in COMMANDS and not name.startswith(".") and ("." in name or os.path.isfile(f"{name}.py"))
    if name in PROGRAMS or own:
        try:
            return importlib.import_module(PROGRAMS.get(name, name)).main
        except (ModuleNotFoundError, AttributeError, TypeError) as error:
            if not own or getattr(error, "name", None) not in (name, name.partition(".")[0], "main"):
                raise  # something that the module imports is missing
    allowed = f"{', '.join(COMMANDS)}, or a module of yours with main(argv)"
    if name.startswith("-"):
        raise UserError(f"{name} stands before the command", f"after it; commands are {allowed}")
    raise UserError(f"the command is {name!r}{meant(CALLED.get(name, name), COMMANDS)}", allowed)


def _show_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
    """Prints a warning on one line, without the source line that raised it."""
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr, flush=True)


def _show_thread_error(failed: threading.ExceptHookArgs) -> None:
    """Prints one line if a full disk ends TensorBoard's thread: the command then ends as well, with a message of its own."""
    if isinstance(failed.exc_value, OSError):
        print(f"warning: a thread has ended: {failed.exc_value}", file=sys.stderr, flush=True)
    else:
        threading.__excepthook__(failed)


def _as_typed(message: str, argv: list[str]) -> str:
    """For commands with their own settings: data.source in a message becomes source if that was typed."""
    typed = [word.removeprefix("--").partition("=")[0] for word in argv if word.startswith("--")]
    return re.sub(r"\bdata\.(\w+)", lambda found: found[found[1] in typed], message)


def _message(error: Exception) -> str | None:
    """One line for an error that a user can fix; None for what looks like a bug of ours, whose traceback is worth more."""
    if (told := user_error(error)) is not None:
        return told  # before Lightning is imported below
    try:
        from lightning.fabric.utilities.exceptions import MisconfigurationException

        from lit_linformer.cli.failures import connection_error
    except ModuleNotFoundError as missing:
        return (
            f"{sys.executable} lacks the package {missing.name}; allowed: the Python of the environment in which "
            "`pip install -c constraints.txt -e .` was run"
        )
    if line := connection_error(error):
        return line
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if isinstance(error, ValueError | OSError | MisconfigurationException | ModuleNotFoundError):
        line = " ".join(str(error).split())
        return f"{line}{_place(error)}" if line else None
    return None


def _place(error: Exception) -> str:
    """The line of the user's own code in which an error arose, itself or in a library it called; "" if it arose elsewhere."""
    ours = Path(__file__).resolve().parents[1]
    installed = [Path(folder).resolve() for folder in {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values()}]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename).resolve()
        if file.is_relative_to(ours):
            return ""
        if file.is_file() and not any(file.is_relative_to(folder) for folder in installed):
            return f" ({frame.filename}, line {frame.lineno}; --traceback shows more)"
    return ""
