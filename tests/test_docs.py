"""Commands and code of README.md and docs/, as written: run on a model shrunk by what a test appends.

A ``bash`` block is run, after README's ``fit``s; an ``sh`` block (several GPUs, hours, the reader's own files) is parsed.
``python`` runs by itself, ``py`` with what the page's commands have left.
"""

import os
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest

from lit_linformer.cli import PROGRAMS, tune
from lit_linformer.convert.command import SETTINGS as CONVERT
from lit_linformer.studies.benchmark import layers, lengths, training
from lit_linformer.studies.tune.space import read_space
from lit_linformer.utils.arguments import parse
from tests.data.finetuning.glue import write_glue
from tests.helpers import inside, output, run_forked, slow, write_corpus
from tests.test_conf import SHRINK

ROOT = Path(__file__).parents[1]
INDEX = (ROOT / "docs/README.md").read_text(encoding="utf-8")
PAGES = ["README.md", *(f"docs/{name}" for name in re.findall(r"^\| \[(\w+\.md)\]", INDEX, re.MULTILINE) if name != "LOG.md")]
TEXT = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}


def blocks(page, language):
    """Skips excerpts of the package, which begin with their file's name."""
    return re.findall(rf"```{language}\n(?!# lit_linformer/)(.*?)```", TEXT[page], re.DOTALL)


def commands(page, language="bash"):
    """Arguments of run.py."""
    parts = [part for block in blocks(page, language) for line in block.splitlines() for part in line.split("&&")]
    return [shlex.split(part.partition("run.py ")[2], comments=True) for part in parts if "run.py " in part]


def trains(command):
    return command[0] == "fit" and "--help" not in command


def check(command, folder, cache):
    """Runs it in the working directory, made small; it must succeed."""
    extra = []
    if command[0] == "benchmark":
        extra = "--hidden_size 32 --num_heads 2 --num_layers 1 --tokens 2048 --rounds 1 --memory false".split()
    elif "--help" not in command and command[0] not in PROGRAMS:
        extra = ["--data.cache_dir", str(cache)]
        if "finetune" in command[2]:
            extra += ["--trainer.max_epochs", "1", "--trainer.accelerator", "cpu"]
        elif "convert" in command[2]:
            extra += ["--trainer.max_steps", "2", "--trainer.val_check_interval", "2", "--data.validation_fraction", "0.1"]
            extra += ["--data.source", "texts/text.txt"]
        elif "--model.pretrained" in command:  # it determines the encoder's settings
            extra += ["--trainer.max_steps", "2", "--trainer.val_check_interval", "2", "--data.validation_fraction", "0.1"]
            extra += ["--model.warmup_steps", "1", "--data.batch_size", "2", "--data.global_batch_size", "null"]
        elif command[0] == "fit" and command[2].startswith("runs/"):
            extra += ["--trainer.max_steps", "2", "--trainer.val_check_interval", "2", "--model.warmup_steps", "1"]
        elif command[2].startswith("conf/"):
            extra += [*SHRINK, *([] if "--data.source" in command else ["--data.source", "texts/text.txt"])]
    log = folder / "out.txt"
    assert run_forked([*command, *extra], log) == 0, (command, log.read_text())


@pytest.fixture(scope="module")
def trained(tmp_path_factory, cache):
    """A folder in which README's models were trained, with a text and a task."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("conf", "models"):
        os.symlink(ROOT / name, folder / name)
    (folder / "texts").mkdir()
    write_corpus(folder / "texts/text.txt")
    write_glue(folder / "glue", "SST-2")
    reviews = [f'"so {word}, we saw",{word}\n' for word in ("bad", "good") * 30]
    for name in ("reviews.csv", "new.csv"):
        (folder / name).write_text("".join(["text,label\n", *reviews]))
    news = [f"the {a} of the {b},{a}|{b}\n" for a in ("sport", "law", "money") for b in ("law", "money")]
    (folder / "news.csv").write_text("".join(["text,label\n", *news * 10]))
    (folder / "questions.csv").write_text('id,question\n1,"Return the <mask>, then go."\n2,Why?\n')
    fits = [command for command in commands("README.md") if trains(command)]
    assert len(fits) >= 4 and fits[0] == ["fit", "--config", "conf/quickstart.yaml"]
    with inside(folder):
        for command in fits:
            check(command, folder, cache)
    return folder


@pytest.mark.parametrize(
    "page",
    [
        page if page == "README.md" else slow(page)  # their commands have tests of their own
        for page in PAGES
        if any(blocks(page, kind) for kind in ("bash", "python", "py"))
    ],
)
def test_every_command_runs(page, trained, cache, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for command in commands(page):
        if page != "README.md" or not trains(command):
            check(command, tmp_path, cache)
    for code in blocks(page, "python") + blocks(page, "py"):
        exec(compile(code, page, "exec"), {"__name__": page})


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "sh")])
def test_what_cannot_be_run_is_parsed(page, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    parsed = {"fit": "--print_config", "prepare": "--print_config", "grid": "--print_commands=true"}
    for command in dict.fromkeys(map(tuple, commands(page, "sh"))):
        if command[:3] == ("benchmark", "--what", "training"):
            assert parse(command[0], "", training.SETTINGS, list(command[1:]))["scaling"]
            continue
        if command[:3] == ("benchmark", "--what", "lengths"):
            assert parse(command[0], "", lengths.SETTINGS, list(command[1:]))["source"]
            continue
        if command[0] == "convert":
            assert Path(parse(command[0], "", CONVERT, list(command[1:]))["from"]).is_dir()
            continue
        if command[0] == "benchmark" and "--what" not in command:
            assert layers.read_settings(list(command[1:]))["models"]
            continue
        if command[0] == "tune":
            given = parse(command[0], "", tune.SETTINGS, list(command[1:]))
            assert read_space(Path(given["space"]), given["name"], given["trials"]).axes and Path(given["config"][0]).is_file()
            continue
        shown = output([*command, parsed[command[0]]], tmp_path)
        assert "conf/trainer/ddp" not in " ".join(command) or "find_unused_parameters: false" in shown
    scripts = [line.split() for block in blocks(page, "sh") for line in block.splitlines() if "scripts/" in line]
    for line in scripts:
        path = next(word for word in line if word.startswith("scripts/"))
        code = (ROOT / path).read_text(encoding="utf-8")
        after = line[line.index(path) :]
        assert path.endswith(".sh") or all(f'"{word}"' in code for word in after if word.startswith("--")), line
    assert scripts or commands(page, "sh")


def test_two_install_commands_are_the_ones_that_ci_runs():
    installs = [line for block in blocks("README.md", "bash") for line in block.splitlines() if line.startswith("pip install")]
    assert len(installs) == 2 and all(line.startswith("pip install -c constraints.txt") for line in installs)
    ci = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert "grep -E '^pip install -c constraints.txt' README.md" in ci and 'bash -euo pipefail -c "${commands[$number]}"' in ci


def test_readme_names_the_versions_that_pip_accepts_and_the_workflow_tests():
    readme = TEXT["README.md"]
    first, last = re.search(r"Python environment \((3\.\d+) to (3\.\d+)\)", readme).groups()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == f">={first}"
    assert f'python-version: ["{first}", "{last}"]' in (ROOT / ".github/workflows/ci.yaml").read_text(encoding="utf-8")
    lowest, newest = re.search(r"another torch \((2\.\d+) to (2\.\d+)\)", readme).groups()
    too_new = f"2.{int(newest.removeprefix('2.')) + 1}"
    assert f"torch>={lowest},<{too_new}" in project["dependencies"]


def test_readme_is_short_and_the_index_is_complete():
    assert TEXT["README.md"].count("\n") <= 150
    told = {Path(page).name for page in PAGES} | {"LOG.md"}  # README.md is both the README and the index
    assert {path.name for path in (ROOT / "docs").glob("*.md")} == told


def test_paths_and_links_lead_somewhere():
    pages = [*PAGES, "docs/README.md", "docs/LOG.md", "CONTRIBUTING.md", "CHANGELOG.md"]
    for page in pages:
        text = (ROOT / page).read_text(encoding="utf-8")
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert ((ROOT / page).parent / link).exists(), (page, link)
    for page, text in TEXT.items():
        for path in re.findall(r"`((?:conf|lit_linformer|scripts|docs|tests|examples)/[\w/.]+?)/?`", text):
            assert (ROOT / path).exists(), (page, path)


def headings(page):
    """The anchors that GitHub gives a page's headings."""
    titles = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_to_headings_find_them():
    checked = 0
    for page in [*PAGES, "docs/README.md", "docs/LOG.md", "CONTRIBUTING.md", "models/small/README.md"]:
        text = (ROOT / page).read_text(encoding="utf-8")
        links = re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", text) + re.findall(r"^\[[^]]+\]: ()#(.+)$", text, re.MULTILINE)
        for other, anchor in links:
            assert anchor in headings((ROOT / page).parent / other if other else page), (page, other, anchor)
        checked += len(links)
    assert checked > 100


def test_every_config_is_told():
    text = "\n".join(TEXT.values())
    for path in (ROOT / "conf").rglob("*.yaml"):
        name = str(path.relative_to(ROOT))
        alone = len(list((ROOT / "conf").rglob(path.name))) == 1
        assert name in text or (alone and re.search(rf"`{re.escape(path.name)}`", text)), name
