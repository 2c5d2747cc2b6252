"""What texts of unequal lengths cost: batches as fine-tuning and `predict` make them, beside full rows with as many tokens.

Rows of about the same length stand together in a batch, and the rest of each is pads. Each batch takes turns with two others
that have none: as many rows, all of the mean length, and rows of n tokens (--length). Training steps, and forward passes of the
validation split. Tokens are real ones, pads left out. Writes lengths.json.

    OMP_NUM_THREADS=1 python run.py benchmark --what lengths --task SST-2 --source glue/ --clock cpu --threads 1
    python run.py benchmark --what lengths --task IMDB --source aclImdb/ --windows 4
"""

from collections.abc import Callable
from typing import Any

from lit_linformer.studies.benchmark.subject import (
    CLOCK,
    DEVICE,
    ROUNDS,
    THREADS,
    WHAT,
    check_clock,
    check_free,
    fill,
    output,
    spread,
    write,
)
from lit_linformer.utils.arguments import Setting, choice, parse, whole, word

SETTINGS = {
    "what": WHAT,
    "task": Setting(word("NAME"), "as data.task", "IMDB"),
    "source": Setting(word("FOLDER|hub:NAME"), "as data.source (default: the hub)"),
    "pretrained": Setting(word("RUN|FILE|FOLDER"), "as model.pretrained", "models/small"),
    "length": Setting(whole("N", 8), "as data.max_length (default: the model's n)"),
    "windows": Setting(whole("N", 1), "as data.max_windows", 1),
    "batch_size": Setting(whole("ROWS", 1), "texts a batch", 32),
    "steps": Setting(whole("N", 1), "batches of each kind a turn", 20),
    "rounds": ROUNDS,
    "device": DEVICE,
    "precision": Setting(choice("float32", "bf16"), "bf16: autocast", "float32"),
    "threads": THREADS,
    "clock": CLOCK,
    "cache_dir": Setting(word("FOLDER"), "as data.cache_dir", "data/cache"),
    "output": output("runs/benchmark-lengths"),
}
KINDS = ("as they are", "of the mean length", "of n tokens")


def main(argv: list[str]) -> None:
    """Measures, writes and prints; ValueError for a bad setting."""
    settings = fill(parse("benchmark --what lengths", __doc__, SETTINGS, argv), {}) | {"compile": False}
    check_clock(settings)
    check_free(settings["output"], "lengths")
    import torch

    torch.set_num_threads(settings["threads"])
    net, loss, batches = prepared(settings)
    content: dict[str, Any] = {"settings": settings}
    for name, found in batches.items():
        run = passes(net, loss, settings, training=name == "training")
        content[name] = measured(run, found, settings)
        rates, ratios = content[name]["tokens_per_second"], content[name]["ratios"]
        print(f"{name}: {content[name]['real_tokens']:.1%} of the tokens are real", flush=True)
        for kind in KINDS:
            print(f"  rows {kind:<20}{rates[kind]['median']:>10,.0f} tokens/s", flush=True)
        for kind, ratio in ratios.items():
            print(f"  ratio to rows {kind:<20}{ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})", flush=True)
    write(settings["output"], "lengths", argv, settings["device"], content)


def prepared(settings: dict[str, Any]) -> tuple[Any, Callable, dict[str, list[dict]]]:
    """The classifier, its loss, and batches of each kind: {"training" or "inference": [{kind: batch}, …]}."""
    from lit_linformer.data import FineTuningData
    from lit_linformer.model import SequenceClassifier
    from lit_linformer.runs.trained_model import read_model
    from lit_linformer.tasks.scores import task_loss

    stored = read_model(settings["pretrained"], "pretrained")
    longest = settings["length"] or stored.encoder.max_length
    data = FineTuningData(
        task=settings["task"], source=settings["source"], tokenizer=stored.tokenizer, max_length=longest,
        max_windows=settings["windows"], batch_size=settings["batch_size"], cache_dir=settings["cache_dir"],
    )  # fmt: skip
    data.prepare_data()
    data.setup("fit")
    net = SequenceClassifier(stored.encoder, data.num_labels, "mean")
    net.encoder.load_state_dict(stored.encoder_weights)

    def loss(net: SequenceClassifier, **batch: Any) -> Any:
        return task_loss(logits(net, batch), batch["labels"])

    found = {}
    for name, loader in (("training", data.train_dataloader()), ("inference", data.val_dataloader())):
        whole = list(loader.sampler)
        chosen = [whole[place * len(whole) // settings["steps"]] for place in range(settings["steps"])]
        dataset, device = loader.dataset, settings["device"]
        batches = [{key: value.to(device) for key, value in dataset[keys].items()} for keys in chosen]
        found[name] = [dict(zip(KINDS, beside(batch, longest), strict=True)) for batch in batches]
    return net, loss, found


def logits(net: Any, batch: dict[str, Any]) -> Any:
    return net(batch["input_ids"], batch.get("attention_mask"), batch.get("document"), len(batch["labels"]))


def beside(batch: dict[str, Any], longest: int) -> tuple[dict[str, Any], ...]:
    """The batch, and with its tokens as many rows of the mean length, and rows of n tokens, at least one."""
    import torch

    ids, mask = batch["input_ids"], batch.get("attention_mask")
    real = ids.flatten() if mask is None else ids[mask]

    def rows(count: int, length: int) -> dict[str, Any]:
        places = torch.arange(count * length, device=ids.device) % len(real)
        return {"input_ids": real[places].view(count, length)}

    count, full = len(ids), max(1, round(len(real) / longest))
    even = {key: batch[key] for key in ("labels", "document") if key in batch} | rows(count, round(len(real) / count))
    return batch, even, rows(full, longest) | {"labels": batch["labels"].repeat(full)[:full]}


def real_tokens(batch: dict[str, Any]) -> int:
    mask = batch.get("attention_mask")
    return int(batch["input_ids"].numel() if mask is None else mask.sum())


def passes(net: Any, loss: Callable, settings: dict[str, Any], training: bool) -> Callable[[dict[str, Any]], Any]:
    """A training step, or a forward pass, of a batch."""
    import torch

    from lit_linformer.studies.benchmark.steps import by_hand

    if training:
        step = by_hand(net, settings, loss)
        return lambda batch: step({key: value for key, value in batch.items() if key != "index"})
    net = net.to(settings["device"]).eval()
    precision = torch.autocast(settings["device"].split(":")[0], torch.bfloat16, enabled=settings["precision"] == "bf16")

    def forward(batch: dict[str, Any]) -> None:
        with torch.inference_mode(), precision:
            logits(net, batch)

    return forward


def measured(run: Callable, batches: list[dict[str, dict]], settings: dict[str, Any]) -> dict[str, Any]:
    """Tokens/s of each kind and their ratios, of rounds in which kinds take turns at each batch."""
    from lit_linformer.studies.benchmark.steps import now

    tokens = {kind: sum(real_tokens(batch[kind]) for batch in batches) for kind in KINDS}
    rounds: list[dict[str, float]] = []
    for turn in range(1 + settings["rounds"]):  # the first one warms up
        seconds = dict.fromkeys(KINDS, 0.0)
        for place, batch in enumerate(batches):
            first = (place + turn) % len(KINDS)
            for kind in KINDS[first:] + KINDS[:first]:
                start = now(settings)
                run(batch[kind])
                seconds[kind] += now(settings) - start
        rounds.append({kind: tokens[kind] / seconds[kind] for kind in KINDS})
    del rounds[0]
    own, *others = KINDS
    padded = sum(batch[own]["input_ids"].numel() for batch in batches)
    return {
        "real_tokens": tokens[own] / padded,
        "tokens_per_second": {kind: spread([found[kind] for found in rounds]) for kind in KINDS},
        "ratios": {kind: spread([found[own] / found[kind] for found in rounds]) for kind in others},
    }
