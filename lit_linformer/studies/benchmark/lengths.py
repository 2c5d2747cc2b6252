"""The cost of unequal text lengths: batches as fine-tuning and `predict` make them, against full rows with as many tokens.

A batch holds rows of about the same length, and is padded. It takes turns with two batches without padding: the same number of
rows, all of the mean length, and rows of n tokens (--length). Training steps, and forward passes of the validation split, are
timed. Only real tokens are counted. --whole names a model with a longer n (`convert --max_length`), which reads the same texts
whole, where the other reads them in --windows. Memory is the peak that a pass of the batch with the most tokens adds to weights
and optimiser. Writes lengths.json.

    OMP_NUM_THREADS=1 python run.py benchmark --what lengths --task SST-2 --source glue/ --clock cpu --threads 1
    python run.py benchmark --what lengths --task IMDB --source aclImdb/ --windows 8 --whole runs/imdb-4096 --batch_size 8
"""

from collections.abc import Callable
from typing import Any

from lit_linformer.studies.benchmark.subject import CLOCK, DEVICE, ROUNDS, THREADS, WHAT, begin, output, spread, write
from lit_linformer.utils.arguments import Setting, choice, whole, word
from lit_linformer.utils.errors import SettingError

SETTINGS = {
    "what": WHAT,
    "task": Setting(word("NAME"), "as data.task", "IMDB"),
    "source": Setting(word("FOLDER|hub:NAME"), "as data.source (default: the hub)"),
    "pretrained": Setting(word("RUN|FILE|FOLDER"), "as model.pretrained", "models/small"),
    "length": Setting(whole("N", 8), "as data.max_length (default: the model's n)"),
    "windows": Setting(whole("N", 1), "as data.max_windows", 1),
    "whole": Setting(word("RUN|FILE|FOLDER"), "a model with a longer n, which reads the same texts without windows"),
    "batch_size": Setting(whole("ROWS", 1), "texts in a batch", 32),
    "steps": Setting(whole("N", 1), "batches of each kind in a round", 20),
    "rounds": ROUNDS,
    "device": DEVICE,
    "precision": Setting(choice("float32", "bf16"), "bf16: autocast", "float32"),
    "threads": THREADS,
    "clock": CLOCK,
    "cache_dir": Setting(word("FOLDER"), "as data.cache_dir", "data/cache"),
    "output": output("runs/benchmark-lengths"),
}
OWN, WHOLE = "as they are", "read whole"
KINDS = (OWN, "of the mean length", "of n tokens")


def main(argv: list[str]) -> None:
    """Measures, writes and prints; ValueError for a bad setting."""
    settings = begin("lengths", __doc__, SETTINGS, argv, "lengths") | {"compile": False}
    import torch

    torch.set_num_threads(settings["threads"])
    nets, batches = prepared(settings)
    content: dict[str, Any] = {"settings": settings}
    for name, found in batches.items():
        made = {net: passes(net, settings, training=name == "training") for net in dict.fromkeys(nets.values())}
        runs = {kind: made[net] for kind, net in nets.items()}
        content[name] = measured(runs, found, settings)
        show(name, content[name])
    write(settings["output"], "lengths", argv, settings["device"], content)


def show(name: str, found: dict[str, Any]) -> None:
    print(f"{name}: {found['real_tokens']:.1%} of the tokens are real", flush=True)
    for kind, speed in found["tokens_per_second"].items():
        memory = f"{found['peak_bytes'][kind] / 2**20:>9,.0f} MiB"
        ratio = found["ratios"].get(kind)
        beside = f"   ratio to them {ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})" if ratio else ""
        print(f"  rows {kind:<20}{speed['median']:>10,.0f} tokens/s{memory}{beside}", flush=True)


def prepared(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, list[dict]]]:
    """{kind: its classifier}, and batches of each kind: {"training" or "inference": [{kind: batch}, …]}."""
    net, data = reader(settings["pretrained"], settings, settings["length"], settings["windows"])
    nets, whole = dict.fromkeys(KINDS, net), None
    if settings["whole"]:
        nets[WHOLE], whole = reader(settings["whole"], settings, length=None, windows=1)
    found: dict[str, list[dict]] = {}
    loaders = {"training": ("train", data.train_dataloader()), "inference": ("validation", data.val_dataloader())}
    for name, (split, loader) in loaders.items():
        every, rows = list(loader.sampler), data.sets[split]
        at = {} if whole is None else {row: place for place, row in enumerate(whole.sets[split].rows.tolist())}
        found[name] = []
        for place in range(settings["steps"]):
            keys = every[place * len(every) // settings["steps"]]
            batches = dict(zip(KINDS, beside(rows[keys], data.max_length), strict=True))
            if whole is not None:
                batches[WHOLE] = whole.sets[split][[(epoch, at[int(rows.rows[index])]) for epoch, index in keys]]
            found[name].append({kind: _on(batch, settings["device"]) for kind, batch in batches.items()})
    return nets, found


def reader(pretrained: str, settings: dict[str, Any], length: int | None, windows: int) -> tuple[Any, Any]:
    """A classifier on top of a pretrained encoder, and the task as its data."""
    from lit_linformer.data import FineTuningData
    from lit_linformer.model import SequenceClassifier
    from lit_linformer.runs.trained_model import read_model

    stored = read_model(pretrained, "pretrained")
    longest = length or stored.encoder.max_length
    if longest > stored.encoder.max_length:
        raise SettingError("length", longest, f"up to the n of {pretrained}, {stored.encoder.max_length}")
    data = FineTuningData(
        task=settings["task"], source=settings["source"], tokenizer=stored.tokenizer, max_length=longest,
        max_windows=windows, window_overlap=min(32, longest // 4), batch_size=settings["batch_size"],
        cache_dir=settings["cache_dir"],
    )  # fmt: skip
    data.prepare_data()
    data.setup("fit")
    net = SequenceClassifier(stored.encoder, data.num_labels, "mean")
    net.encoder.load_state_dict(stored.encoder_weights)
    return net.to(settings["device"]), data


def _on(batch: dict[str, Any], device: str) -> dict[str, Any]:
    return {key: value.to(device) for key, value in batch.items() if key != "index"}


def logits(net: Any, batch: dict[str, Any]) -> Any:
    return net(batch["input_ids"], batch.get("attention_mask"), batch.get("document"), len(batch["labels"]))


def beside(batch: dict[str, Any], longest: int) -> tuple[dict[str, Any], ...]:
    """The batch, its tokens in as many rows of the mean length, and its tokens in one or more rows of n tokens."""
    import torch

    ids, mask = batch["input_ids"], batch.get("attention_mask")
    real = ids.flatten() if mask is None else ids[mask]

    def rows(count: int, length: int) -> dict[str, Any]:
        places = torch.arange(count * length, device=ids.device) % len(real)
        return {"input_ids": real[places].view(count, length)}

    count, full = len(ids), max(1, round(len(real) / longest))
    even = {key: batch[key] for key in ("labels", "document") if key in batch} | rows(count, round(len(real) / count))
    labels = batch["labels"][torch.arange(full) % len(batch["labels"])]
    return batch, even, rows(full, longest) | {"labels": labels}


def real_tokens(batch: dict[str, Any]) -> int:
    mask = batch.get("attention_mask")
    return int(batch["input_ids"].numel() if mask is None else mask.sum())


def passes(net: Any, settings: dict[str, Any], training: bool) -> Callable[[dict[str, Any]], Any]:
    """A function that runs a training step, or a forward pass, of a batch."""
    import torch

    from lit_linformer.studies.benchmark.steps import by_hand
    from lit_linformer.tasks.scores import task_loss

    if training:
        return by_hand(net, settings, lambda net, **batch: task_loss(logits(net, batch), batch["labels"]))
    precision = torch.autocast(settings["device"].split(":")[0], torch.bfloat16, enabled=settings["precision"] == "bf16")

    def forward(batch: dict[str, Any]) -> None:
        net.eval()
        with torch.inference_mode(), precision:
            logits(net, batch)

    return forward


def measured(runs: dict[str, Callable], batches: list[dict[str, dict]], settings: dict[str, Any]) -> dict[str, Any]:
    """Tokens/s of each kind, ratios and memory, from rounds in which the kinds take turns at each batch."""
    from lit_linformer.studies.benchmark.passes import peak_memory
    from lit_linformer.studies.benchmark.steps import now

    kinds = list(runs)
    tokens = {kind: sum(real_tokens(batch[kind]) for batch in batches) for kind in kinds}
    rounds: list[dict[str, float]] = []  # seconds
    for turn in range(1 + settings["rounds"]):  # the first one warms up
        seconds = dict.fromkeys(kinds, 0.0)
        for place, batch in enumerate(batches):
            first = (place + turn) % len(kinds)
            for kind in kinds[first:] + kinds[:first]:
                start = now(settings)
                runs[kind](batch[kind])
                seconds[kind] += now(settings) - start
        rounds.append(seconds)
    del rounds[0]
    longest = max(batches, key=lambda batch: batch[OWN]["input_ids"].numel())
    memory = {kind: peak_memory(lambda kind=kind: runs[kind](longest[kind]), settings["device"]) for kind in kinds}
    # Texts read whole have fewer tokens, since windows overlap: there texts per second are compared.
    alike = {kind: 1.0 if kind == WHOLE else tokens[OWN] / tokens[kind] for kind in kinds if kind != OWN}
    return {
        "real_tokens": tokens[OWN] / sum(batch[OWN]["input_ids"].numel() for batch in batches),
        "tokens_per_second": {kind: spread([tokens[kind] / found[kind] for found in rounds]) for kind in kinds},
        "ratios": {kind: spread([found[kind] / found[OWN] * of for found in rounds]) for kind, of in alike.items()},
        "peak_bytes": memory,
    }
