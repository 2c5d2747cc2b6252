"""The training steps that `benchmark --what training` compares: forward, loss, backward, clipping and fused AdamW.

lookup is the recommended model (README, "Which Linformer"), linformer and transformer are the same with other attention,
linformer-paper is the paper's. roberta is RobertaForMaskedLM of the package `transformers`, with sdpa: it computes logits at
all tokens, as that package does. linformer-lightning and roberta-trainer are the same models, trained by this project's
LightningModule in Lightning's Trainer and by transformers' Trainer, data and loop included.

Shapes: B rows, N tokens per row, M masked tokens per row, V vocabulary.
"""

import contextlib
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lit_linformer.model import Encoder, EncoderConfig, MaskedLanguageModel
from lit_linformer.model.flops import training_flops
from lit_linformer.studies.benchmark.process import Job, Reporter, take_turns
from lit_linformer.utils import compat

RECOMMENDED = {"projection_init": "block_mean", "local_width": 5, "norm": "pre"}
OURS = {
    "linformer": RECOMMENDED,
    "lookup": {**RECOMMENDED, "attention": "lookup", "attention_options": {"window": 16}},
    "linformer-paper": {"projection_init": "xavier", "local_width": 0, "norm": "post"},
    "transformer": {**RECOMMENDED, "attention": "full"},
}
BATCHES = 8  # number of batches that a loop cycles through
WARM = 2  # untimed first steps of each turn


def measure_training(job: Job, names: list[str], reporter: Reporter) -> None:
    """Times the models' steps in turn."""
    steps = {name: reporter.attempt(name, lambda name=name: build_step(name, job.settings)) for name in names}
    take_turns({name: step for name, step in steps.items() if step is not None}, job, reporter)


def masked_tokens(settings: dict[str, Any], n: int) -> int:
    return max(1, round(settings["mask_rate"] * n))


def encoder_config(kind: str, settings: dict[str, Any], n: int) -> EncoderConfig:
    return EncoderConfig(
        **OURS[kind],
        vocab_size=settings["vocab_size"],
        max_length=n,
        projection_dim=settings["projection_dim"],
        dropout=settings["dropout"],
        attention_dropout=settings["dropout"],
        **{key: settings[key] for key in ("hidden_size", "num_layers", "num_heads", "intermediate_size")},
    )


def check(name: str, settings: dict[str, Any]) -> None:
    """Raises ValueError for settings that contradict each other."""
    kind, n = split(name)
    encoder_config(kind if kind in OURS else "linformer", settings, n)


def step_flops(name: str, settings: dict[str, Any]) -> int | None:
    """Operations that one training step of the model needs; None for RoBERTa, whose operations differ."""
    kind, n = split(name)
    if kind.startswith("roberta"):
        return None
    with torch.device("meta"):  # for its formulas alone
        encoder = Encoder(encoder_config(kind.removesuffix("-lightning"), settings, n))
    return max(1, settings["tokens"] // n) * training_flops(encoder, n, masked_tokens(settings, n))


def split(name: str) -> tuple[str, int]:
    """("linformer", 512) of "linformer 512"."""
    kind, _, n = name.partition(" ")
    return kind, int(n)


def make_batch(settings: dict[str, Any], n: int, seed: int) -> dict[str, Tensor]:
    """input_ids (B, N), positions (B, M) and labels (B, M) of random tokens, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    rows, masked = max(1, settings["tokens"] // n), masked_tokens(settings, n)
    ids = torch.randint(5, settings["vocab_size"], (rows, n), generator=generator)
    positions = torch.rand(rows, n, generator=generator).argsort(1)[:, :masked].sort(1).values
    labels = ids.gather(1, positions)
    return {"input_ids": ids.scatter(1, positions, 4), "positions": positions, "labels": labels}


def build_step(name: str, settings: dict[str, Any]) -> Callable[[], float]:
    """For "KIND N", a function that trains for settings["steps"] steps and returns the mean seconds per step."""
    kind, n = split(name)
    torch.manual_seed(0)
    if kind == "linformer-lightning":
        return _by_lightning(settings, n)
    if kind == "roberta-trainer":
        return _by_transformers(settings, n)
    device = settings["device"]
    batch = {key: value.to(device) for key, value in make_batch(settings, n, 0).items()}
    if kind == "roberta":
        step = by_hand(_roberta(settings, n), settings, lambda net, **batch: net(**batch).loss)
        batch = _for_transformers(batch)
    else:
        step = by_hand(MaskedLanguageModel(encoder_config(kind, settings, n)), settings)

    def timed() -> float:
        start = now(settings)
        for _ in range(settings["steps"]):
            step(batch)
        return (now(settings) - start) / settings["steps"]

    return timed


def by_hand(
    net: nn.Module, settings: dict[str, Any], loss: Callable[..., Tensor] = MaskedLanguageModel.loss
) -> Callable[[dict[str, Tensor]], None]:
    """A training step in plain PyTorch, a function of the batch."""
    device = settings["device"]
    net = net.to(device).train()
    if settings["compile"] and isinstance(net, MaskedLanguageModel):
        from lit_linformer.tasks.compiling import compile_training

        compile_training(net)
    elif settings["compile"]:
        compat.many_recompilations()
        loss = torch.compile(loss, dynamic=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01, fused=True)
    precision = torch.autocast("cuda" if device != "cpu" else "cpu", torch.bfloat16, enabled=settings["precision"] == "bf16")

    def step(batch: dict[str, Tensor]) -> None:
        with precision:
            value = loss(net, **batch)
        value.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def now(settings: dict[str, Any]) -> float:
    """Time in seconds after synchronising the device; processor time if the settings ask for it."""
    if settings["device"] != "cpu":
        torch.cuda.synchronize(settings["device"])
    return time.process_time() if settings["clock"] == "cpu" else time.perf_counter()


def _roberta(settings: dict[str, Any], n: int) -> nn.Module:
    from transformers import RobertaConfig, RobertaForMaskedLM

    config = RobertaConfig(
        vocab_size=settings["vocab_size"],
        hidden_size=settings["hidden_size"],
        num_hidden_layers=settings["num_layers"],
        num_attention_heads=settings["num_heads"],
        intermediate_size=settings["intermediate_size"],
        hidden_dropout_prob=settings["dropout"],
        attention_probs_dropout_prob=settings["dropout"],
        max_position_embeddings=n + 2,
        type_vocab_size=1,
        attn_implementation="sdpa",
    )
    return RobertaForMaskedLM(config)


def _for_transformers(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same batch with labels (B, N), -100 where nothing is masked."""
    labels = torch.full_like(batch["input_ids"], -100).scatter(1, batch["positions"], batch["labels"])
    return {"input_ids": batch["input_ids"], "labels": labels}


class Clock:
    """Seconds per step of a loop, from the end of the last warm-up step to the end of the last step."""

    def __init__(self, settings: dict[str, Any]):
        self.settings, self.steps, self.seen, self.begun, self.seconds = settings, settings["steps"], 0, 0.0, 0.0

    def tick(self, *_: Any, **__: Any) -> None:
        self.seen += 1
        if self.seen in (WARM, WARM + self.steps):
            time_now = now(self.settings)
            self.begun, self.seconds = time_now, (time_now - self.begun) / self.steps


def quiet() -> None:
    """Silences Lightning's messages about a Trainer without logger and checkpoints."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.*")


def by_trainer(model: Any, data: Any, settings: dict[str, Any], callbacks: list[Any]) -> float:
    """Seconds per step of Lightning's Trainer, on a loader or a LightningDataModule."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import LambdaCallback

    clock, device = Clock(settings), torch.device(settings["device"])
    trainer = Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu", devices=[device.index or 0] if device.type == "cuda" else 1,
        precision="bf16-mixed" if settings["precision"] == "bf16" else "32-true", gradient_clip_val=1.0,
        max_steps=WARM + settings["steps"], max_epochs=-1, limit_val_batches=0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, log_every_n_steps=10,
        callbacks=[*callbacks, LambdaCallback(on_train_batch_end=clock.tick)],
    )  # fmt: skip
    trainer.fit(model, data)
    return clock.seconds


def _by_lightning(settings: dict[str, Any], n: int) -> Callable[[], float]:
    from torch.utils.data import DataLoader

    from lit_linformer.callbacks import Throughput
    from lit_linformer.tasks import MLM

    quiet()
    model = MLM(encoder_config("linformer", settings, n), lr=1e-4, compile=settings["compile"])
    batches = [make_batch(settings, n, seed) for seed in range(BATCHES)] * (1 + (WARM + settings["steps"]) // BATCHES)
    loader = DataLoader(batches, batch_size=None, pin_memory=settings["device"] != "cpu")
    return lambda: by_trainer(model, loader, settings, [Throughput()])


def _by_transformers(settings: dict[str, Any], n: int) -> Callable[[], float]:
    """Its Trainer in the fastest setup, at this precision, compiled or not: fused AdamW, sdpa, pinned memory, no logging."""
    from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

    model = _roberta(settings, n)
    compat.many_recompilations()
    batches = [_for_transformers(make_batch(settings, n, seed)) for seed in range(BATCHES)]
    rows = [{key: value[row] for key, value in batch.items()} for batch in batches for row in range(len(batch["labels"]))]

    def timed() -> float:
        clock, ticks = Clock(settings), TrainerCallback()
        ticks.on_step_end = clock.tick
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):  # it prints a summary
            arguments = TrainingArguments(
                output_dir=folder, max_steps=WARM + settings["steps"], max_grad_norm=1.0, learning_rate=1e-4,
                per_device_train_batch_size=max(1, settings["tokens"] // n), bf16=settings["precision"] == "bf16",
                torch_compile=settings["compile"], optim="adamw_torch_fused", report_to=[], save_strategy="no",
                logging_strategy="no", disable_tqdm=True, use_cpu=settings["device"] == "cpu",
                dataloader_pin_memory=settings["device"] != "cpu", tf32=None if settings["precision"] == "bf16" else False,
            )  # fmt: skip
            compat.on_one_gpu(arguments)
            trainer = Trainer(model, arguments, train_dataset=rows, data_collator=default_data_collator, callbacks=[ticks])
            trainer.train()
        return clock.seconds

    return timed
