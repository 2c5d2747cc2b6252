"""What the template costs: a training step by Lightning and our data against the same model in a bare PyTorch loop.

    python scripts/bench_training.py --config conf/quickstart.yaml --steps 40 --rounds 5

Both sides train the same shape on the same batches. The bare loop gets its batches ready-made from memory: its step is model,
loss, backward, clipping and AdamW, nothing else. The two take turns within one process; the first steps of a turn don't count.
"""

import argparse
import logging
import statistics
import time
import warnings
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, Trainer

from lit_linformer.data import PretrainingData
from lit_linformer.model import EncoderConfig, MaskedLanguageModel
from lit_linformer.tasks import MLM
from lit_linformer.tasks.optim import parameter_groups

WARM = 5


class StepTimes(Callback):
    """When each step ended, and how long the loop waited for the batch before it."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())


def by_lightning(config: dict[str, Any], data: PretrainingData, steps: int) -> tuple[float, float]:
    """Median seconds a step, and the share of the time that the loop waited for data."""
    torch.manual_seed(0)
    times = StepTimes()
    waits: list[float] = []
    trainer = Trainer(
        accelerator="cpu", max_steps=steps, max_epochs=-1, gradient_clip_val=1.0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0, use_distributed_sampler=False,
        log_every_n_steps=10, callbacks=[times],
    )  # fmt: skip
    build = data.train_dataloader

    def timed_loader() -> Any:
        loader = build()
        iterate = loader.__class__.__iter__

        class Timed(loader.__class__):
            def __iter__(self):
                batches = iterate(self)
                while True:
                    start = time.perf_counter()
                    batch = next(batches, None)
                    waits.append(time.perf_counter() - start)
                    if batch is None:
                        return
                    yield batch

        loader.__class__ = Timed
        return loader

    data.train_dataloader = timed_loader
    try:
        trainer.fit(MLM(EncoderConfig(**config["encoder"]), data.num_tokens), data)
    finally:
        del data.train_dataloader
    step_times = [b - a for a, b in zip(times.ends[WARM:], times.ends[WARM + 1 :], strict=False)]
    return statistics.median(step_times), sum(waits[WARM + 1 : steps]) / (times.ends[-1] - times.ends[WARM])


def by_hand(config: dict[str, Any], data: PretrainingData, batches: list[dict[str, torch.Tensor]]) -> float:
    torch.manual_seed(0)
    model = MaskedLanguageModel(EncoderConfig(**{**config["encoder"], "vocab_size": data.num_tokens}))
    optimizer = torch.optim.AdamW(parameter_groups(model, 1e-3, 0.01, 1.0, 0.0), betas=(0.9, 0.98), eps=1e-6, fused=True)
    ends = []
    for batch in batches:
        loss = model.loss(batch["input_ids"], batch["positions"], batch["labels"], batch.get("attention_mask"))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ends.append(time.perf_counter())
    return statistics.median(b - a for a, b in zip(ends[WARM:], ends[WARM + 1 :], strict=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="conf/quickstart.yaml")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with open(args.config, encoding="utf-8") as file:
        content = yaml.safe_load(file)
    config = content["model"]["init_args"]
    settings = {**content["data"]["init_args"], "max_length": config["encoder"]["max_length"], "seed": 0}
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.*")
    data = PretrainingData(**settings)
    data.prepare_data()
    data.setup("fit")
    stream = iter(data.train_dataloader())
    batches = [next(stream) for _ in range(args.steps)]
    ratios, waits = [], []
    for number in range(args.rounds):
        ours, wait = by_lightning(config, data, args.steps)
        bare = by_hand(config, data, batches)
        ratios.append(ours / bare)
        waits.append(wait)
        print(f"round {number}: Lightning {ours * 1e3:.1f} ms, bare {bare * 1e3:.1f} ms a step, ratio {ours / bare:.3f}, "
              f"waiting for data {wait:.2%}")  # fmt: skip
    print(f"median ratio {statistics.median(ratios):.3f}, waiting for data {statistics.median(waits):.2%}")


if __name__ == "__main__":
    main()
