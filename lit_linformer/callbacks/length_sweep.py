"""How a model does at other lengths than it trains on: validation perplexity, tokens/s and memory, during training or after.

    --trainer.callbacks+ LengthSweep --trainer.callbacks.lengths [64,128,256,512]

writes length_sweep.csv (and .png) into the run directory.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.multiprocessing.reductions import StorageWeakRef

from lit_linformer.callbacks.loggers import writers
from lit_linformer.callbacks.observing import Measuring, say, tokens_seen, unnoticed, write_csv
from lit_linformer.model.ranges import Count, Natural, Range, check_ranges
from lit_linformer.tasks.mlm import inputs
from lit_linformer.tasks.perplexity import Perplexity
from lit_linformer.utils import compat
from lit_linformer.utils.errors import SettingError, UserError
from lit_linformer.utils.figures import COLOURS, MOST_CURVES, QUIET, figure_class, open_frame, plain_numbers, thinned
from lit_linformer.utils.files import read_rows

COLUMNS = ("step", "tokens", "length", "perplexity", "tokens_per_second", "peak_memory_mib")
SHORTEST = 8  # as data.max_length
MIB = 2**20


class LengthSweep(Measuring):
    """Measures the model on the validation text cut into rows of other lengths: length_sweep.csv, a figure, the loggers.

    The perplexity at a length is what `validate --data.max_length LENGTH` gives. Tokens/s are those of the forward pass,
    over all processes, with the output matrix applied to the masked tokens. Peak memory is that of weights and activations in
    such a pass on one process; on a GPU, reading it resets CUDA's own peak counter. Training is not affected. With `validate`
    the file is validate_length_sweep.csv. It works on one device, or several with DDP, but not with sharded weights.

    Args:
        lengths: tokens in a row, bos included: from 8 to model.encoder.max_length.
        every_n_validations: number of validations from one sweep to the next in fit; 0: no sweep.
        at_end: sweep when training ends, too.
        num_tokens: tokens in a batch on each process, the same at every length, as in the paper's figure 2; at least one row.
            Speed and memory depend on it, perplexity does not. None: data.batch_size times data.max_length.
        limit_batches: number of batches, the first ones, of each length on each process, to bound the cost; None: the whole
            split.
    """

    def __init__(
        self,
        lengths: list[Annotated[int, Range(least=SHORTEST)]],
        every_n_validations: Natural = 1,
        at_end: bool = False,
        num_tokens: Count | None = None,
        limit_batches: Count | None = None,
    ) -> None:
        check_ranges("LengthSweep.", LengthSweep.__init__, locals())
        if not lengths:
            raise SettingError("LengthSweep.lengths", lengths, f"a list of lengths, each {SHORTEST} or more")
        if every_n_validations == 0 and not at_end:
            raise SettingError("LengthSweep.every_n_validations", 0, "1 or more, or 0 with at_end true")
        self.lengths = sorted(set(lengths))
        self.every_n_validations, self.at_end = every_n_validations, at_end
        self.num_tokens, self.limit_batches = num_tokens, limit_batches
        self.rows: dict[tuple[int, int], dict[str, float]] = {}  # by (step, length)
        self._swept_step = -1

    def state_dict(self) -> dict[str, Any]:
        return {"validations": self.validations, "rows": [dict(row) for row in self.rows.values()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.validations = state_dict["validations"]
        self._add(state_dict["rows"])

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage not in ("fit", "validate"):
            return
        net, data = getattr(pl_module, "net", None), trainer.datamodule
        if not hasattr(net, "nll") or not hasattr(data, "evaluation_loader"):
            self.refuse(trainer, "masked language modelling on PretrainingData")
        longest = net.encoder.config.max_length
        if self.lengths[-1] > longest:
            allowed = f"{SHORTEST} to model.encoder.max_length = {longest}"
            raise UserError(f"LengthSweep.lengths holds {self.lengths[-1]}", allowed)
        if len(data.blocks["validation"]) == 0:
            raise SettingError(
                "data.validation_fraction",
                data.validation_fraction,
                "more than 0, or a data.validation_source",
                when="with LengthSweep",
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A sweep at the end of training is newer than the last checkpoint: only the file has it.
        path = Path(trainer.default_root_dir) / "length_sweep.csv"
        if trainer.global_step:
            in_file = [row | {name: int(row[name]) for name in COLUMNS[:3]} for row in read_rows(path)]
            self._add([*(row for row in in_file if row["step"] <= trainer.global_step), *self.rows.values()])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.at_end and self._swept_step != trainer.global_step:
            self.after_validation(trainer, pl_module)

    def after_validation(self, trainer: Trainer, pl_module: LightningModule) -> None:
        fitting = trainer.state.fn == "fit"
        step = self.measured_step(trainer)
        with unnoticed(pl_module):
            rows = []
            for length in self.lengths:
                measured = self._measure(trainer, pl_module, length)
                rows.append({"step": step, "tokens": tokens_seen(pl_module), "length": length, **measured})
            self._swept_step = step
            if fitting:
                self._add(rows)
            found = ", ".join(f"{row['perplexity']:.2f} at {row['length']}" for row in rows)
            say(trainer, f"step {step}  perplexity by length: {found}")
            if (path := self.file(trainer, "length_sweep.csv")) is None:
                return
            shown = list(self.rows.values()) if fitting else rows
            write_csv(path, shown)
            self._draw(trainer, rows, shown, path.with_suffix(".png"))

    def _measure(self, trainer: Trainer, pl_module: LightningModule, length: int) -> dict[str, float]:
        """Measures one length: {perplexity, tokens_per_second, peak_memory_mib}, the same on every rank."""
        data, device, limit = trainer.datamodule, pl_module.device, 1 if trainer.fast_dev_run else self.limit_batches
        rows = max(1, (self.num_tokens or data.batch_size * data.max_length) // length)
        loader = data.evaluation_loader("validation", length, rows)
        metric = Perplexity().to(device)
        tokens, seconds, peak = 0, 0.0, 0.0
        for index, batch in enumerate(itertools.islice(loader, limit)):
            batch = trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch))

            def nll(batch: dict = batch) -> torch.Tensor:
                with trainer.precision_plugin.val_step_context():
                    return pl_module.net.nll(*inputs(batch))

            if index == 0:  # run once more below, warm
                peak = peak_memory(nll, pl_module)
            _synchronize(device)
            begin = time.perf_counter()
            values = nll()
            _synchronize(device)
            seconds += time.perf_counter() - begin
            tokens += batch["input_ids"].numel()
            metric.update(values, batch["labels"])
        ranks = trainer.strategy.all_gather(torch.tensor([tokens, seconds, peak / MIB], device=device)).view(-1, 3)
        return {"perplexity": metric.compute().item(), **together(ranks)}  # each over all ranks

    def _draw(self, trainer: Trainer, rows: list[dict], shown: list[dict], path: Path) -> None:
        values = {f"sweep/{name}_{row['length']}": row[name] for row, name in itertools.product(rows, COLUMNS[3:])}
        for logger in writers(trainer):
            logger.points(values, trainer.global_step)
        if (figure := figure_class()) is not None:
            drawn = draw_sweep(figure, shown)
            drawn.savefig(path, dpi=150)
            for logger in writers(trainer):
                logger.figure("sweep/by_length", drawn, trainer.global_step)

    def _add(self, rows: list[dict[str, float]]) -> None:
        """The later of two rows for the same step and length is kept."""
        found = self.rows | {(row["step"], row["length"]): dict(row) for row in rows}
        self.rows = dict(sorted(found.items()))


class AllocatedTensors(compat.TorchDispatchMode):
    """Counts the bytes of the tensors that operators create inside the context, and their maximum, ``peak``.

    Not the resident set: a process keeps what its last backward pass has freed, and a forward pass then adds nothing to it.
    What an operator allocates internally is not seen; fused attention needs little.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._known = {StorageWeakRef(tensor.untyped_storage()) for tensor in known}  # a view of a weight allocates nothing
        self._made: dict[StorageWeakRef, int] = {}

    @property
    def live(self) -> int:
        """Bytes that have not been freed."""
        self._made = {key: size for key, size in self._made.items() if not key.expired()}
        return sum(self._made.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self._count(made)
        return made

    def _count(self, made: Any) -> None:
        """made: a tensor, or nested lists of them."""
        if isinstance(made, list | tuple):
            for part in made:
                self._count(part)
        if not isinstance(made, torch.Tensor):
            return
        storage, live = made.untyped_storage(), self.live  # `live` first: a key is an address, and may have been a freed one's
        if (key := StorageWeakRef(storage)) not in self._known and key not in self._made:
            self._made[key] = storage.nbytes()
            self.peak = max(self.peak, live + storage.nbytes())


def peak_memory(step: Callable[[], Any], pl_module: LightningModule) -> float:
    """Bytes of a module's weights and buffers, plus the most that the call ``step()`` allocates besides them."""
    device, weights = pl_module.device, [*pl_module.parameters(), *pl_module.buffers()]
    size = sum(tensor.nbytes for tensor in weights)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return float(size + torch.cuda.max_memory_allocated(device) - before)
    with AllocatedTensors(weights) as allocated:
        step()
    return float(size + allocated.peak)


def together(ranks: torch.Tensor) -> dict[str, float]:
    """Speed and memory of (ranks, 3) tokens, seconds and MiB: the slowest rank's time, the largest peak."""
    tokens, seconds, peaks = ranks.T
    return {
        "tokens_per_second": round((tokens.sum() / seconds.max()).item(), 1),
        "peak_memory_mib": round(peaks.max().item(), 2),
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def draw_sweep(figure_class: Any, rows: Sequence[dict[str, float]]) -> Any:
    """Perplexity and tokens/s of the latest sweep against length, earlier sweeps in grey; rows as in length_sweep.csv."""
    figure = figure_class(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2)
    labels = {"perplexity": "validation perplexity", "tokens_per_second": "thousand tokens/s (forward pass)"}
    sweeps = {step: list(group) for step, group in itertools.groupby(rows, key=lambda row: row["step"])}
    latest = list(sweeps)[-1]
    for axes, (name, label) in zip(panels, labels.items(), strict=True):
        scale = 1e-3 if name == "tokens_per_second" else 1.0
        for step in thinned(list(sweeps), MOST_CURVES):
            x, y = [row["length"] for row in sweeps[step]], [row[name] * scale for row in sweeps[step]]
            if step == latest:
                axes.plot(x, y, color=COLOURS[0], marker="o", markersize=4, label=f"step {step}")
                below = -13 if name == "perplexity" else 6  # an earlier sweep's perplexity lies above
                for place in zip(x, y, strict=True):
                    axes.annotate(f"{place[1]:.1f}", place, (0, below), textcoords="offset points", ha="center", fontsize=8)
            elif name == "perplexity":  # speed does not change while a model learns
                axes.plot(x, y, marker=".", **QUIET)
                axes.annotate(f"step {step}", (x[-1], y[-1]), (5, 0), textcoords="offset points", va="center", fontsize=7)
        lengths = sorted({row["length"] for row in rows})
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.minorticks_off()
        axes.set(xlabel="length of a row (tokens)", ylabel=label)
        axes.margins(x=0.12, y=0.15)
        if name == "tokens_per_second":
            axes.set_ylim(bottom=0)
        elif len(sweeps) > 1:  # an early perplexity is several times the last
            axes.set_yscale("log")
            plain_numbers(axes.yaxis)
        axes.grid(True, alpha=0.25)
        open_frame(axes)
    panels[0].legend(frameon=False)
    return figure
