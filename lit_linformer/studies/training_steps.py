"""The training steps that scripts/throughput.py compares: forward, loss, backward, clipping, fused AdamW, on fixed batches.

linformer is the recommended model (README, "Which Linformer"), linformer-paper the paper's, transformer the recommended one
with full attention. roberta is RobertaForMaskedLM of the package `transformers`, on sdpa: it computes logits at all tokens, as
that package does. linformer-lightning and roberta-trainer are the same models, trained by this project's LightningModule under
Lightning's Trainer and by transformers' Trainer, data and loop included.

Shapes: B rows, N tokens a row, M masked tokens a row, V vocabulary.
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

RECOMMENDED = {"projection_init": "block_mean", "local_width": 5, "norm": "pre"}
OURS = {
    "linformer": RECOMMENDED,
    "linformer-paper": {"projection_init": "xavier", "local_width": 0, "norm": "post"},
    "transformer": {**RECOMMENDED, "attention": "full"},
}
MODELS = (*OURS, "roberta", "linformer-lightning", "roberta-trainer")
BATCHES = 8  # that a loop goes through, again and again
WARM = 2  # steps of a loop, at each of its turns, that are not timed: it starts


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


def step_flops(name: str, settings: dict[str, Any]) -> int | None:
    """Operations of one training step that the model needs; None for RoBERTa, which computes other ones."""
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
    """Of "KIND N": a function that trains for settings["steps"] steps and returns the seconds of one."""
    kind, n = split(name)
    torch.manual_seed(0)
    if kind == "linformer-lightning":
        return _by_lightning(settings, n)
    if kind == "roberta-trainer":
        return _by_transformers(settings, n)
    device = settings["device"]
    batch = {key: value.to(device) for key, value in make_batch(settings, n, 0).items()}
    if kind == "roberta":
        net, batch = _roberta(settings, n), _for_transformers(batch)
        loss = _loss_of_roberta
    else:
        net, loss = MaskedLanguageModel(encoder_config(kind, settings, n)), MaskedLanguageModel.loss
    net = net.to(device).train()
    if settings["compile"]:
        torch._dynamo.config.recompile_limit = 64  # one code object for all models
        loss = torch.compile(loss, dynamic=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01, fused=True)
    precision = torch.autocast("cuda" if device != "cpu" else "cpu", torch.bfloat16, enabled=settings["precision"] == "bf16")

    def step() -> None:
        with precision:
            value = loss(net, **batch)
        value.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def timed() -> float:
        start = now(settings)
        for _ in range(settings["steps"]):
            step()
        return (now(settings) - start) / settings["steps"]

    return timed


def now(settings: dict[str, Any]) -> float:
    """Seconds, once the device has done what it was given; of the processor's time where the settings ask for it."""
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


def _loss_of_roberta(net: nn.Module, input_ids: Tensor, labels: Tensor) -> Tensor:
    return net(input_ids=input_ids, labels=labels).loss


class _Clock:
    """Seconds a step of a loop, from the end of the last step that warms up to the end of the last one."""

    def __init__(self, settings: dict[str, Any]):
        self.settings, self.steps, self.seen, self.begun, self.seconds = settings, settings["steps"], 0, 0.0, 0.0

    def tick(self) -> None:
        self.seen += 1
        if self.seen in (WARM, WARM + self.steps):
            time_now = now(self.settings)
            self.begun, self.seconds = time_now, (time_now - self.begun) / self.steps


def _by_lightning(settings: dict[str, Any], n: int) -> Callable[[], float]:
    from lightning.pytorch import Callback, Trainer
    from torch.utils.data import DataLoader

    from lit_linformer.callbacks import Throughput
    from lit_linformer.tasks import MLM

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.*")
    model = MLM(encoder_config("linformer", settings, n), lr=1e-4, compile=settings["compile"])
    torch._dynamo.config.recompile_limit = 64
    batches = [make_batch(settings, n, seed) for seed in range(BATCHES)] * (1 + (WARM + settings["steps"]) // BATCHES)
    device = torch.device(settings["device"])

    class Ticks(Callback):
        def __init__(self, clock: _Clock):
            self.clock = clock

        def on_train_batch_end(self, *_: Any) -> None:
            self.clock.tick()

    def timed() -> float:
        clock = _Clock(settings)
        trainer = Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu", devices=[device.index or 0] if device.type == "cuda" else 1,
            precision="bf16-mixed" if settings["precision"] == "bf16" else "32-true", gradient_clip_val=1.0,
            max_steps=WARM + settings["steps"], max_epochs=-1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[Throughput(), Ticks(clock)],
        )  # fmt: skip
        trainer.fit(model, DataLoader(batches, batch_size=None, pin_memory=device.type == "cuda"))
        return clock.seconds

    return timed


def _by_transformers(settings: dict[str, Any], n: int) -> Callable[[], float]:
    """With what makes it fastest: bf16, compile, fused AdamW, sdpa, pinned memory, no logging."""
    from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

    model = _roberta(settings, n)
    torch._dynamo.config.recompile_limit = 64
    batches = [_for_transformers(make_batch(settings, n, seed)) for seed in range(BATCHES)]
    rows = [{key: value[row] for key, value in batch.items()} for batch in batches for row in range(len(batch["labels"]))]
    folder = tempfile.mkdtemp()

    class Ticks(TrainerCallback):
        def __init__(self, clock: _Clock):
            self.clock = clock

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.clock.tick()

    def timed() -> float:
        clock = _Clock(settings)
        arguments = TrainingArguments(
            output_dir=folder, max_steps=WARM + settings["steps"], per_device_train_batch_size=max(1, settings["tokens"] // n),
            bf16=settings["precision"] == "bf16", torch_compile=settings["compile"], optim="adamw_torch_fused",
            max_grad_norm=1.0, learning_rate=1e-4, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
            use_cpu=settings["device"] == "cpu", dataloader_pin_memory=settings["device"] != "cpu",
        )  # fmt: skip
        trainer = Trainer(
            model, arguments, train_dataset=rows, data_collator=default_data_collator, callbacks=[Ticks(clock)]
        )  # fmt: skip
        with contextlib.redirect_stdout(None):  # it prints a summary
            trainer.train()
        return clock.seconds

    return timed
