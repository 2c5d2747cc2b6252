"""The page that scripts/gpu_suite.py writes: goals, the results of each part, pictures."""

import json
import shutil
from pathlib import Path
from typing import Any

from lit_linformer.utils.files import read_rows, value_at, write_text
from lit_linformer.utils.markdown import aligned, demoted

TITLES = {
    "speed": "Training steps of the base model, compiled",
    "mechanisms": "Lookup beside Linformer and Transformer, compiled",
    "half": "Training in 16-mixed",
    "nccl": "Processes under DistributedDataParallel (NCCL), beside single ones",
    "table3": "Layers against fused attention (Table 3, figure 2)",
    "window": "FlexAttention's sliding window of 2 × 256 tokens",
    "roberta": "Beside RoBERTa, each in its Trainer",
    "pretrain": "Pretraining",
}
# (part, keys that lead to the number in its results, the least that is wanted, words).
GOALS = (
    ("speed", ("models", "linformer 512", "mfu"), 0.4, "MFU of a training step, base model, n = 512"),
    ("mechanisms", ("models", "lookup 512", "mfu"), 0.4, "MFU of the same with lookup"),
    (
        "speed",
        ("models", "linformer 512", "tokens_per_second", "median"),
        790_000,
        "tokens/s of it (goal of an H200)",
    ),
    ("speed", ("ratios", "linformer 8192 / linformer 512", "median"), 0.8, "tokens/s at n = 8192 over n = 512"),
    (
        "roberta",
        ("ratios", "linformer-lightning 512 / roberta-trainer 512", "median"),
        1.5,
        "× RoBERTa's tokens/s, Trainer each",
    ),
)


def write_page(content: dict[str, Any], folder: Path) -> list[str]:
    """Writes suite.json, report.md and pictures; returns the lines of the goals."""
    page, parts = folder / "page", content["parts"]
    write_text(page / "suite.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    goals = [["goal", "reached", ""]]
    for part, keys, least, words in GOALS:
        value = value_at(parts.get(part, {}).get("results"), keys)
        reached = "not measured" if value is None else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
        goals.append([f"{least:,g}", reached, words])
    states = [["part", "state", "seconds", "hardware", ""]]
    for name, part in parts.items():
        said = (part.get("log") or [""])[-1] if part["status"] != "ok" else part["results"] if name == "tests" else ""
        where = part.get("hardware", "")
        states.append([name, part["status"], f"{part['seconds']:.0f}", where, said.strip("= ").replace("|", "\\|")])
    place = ", ".join(f"{key} {value}" for key, value in content["environment"].items())
    text = f"# What a GPU measured\n\n{place}\n\n`{content['command']}`\n\n{aligned(goals)}\n{aligned(states)}"
    for name, title in TITLES.items():
        if shown := section(name, parts.get(name, {}), folder):
            text += f"\n## {title}\n\n`{parts[name]['command']}`\n\n{shown}"
    write_text(page / "report.md", text)
    return aligned(goals).splitlines()


def section(name: str, part: dict[str, Any], folder: Path) -> str:
    """A part's results, in Markdown."""
    told, page = part.get("results") or {}, folder / "page"
    if name in ("table3", "window") and (folder / name / "benchmark.md").is_file():
        pictures = ""
        for picture in sorted((folder / name).glob("*.png")):
            shutil.copy(picture, page / f"{name}-{picture.name}")
            pictures += f"\n![{TITLES[name]}]({name}-{picture.name})\n"
        return demoted((folder / name / "benchmark.md").read_text(encoding="utf-8"), 2) + pictures
    if "models" in told:
        rows = [["model, n", "tokens/s", "MFU"]]
        for model, entry in told["models"].items():
            speed = entry.get("tokens_per_second", {}).get("median")
            rows.append(
                [model, f"{speed:,.0f}" if speed else entry["status"], f"{entry['mfu']:.1%}" if "mfu" in entry else "–"]
            )
        ratios = [["ratio", "median"], *([name, f"{ratio['median']:.3f}"] for name, ratio in told["ratios"].items())]
        return aligned(rows) + ("\n" + aligned(ratios) if len(ratios) > 1 else "")
    if name == "nccl" and "share" in told:
        return f"Together they have {told['share']['median']:.3f} of the tokens/s that they have alone.\n"
    if name not in ("half", "pretrain") or not (rows := read_rows(folder / name / "perplexity.csv")):
        return ""
    lines = [["step", "tokens", "seconds", "validation perplexity"]]
    lines += [[f"{row[key]:,.0f}" for key in ("step", "tokens", "seconds")] + [f"{row['perplexity']:.2f}"] for row in rows]
    fast = value_at(told, ("throughput", "tokens_per_second"))
    mfu = value_at(told, ("throughput", "mfu"))
    speed = f"\n{fast:,.0f} tokens/s{f', MFU {mfu:.1%}' if mfu else ''}\n" if fast else ""
    if name == "pretrain" and (picture := folder / "export/perplexity.png").is_file():
        shutil.copy(picture, page / "pretrain.png")
        speed += "\n![Validation perplexity against tokens](pretrain.png)\n"
    return aligned(lines) + speed
